"""The transport of weights: by the places of both sides, and by what an engine's processes can do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

from roost.errors import RolloutError
from roost.placement import Placement
from roost.plan import Plan, Sharding, TensorShards, WeightTransport
from roost.topology import Topology
from roost.weights.streams import WeightDescription, WeightStream
from roost.weights.transports import EngineTransfer, group_receivers
from roost.worker.deadline import Deadline

TENSORS = (TensorShards("a", (8, 4), "float32"), TensorShards("b", (4,), "float32"))
TRAINER = Sharding(TENSORS, dp=2, locations=((0, 0), (0, 1)))
SENDER = "roost.engines.sglang.sender:DirectSender"
IPC, BROADCAST = WeightTransport.IPC, WeightTransport.BROADCAST


@dataclass
class Known:
    """An engine, as far as its place and its description go."""

    name: str
    at: tuple[int, int]
    planned: WeightTransport
    description: WeightDescription
    num_members: int = 1
    own: tuple[int, ...] = ()

    def describe(self) -> Any:
        return self

    def wait(self, timeout_s: float) -> list[WeightDescription]:
        return [self.description]

    def transport(self, member: int) -> WeightTransport:
        return self.planned

    def location(self, member: int) -> tuple[int, int]:
        return self.at

    def accelerators(self, member: int) -> tuple[int, ...]:
        return self.own or self.at[1:]


def described(*gpus: str, broadcast: str = "", **more: Any) -> WeightDescription:
    return WeightDescription(TENSORS, gpus=gpus, broadcast=broadcast, **more)


def streams_of(engines: list[Known], gpus: list[tuple[str, ...]], source: Sharding = TRAINER) -> list[WeightStream]:
    made: list[WeightStream] = []
    first = 0
    for group in group_receivers(engines, source, Deadline(60.0)):
        made += EngineTransfer(group, source, gpus).streams(f"c{first}", first)
        first += len(group.members)
    return made


def test_an_engine_on_the_trainers_gpu_reads_it_there_whoever_else_joins_a_broadcast() -> None:
    own = described("B", broadcast="nccl", broadcast_sender=SENDER, broadcast_ranks=2)
    near = Known("near", (0, 1), IPC, own)
    far = Known(
        "far", (1, 0), BROADCAST, described("C", "D", broadcast="nccl", broadcast_sender=SENDER, broadcast_ranks=2)
    )
    by_transport = {stream.transport: stream for stream in streams_of([near, far], [("A",), ("B",)])}
    assert by_transport[IPC].source == 1  # the rank on the same GPU, and not the one that broadcasts
    assert (by_transport[BROADCAST].source, by_transport[BROADCAST].backend, by_transport[BROADCAST].sender) == (
        0,
        "nccl",
        SENDER,
    )
    assert by_transport[BROADCAST].is_direct
    assert (by_transport[BROADCAST].first_ranks, by_transport[BROADCAST].world_size) == ((1,), 3)


def test_nccl_wants_a_gpu_of_its_own_for_everybody() -> None:
    def backends(*gpus: tuple[str, ...]) -> set[str]:
        engines = [Known(f"e{i}", (1, i), BROADCAST, described(*seen)) for i, seen in enumerate(gpus)]
        one = Sharding(TENSORS, locations=((0, 0),))
        return {stream.backend for stream in streams_of(engines, [("A",)], one)}

    assert backends(("B",), ("C",)) == {"nccl"}
    assert backends(("B",), ("B",)) == {"gloo"}  # two on one
    assert backends(("A",)) == {"gloo"}  # the trainer's own
    assert backends(()) == {"gloo"}  # none


def test_processes_that_take_whole_tensors_get_no_parts() -> None:
    cut = Sharding((TensorShards("a", (8, 4), "float32", dim=0), TENSORS[1]), tp=2, locations=((0, 0), (0, 1)))
    picky = Known(
        "picky", (0, 0), IPC, described("A", "B", broadcast="nccl", broadcast_sender=SENDER, takes_pieces=False)
    )
    easy = Known("easy", (0, 0), IPC, described("A", "B"))
    assert {stream.transport for stream in streams_of([picky], [("A",), ("B",)], cut)} == {
        WeightTransport.SHARED_MEMORY
    }
    assert {stream.transport for stream in streams_of([easy], [("A",), ("B",)], cut)} == {IPC}
    picky.planned = BROADCAST
    assert {stream.backend for stream in streams_of([picky], [("A",), ("B",)], cut)} == {"gloo"}


def test_members_that_do_not_fit_the_cut_are_refused() -> None:
    odd = Known("odd", (0, 0), IPC, described(tensor_parallel=3))
    with pytest.raises(RolloutError, match="shards its tensors over 3 members, but it has 1"):
        group_receivers([odd], TRAINER, Deadline(60.0))


@pytest.mark.parametrize(
    ("sizes", "rollout", "machines", "expected"),
    [
        ((1, 1, 1), "0-7", "1x8", {"ipc": "1"}),
        ((1, 1, 2), "0-7:0-3", "1x8", {"ipc": "1"}),
        ((2, 1, 2), "0-7:0-3", "1x8", {"ipc": "1"}),
        ((4, 1, 2), "0-7:0-3", "1x8", {"ipc": "1/2", "shared_memory": "1/2"}),
        ((2, 2, 1), "0-7", "1x8", {"shared_memory": "3/4", "ipc": "1/4"}),
        ((8, 1, 4), "0-15:0-3", "4x4", {"broadcast": "1/2", "ipc": "1/2"}),
    ],
)
def test_the_plan_says_what_each_transport_carries(
    sizes: tuple[int, int, int], rollout: str, machines: str, expected: dict[str, str]
) -> None:
    tp, pp, width = sizes
    last = rollout.partition(":")[0]
    job = {"cluster": {"component_placement": {"actor": last, "rollout": rollout}},
           "actor": {"model": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}},
           "rollout": {"tensor_parallel_size": width}}  # fmt: skip
    plan = Plan.resolve(job, Topology.parse(machines))
    trainers, engines = (plan.component(name).placements for name in ("actor", "rollout"))
    tensors = tuple(
        TensorShards(f"{stage}{name}", (16, 4), "float32", dim=0, stage=stage) for stage in range(pp) for name in "ab"
    )
    locations = tuple((p.cluster_node_rank, p.local_accelerator_rank) for p in trainers)
    source = Sharding(tensors, tp=tp, pp=pp, dp=len(trainers) // (tp * pp), locations=locations)

    def gpus(placement: Placement) -> tuple[str, ...]:
        return tuple(f"GPU-{placement.cluster_node_rank}-{local}" for local in placement.accelerators)

    whole = tuple(TensorShards(tensor.name, tensor.shape, tensor.dtype) for tensor in tensors)
    known = [
        Known(
            str(placement.rank),
            (placement.cluster_node_rank, placement.local_accelerator_rank),
            plan.component("rollout").transports[placement.rank],
            WeightDescription(whole, gpus=gpus(placement)),
            own=placement.accelerators,
        )
        for placement in engines
    ]
    streams = streams_of(known, [gpus(placement)[:1] for placement in trainers], source)
    for rank in range(len(engines)):
        sent: dict[WeightTransport, int] = {}
        for stream in streams:
            if rank in stream.targets:
                nbytes = sum(piece.nbytes for piece in stream.pieces)
                sent[stream.transport] = sent.get(stream.transport, 0) + nbytes
        total = sum(sent.values())
        shares = plan.transport_shares("rollout", rank)
        assert shares == {kind: Fraction(nbytes, total) for kind, nbytes in sent.items()}
        assert {kind.value: str(share) for kind, share in shares.items()} == expected
        assert json.loads(plan.to_json())["components"][1]["processes"][rank].get("weights_by", expected) == expected
    assert Plan.from_json(plan.to_json()) == plan

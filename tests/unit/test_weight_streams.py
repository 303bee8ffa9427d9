"""Weights over every transport, between ranks that are threads here: bit for bit, whatever the cuts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.plan import Sharding, TensorShards, WeightTransport, plan_transfer
from roost.plan.shards import intervals_of
from roost.weights.collective import _buckets
from roost.weights.endpoints import WeightReceiver, WeightSender
from roost.weights.files import publish_version
from roost.weights.shard_files import plan_files
from roost.weights.streams import ALIGNMENT, make_streams

SHARED, BROADCAST, FILE = WeightTransport.SHARED_MEMORY, WeightTransport.BROADCAST, WeightTransport.FILE


def whole_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "rows": torch.randn(8, 6),
        "columns": torch.randn(4, 8).to(torch.bfloat16),
        "norm": torch.randn(5),
        "steps": torch.tensor(7 + seed),
        "mask": torch.rand(3, 3) > 0.5,
    }


def described(
    tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, int], stages: int = 1
) -> tuple[TensorShards, ...]:
    return tuple(
        TensorShards(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), cuts.get(name), stage=i % stages)
        for i, (name, t) in enumerate(tensors.items())
    )


def own_part(side: Sharding, rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a rank holds of the whole tensors."""
    tp, stage, _ = side.coordinates(rank)
    own = {}
    for shards in side.tensors:
        if shards.stage != stage:
            continue
        tensor = tensors[shards.name]
        if shards.dim is not None:
            start, stop = intervals_of(shards, side.tp)[tp]
            tensor = tensor.narrow(shards.dim, start, stop - start)
        own[shards.name] = tensor.clone()
    return own


class Job:
    """Senders and receivers of one plan, each called from a thread of its own."""

    def __init__(self, source: Sharding, target: Sharding, kinds: Sequence[WeightTransport], folder: Path) -> None:
        self.source, self.target, self.folder = source, target, str(folder)
        flow = plan_transfer(source, target)
        self.streams = make_streams(flow, lambda sender, receiver: kinds[receiver % len(kinds)])
        self.files = plan_files(source) if any(c.transport is FILE for c in self.streams) else []
        shards = {shard.rank: shard for shard in self.files}
        sent = [stream for stream in self.streams if stream.transport is not FILE]
        self.senders = [
            WeightSender([c for c in sent if c.source == rank], shards.get(rank), "127.0.0.1", self.folder, 20.0)
            for rank in range(source.world_size)
        ]
        addresses: dict[str, object] = dict.fromkeys([c.id for c in self.streams], self.folder)
        addresses |= {key: value for sender in self.senders for key, value in sender.addresses.items()}
        self.receivers: dict[int, WeightReceiver] = {}

        def receive(rank: int) -> None:
            read = [c for c in self.streams if rank in c.targets]
            self.receivers[rank] = WeightReceiver(read, addresses, rank, "127.0.0.1", 20.0)

        together(
            [sender.join for sender in self.senders] + [lambda r=rank: receive(r) for rank in range(target.world_size)]
        )

    def sync(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        sends: list[Callable[[], object]] = [
            lambda s=sender, r=rank: s.send(lambda: own_part(self.source, r, tensors), version)
            for rank, sender in enumerate(self.senders)
        ]
        receives: list[Callable[[], object]] = [lambda r=r: r.receive(version) for r in self.receivers.values()]
        together(sends + receives)
        if self.files:
            together([lambda s=sender: s.join_pieces(version) for sender in self.senders])
            publish_version(self.folder, version, self.files)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for rank, receiver in self.receivers.items():
            staged, wanted = receiver.staged(), own_part(self.target, rank, tensors)
            assert staged.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert staged[name].dtype == tensor.dtype
                assert torch.equal(staged[name], tensor), name

    def close(self) -> None:
        together([end.close for end in (*self.senders, *self.receivers.values())])


def together(actions: Sequence[Callable[[], object]]) -> None:
    errors: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "somebody waits in vain"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("kinds", [[SHARED], [BROADCAST], [FILE], [SHARED, BROADCAST, FILE]], ids=str)
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_every_transport_is_exact(kinds: list[WeightTransport], source_tp: int, target_tp: int, tmp_path: Path) -> None:
    tensors = whole_tensors()
    cuts = {"rows": 0, "columns": 1}
    source = Sharding(described(tensors, cuts), tp=source_tp, dp=2)
    target = Sharding(described(tensors, cuts), tp=target_tp, dp=2, order="tp-pp-dp")
    job = Job(source, target, kinds, tmp_path)
    for version in (1, 2, 3):
        tensors = whole_tensors(version)
        job.sync(tensors, version)
        job.check(tensors)
    job.close()


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 4])] * 2, st.integers(1, 2), st.integers(1, 3), st.integers(1, 2)),
    dims=st.tuples(st.sampled_from([None, 0, 1]), st.sampled_from([None, 0, 1])),
)
def test_any_pair_of_sizes_and_cuts(
    tmp_path_factory: pytest.TempPathFactory, sizes: tuple[int, ...], dims: tuple[int | None, int | None]
) -> None:
    source_tp, target_tp, source_dp, target_dp, stages = sizes
    tensors = {"a": torch.randn(8, 4), "b": torch.randn(4, 12), "c": torch.randn(2)}

    def cuts(dim: int | None) -> dict[str, int]:
        return {} if dim is None else {"a": dim, "b": dim}

    source = Sharding(described(tensors, cuts(dims[0]), stages), tp=source_tp, pp=stages, dp=source_dp)
    target = Sharding(described(tensors, cuts(dims[1])), tp=target_tp, dp=target_dp, order="tp-pp-dp")
    job = Job(source, target, [SHARED, BROADCAST, FILE], tmp_path_factory.mktemp("weights"))
    job.sync(tensors, 1)
    job.check(tensors)
    job.close()


def test_receivers_that_want_the_same_share_a_channel() -> None:
    tensors = described(whole_tensors(), {})
    flow = plan_transfer(Sharding(tensors), Sharding(tensors, dp=5))
    streams = make_streams(flow, lambda sender, receiver: SHARED if receiver < 2 else BROADCAST, first_target=10)
    assert [(c.transport, c.targets) for c in streams] == [(SHARED, (10, 11)), (BROADCAST, (12, 13, 14))]
    assert all(piece.offset % ALIGNMENT == 0 for piece in streams[0].pieces)


def test_buckets_hold_runs_of_pieces() -> None:
    tensors = tuple(TensorShards(str(i), (size,), "uint8") for i, size in enumerate((100, 10, 300, 0, 20)))
    [stream] = make_streams(plan_transfer(Sharding(tensors), Sharding(tensors)), lambda *_: BROADCAST)
    buckets = _buckets(stream.pieces, size=160)
    assert [[piece.name for piece in pieces] for _, _, pieces in buckets] == [["0", "1"], ["2"], ["4"]]
    assert [(start, stop) for start, stop, _ in buckets] == [(0, 138), (192, 492), (512, 532)]


def test_a_sender_that_fails_lets_nobody_wait(tmp_path: Path) -> None:
    tensors = whole_tensors()
    side = Sharding(described(tensors, {}))
    job = Job(side, Sharding(side.tensors, dp=2), [BROADCAST], tmp_path)
    job.sync(tensors, 1)

    def broken() -> Mapping[str, torch.Tensor]:
        raise ValueError("no weights today")

    failures: list[str] = []

    def fails(action: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises((RuntimeError, ValueError)) as caught:
                action()
            failures.append(str(caught.value))

        return run

    together(
        [fails(lambda: job.senders[0].send(broken, 2))]
        + [fails(lambda r=r: r.receive(2)) for r in job.receivers.values()]
    )
    assert len(failures) == 3
    assert any("no weights today" in failure for failure in failures)


def test_shared_memory_has_no_name_and_ends_with_its_users(tmp_path: Path) -> None:
    side = Sharding(described(whole_tensors(), {}))
    job = Job(side, side, [SHARED], tmp_path)
    address = job.senders[0].addresses[job.streams[0].id]
    assert "memfd:" in str(Path(address).readlink())
    job.close()
    assert not Path(address).exists()

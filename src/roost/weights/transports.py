"""The transport between each rank of a trainer and each engine, from their locations and the engines' abilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from roost.errors import Finding, RolloutError
from roost.plan import Sharding, TensorShards, WeightTransport
from roost.plan.transport import NEAR, used_transport
from roost.weights.parties import SyncEngine
from roost.weights.streams import WeightDescription, WeightStream
from roost.worker.deadline import Deadline

__all__ = ["ReceiverGroup", "TransportSelector", "group_engines"]


@dataclass
class ReceiverGroup:
    """Receivers with the same sharding and the same kind of process group, for one transfer plan.

    Attributes:
        description: Description of their weights, without GPUs.
        is_far: Whether the plan's transport is a broadcast.
        members: Engine and member of each receiver.
        gpus: UUIDs of the GPUs that each receiver sees.
    """

    description: WeightDescription
    is_far: bool
    members: list[tuple[SyncEngine, int]] = field(default_factory=list)
    gpus: list[tuple[str, ...]] = field(default_factory=list)

    def sharding(self) -> Sharding:
        """Return the receivers' side of the transfer plan."""
        tp = self.description.tensor_parallel
        locations = tuple(engine.location(member) for engine, member in self.members)
        return Sharding(
            self.description.tensors,
            tp=tp,
            dp=len(self.members) // tp,
            order="tp-pp-dp",
            locations=locations,
            reachable=tuple(engine.accelerators(member) for engine, member in self.members),
        )


class TransportSelector:
    """The choice of transports from a trainer to a group of receivers.

    Args:
        receivers: The receivers.
        source: Sharding of the trainer.
        gpus: UUIDs of the GPUs that hold the weights of each rank of the trainer.

    Attributes:
        source: Sharding of the ranks that send: the trainer's, or one rank where the engines' own processes join the
            broadcast.
    """

    def __init__(self, receivers: ReceiverGroup, source: Sharding, gpus: Sequence[tuple[str, ...]]) -> None:
        described = receivers.description
        is_whole = source.tp == 1 and source.pp == 1
        self._direct = described.broadcast if is_whole and receivers.is_far else ""
        self._can_map = described.takes_pieces or source.tp == 1
        self._receivers = receivers
        self._gpus = gpus
        self.source = source
        if self._direct:
            self.source = replace(source, dp=1, locations=source.locations[:1])

    def transport(self, sender: int, receiver: int) -> WeightTransport:
        """Return the transport from a rank of the trainer to a receiver.

        It is the plan's transport, but a transport within a node is only used where both are on the same node.
        """
        engine, member = self._receivers.members[receiver]
        planned, location = engine.transport(member), engine.location(member)
        if planned not in NEAR:
            return planned
        own = set(self._gpus[sender])
        can_map = bool(own) and member == 0 and self._can_map and own <= set(self._receivers.gpus[receiver])
        return used_transport(planned, self.source.locations[sender][0] == location[0], can_map)

    def with_process_group(self, stream: WeightStream, first: int) -> WeightStream:
        """Return a broadcast stream with the parameters of its process group, other streams unchanged.

        Args:
            stream: The stream.
            first: Number of this group's first receiver among all receivers.
        """
        if stream.transport is not WeightTransport.BROADCAST:
            return stream
        each = self._receivers.description.broadcast_ranks if self._direct else 1
        ranks = tuple(range(1, 1 + each * len(stream.targets), each))
        backend = self._direct or ("nccl" if self._has_own_gpus(stream, first) else "gloo")
        sender = self._receivers.description.broadcast_sender if self._direct else ""
        world_size = 1 + each * len(stream.targets)
        return replace(stream, backend=backend, sender=sender, first_ranks=ranks, world_size=world_size)

    def _has_own_gpus(self, stream: WeightStream, first: int) -> bool:
        """Return whether sender and receivers have different GPUs, as NCCL requires.

        The worker of an engine that runs as another program uses no GPU: the program does.
        """
        if self._receivers.description.broadcast:
            return False
        used = [self._gpus[stream.source][:1], *(self._receivers.gpus[rank - first][:1] for rank in stream.targets)]
        return all(used) and len(set(used)) == len(used)


def group_engines(engines: Sequence[SyncEngine], source: Sharding, deadline: Deadline) -> list[ReceiverGroup]:
    """Ask engines for their weights; return them grouped by sharding and distance. Blocks until all have answered."""
    results = [engine.describe() for engine in engines]
    groups: dict[tuple[WeightDescription, bool], ReceiverGroup] = {}
    for engine, result in zip(engines, results, strict=True):
        described = (
            result.wait(deadline.left_s())[0] if result is not None else WeightDescription(_whole(source.tensors))
        )
        tp = described.tensor_parallel
        if tp not in (1, engine.num_members):
            message = f"{engine.name}: the engine shards its tensors over {tp} members, but it has {engine.num_members}"
            raise RolloutError([Finding("S202", message)])
        alike, is_far = replace(described, gpus=()), engine.transport(0) is WeightTransport.BROADCAST
        group = groups.setdefault((alike, is_far), ReceiverGroup(alike, is_far))
        group.members += [(engine, member) for member in range(tp)]
        group.gpus += [described.gpus] * tp
    return list(groups.values())


def _whole(tensors: Sequence[TensorShards]) -> tuple[TensorShards, ...]:
    """Return the same tensors without sharding."""
    return tuple(TensorShards(tensor.name, tensor.shape, tensor.dtype) for tensor in tensors)

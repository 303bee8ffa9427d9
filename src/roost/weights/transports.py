"""Weight transfers to engines that are running: the plan's schedule of each group, and the streams that execute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from roost.errors import Finding, RolloutError
from roost.plan import Sharding, TensorShards, WeightTransport
from roost.plan.schedule import Receiver, Sender, TransferSchedule
from roost.weights.parties import SyncEngine
from roost.weights.streams import WeightDescription, WeightStream, make_streams
from roost.worker.deadline import Deadline

__all__ = ["EngineTransfer", "ReceiverGroup", "group_receivers"]


@dataclass
class ReceiverGroup:
    """Receivers that one schedule can serve: they shard their tensors in the same way, and join the same broadcasts.

    Attributes:
        description: What each of them reports, without its GPUs.
        is_far: Whether the plan's transport to them is a broadcast.
        members: Engine and member number of each receiver.
        gpus: UUIDs of the GPUs that each receiver sees.
    """

    description: WeightDescription
    is_far: bool
    members: list[tuple[SyncEngine, int]] = field(default_factory=list)
    gpus: list[tuple[str, ...]] = field(default_factory=list)

    def sharding(self) -> Sharding:
        """Return the receivers' side of the transfer."""
        tp = self.description.tensor_parallel
        return Sharding(
            self.description.tensors,
            tp=tp,
            dp=len(self.members) // tp,
            order="tp-pp-dp",
            locations=tuple(engine.location(member) for engine, member in self.members),
            reachable=tuple(engine.accelerators(member) for engine, member in self.members),
        )


class EngineTransfer:
    """The transfer of weights from a trainer to one group of receivers.

    Attributes:
        schedule: Which trainer rank sends what to which receiver, and by which transport. In a broadcast that the
            engines' own processes join, one trainer rank is the only sender.
    """

    def __init__(self, group: ReceiverGroup, source: Sharding, gpus: Sequence[tuple[str, ...]]) -> None:
        """Make the schedule.

        Args:
            group: The receivers.
            source: The trainer's side.
            gpus: UUIDs of the GPUs that hold the weights of each trainer rank.
        """
        described = group.description
        is_whole = source.tp == 1 and source.pp == 1
        self._direct_backend = described.broadcast if is_whole and group.is_far else ""
        self._group = group
        self._gpus = gpus
        if self._direct_backend:
            source = replace(source, dp=1, locations=source.locations[:1])
        can_map = described.takes_pieces or source.tp == 1
        receivers = tuple(
            Receiver(
                engine.location(member)[0],
                engine.transport(member),
                frozenset(seen) if can_map and member == 0 else frozenset(),
            )
            for (engine, member), seen in zip(group.members, group.gpus, strict=True)
        )
        senders = tuple(Sender(node, frozenset(held)) for (node, _), held in zip(source.locations, gpus, strict=False))
        self.schedule = TransferSchedule(source, group.sharding(), senders, receivers)

    def streams(self, prefix: str, first: int) -> list[WeightStream]:
        """Return the streams that execute the schedule.

        Args:
            prefix: Start of the streams' ids.
            first: Number of the first receiver; receivers are counted from there.

        Raises:
            PlacementError: If the trainer's tensors do not match those of the receivers.
        """
        made = make_streams(self.schedule.transfer, self.schedule.transport, prefix, first)
        return [self._with_group(stream, first) for stream in made]

    def _with_group(self, stream: WeightStream, first: int) -> WeightStream:
        """Return a broadcast stream with its process group: the backend and the ranks. Other streams need none."""
        if stream.transport is not WeightTransport.BROADCAST:
            return stream
        each = self._group.description.broadcast_ranks if self._direct_backend else 1
        ranks = tuple(range(1, 1 + each * len(stream.targets), each))
        backend = self._direct_backend or ("nccl" if self._has_own_gpus(stream, first) else "gloo")
        sender = self._group.description.broadcast_sender if self._direct_backend else ""
        world_size = 1 + each * len(stream.targets)
        return replace(stream, backend=backend, sender=sender, first_ranks=ranks, world_size=world_size)

    def _has_own_gpus(self, stream: WeightStream, first: int) -> bool:
        """Return whether the sender and all receivers have a GPU each that no other has, which NCCL requires.

        The workers of engines that are separate programs have no GPU: the memory belongs to the program.
        """
        if self._group.description.broadcast:
            return False
        used = [self._gpus[stream.source][:1], *(self._group.gpus[rank - first][:1] for rank in stream.targets)]
        return all(used) and len(set(used)) == len(used)


def group_receivers(engines: Sequence[SyncEngine], source: Sharding, deadline: Deadline) -> list[ReceiverGroup]:
    """Ask the engines for their descriptions, and group those that shard the same tensors in the same way.

    Raises:
        RolloutError: If an engine shards its tensors over another number of members than it has (S202).
    """
    asked = [engine.describe() for engine in engines]
    groups: dict[tuple[WeightDescription, bool], ReceiverGroup] = {}
    for engine, result in zip(engines, asked, strict=True):
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

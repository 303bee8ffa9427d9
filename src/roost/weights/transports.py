"""Which way weights go from a trainer to engines: by where both are, and by what the engines' processes can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from roost.errors import Finding, RolloutError
from roost.plan import Sharding, TensorShards, WeightTransport
from roost.plan.transport import NEAR, used_transport
from roost.weights.channels import Channel, WeightDescription
from roost.worker.deadline import Deadline

if TYPE_CHECKING:
    from roost.engines.handles import EngineHandle

__all__ = ["Targets", "Way", "sort_engines"]


@dataclass
class Targets:
    """Receivers that can be planned for at once: they cut their tensors in the same way, and join broadcasts alike."""

    description: WeightDescription
    is_far: bool
    members: list[tuple[EngineHandle, int]] = field(default_factory=list)
    gpus: list[tuple[str, ...]] = field(default_factory=list)

    def sharding(self) -> Sharding:
        """Their side of the transfer."""
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


class Way:
    """How weights get from a trainer to some engines.

    Attributes:
        source: The trainer's side; of a broadcast that engines' own processes join, one rank of it.
    """

    def __init__(self, targets: Targets, source: Sharding, gpus: Sequence[tuple[str, ...]]) -> None:
        described = targets.description
        is_whole = source.tp == 1 and source.pp == 1
        self._direct = described.broadcast if is_whole and targets.is_far else ""
        self._can_map = described.takes_pieces or source.tp == 1
        self._targets = targets
        self._gpus = gpus
        self.source = source
        if self._direct:
            self.source = replace(source, dp=1, locations=source.locations[:1])

    def kind(self, sender: int, target: int) -> WeightTransport:
        """The transport from a rank of the trainer to a receiver: what was planned, where both are on one node."""
        engine, member = self._targets.members[target]
        planned, location = engine.transport(member), engine.location(member)
        if planned not in NEAR:
            return planned
        own = set(self._gpus[sender])
        can_map = bool(own) and member == 0 and self._can_map and own <= set(self._targets.gpus[target])
        return used_transport(planned, self.source.locations[sender][0] == location[0], can_map)

    def carried(self, channel: Channel, first: int) -> Channel:
        """A channel that knows what carries it; receivers are counted from ``first``."""
        if channel.kind is not WeightTransport.BROADCAST:
            return channel
        each = self._targets.description.broadcast_ranks if self._direct else 1
        ranks = tuple(range(1, 1 + each * len(channel.targets), each))
        backend = self._direct or ("nccl" if self._has_own_gpus(channel, first) else "gloo")
        sender = self._targets.description.broadcast_sender if self._direct else ""
        world_size = 1 + each * len(channel.targets)
        return replace(channel, backend=backend, sender=sender, first_ranks=ranks, world_size=world_size)

    def _has_own_gpus(self, channel: Channel, first: int) -> bool:
        """Whether the sender and all receivers have a GPU each that no other has: NCCL wants that.

        The workers of engines that are programs of their own have none: the memory is the program's.
        """
        if self._targets.description.broadcast:
            return False
        used = [self._gpus[channel.source][:1], *(self._targets.gpus[rank - first][:1] for rank in channel.targets)]
        return all(used) and len(set(used)) == len(used)


def sort_engines(engines: Sequence[EngineHandle], source: Sharding, deadline: Deadline) -> list[Targets]:
    """Engines that take the same tensors cut in the same way, together."""
    asked = [engine.describe() for engine in engines]
    classes: dict[tuple[WeightDescription, bool], Targets] = {}
    for engine, result in zip(engines, asked, strict=True):
        described = (
            result.wait(deadline.left_s())[0] if result is not None else WeightDescription(_whole(source.tensors))
        )
        tp = described.tensor_parallel
        if tp not in (1, engine.num_members):
            message = f"{engine.name}: the engine cuts its tensors over {tp} members, and has {engine.num_members}"
            raise RolloutError([Finding("S202", message)])
        alike, is_far = replace(described, gpus=()), engine.transport(0) is WeightTransport.BROADCAST
        targets = classes.setdefault((alike, is_far), Targets(alike, is_far))
        targets.members += [(engine, member) for member in range(tp)]
        targets.gpus += [described.gpus] * tp
    return list(classes.values())


def _whole(tensors: Sequence[TensorShards]) -> tuple[TensorShards, ...]:
    """The same tensors, uncut."""
    return tuple(TensorShards(tensor.name, tensor.shape, tensor.dtype) for tensor in tensors)

"""The transfer schedule: how many bytes each trainer rank sends to each receiver, and by which transport.

Weight sync executes a schedule, and reports show one; :meth:`TransferSchedule.transport` is the only place that
decides a transport. A plan makes its schedules from the places of the processes, before anything is known of the
model (:mod:`roost.plan.planned_schedules`). Weight sync makes its schedules from the tensors and the GPUs that the
running processes report.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from roost.plan.routes import Distance
from roost.plan.shards import ITEM_BYTES, Sharding
from roost.plan.transfer import TransferPlan, plan_transfer
from roost.plan.transport import NEAR, BytesByTransport, WeightTransport

__all__ = ["Receiver", "ScheduledTransfer", "Sender", "TransferSchedule"]


class Sender(NamedTuple):
    """A rank of the trainer.

    Attributes:
        node_rank: Its node.
        accelerators: Ids of the accelerators that hold its weights; empty if host memory holds them. Any ids that
            are the same for senders and receivers: UUIDs, or (node rank, local rank).
    """

    node_rank: int
    accelerators: frozenset[Hashable] = frozenset()


class Receiver(NamedTuple):
    """A process that receives weights.

    Attributes:
        node_rank: Its node.
        planned: The best transport that its place allows, as the plan says.
        accelerators: Ids of the accelerators whose memory it can map; empty if it can map none.
    """

    node_rank: int
    planned: WeightTransport
    accelerators: frozenset[Hashable] = frozenset()


class ScheduledTransfer(NamedTuple):
    """What one sender sends to one receiver.

    Attributes:
        sender: Rank of the sender.
        receiver: Rank of the receiver on the target side.
        transport: What carries the bytes.
        distance: ``"same"`` accelerator, same ``"node"``, or ``"network"``.
        nbytes: Number of bytes.
    """

    sender: int
    receiver: int
    transport: WeightTransport
    distance: Distance
    nbytes: int


@dataclass(frozen=True)
class TransferSchedule:
    """Every transfer from the ranks of a trainer to some receivers.

    Attributes:
        source: The trainer's side, with its tensors.
        target: The receivers' side.
        senders: The ranks of the source.
        receivers: The ranks of the target.
    """

    source: Sharding
    target: Sharding
    senders: tuple[Sender, ...]
    receivers: tuple[Receiver, ...]

    @cached_property
    def transfer(self) -> TransferPlan:
        """Which sender sends which box of which tensor to which receiver.

        Raises:
            PlacementError: If the source cannot serve the target; with all problems.
        """
        return plan_transfer(self.source, self.target)

    def transport(self, sender: int, receiver: int) -> WeightTransport:
        """Return the transport from a sender to a receiver.

        A receiver whose planned transport is one within a node gets it only from senders on that node, and CUDA IPC
        only from senders on accelerators whose memory it can map: nothing is gathered on accelerators beforehand.
        """
        held, to = self.senders[sender], self.receivers[receiver]
        if to.planned not in NEAR:
            return to.planned
        if held.node_rank != to.node_rank:
            return WeightTransport.BROADCAST
        can_map = bool(held.accelerators) and held.accelerators <= to.accelerators
        return WeightTransport.IPC if can_map and to.planned is WeightTransport.IPC else WeightTransport.SHARED_MEMORY

    @cached_property
    def entries(self) -> tuple[ScheduledTransfer, ...]:
        """One entry per pair of a sender and a receiver, ordered by receiver and then by sender."""
        nbytes: dict[tuple[int, int, Distance], int] = {}
        for part, part_bytes in self.transfer.bundles:
            for route in part.routes:
                for target_replica, source_replica in route.pairs():
                    sender = self.source.rank_of(part.source_tp, part.source_stage, source_replica)
                    receiver = self.target.rank_of(part.target_tp, part.target_stage, target_replica)
                    key = (receiver, sender, route.distance)
                    nbytes[key] = nbytes.get(key, 0) + part_bytes
        return tuple(
            ScheduledTransfer(sender, receiver, self.transport(sender, receiver), distance, count)
            for (receiver, sender, distance), count in sorted(nbytes.items())
        )

    def bytes_by_transport(self) -> tuple[BytesByTransport, ...]:
        """Return for each receiver the bytes that each transport carries, the largest number first."""
        if all(receiver.planned not in NEAR for receiver in self.receivers):  # spares large plans the single entries
            total = sum(prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in self.target.tensors)
            return tuple({receiver.planned: total} for receiver in self.receivers)
        counts: list[dict[WeightTransport, int]] = [{} for _ in self.receivers]
        for entry in self.entries:
            of_receiver = counts[entry.receiver]
            of_receiver[entry.transport] = of_receiver.get(entry.transport, 0) + entry.nbytes
        return tuple(dict(sorted(count.items(), key=lambda item: (-item[1], item[0].value))) for count in counts)

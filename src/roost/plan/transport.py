"""Transports that carry weights from a trainer to rollout processes, and the best one that a process's place allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from math import gcd

from roost.placement import Placement

__all__ = ["NEAR", "BytesByTransport", "TransportChooser", "WeightTransport", "share_text", "transports_text"]


class WeightTransport(Enum):
    """How weights get from a trainer to an engine."""

    IPC = "ipc"
    """CUDA IPC, or its counterpart of another vendor: the engine maps memory of the trainer on a shared accelerator."""
    SHARED_MEMORY = "shared_memory"
    """Host memory that trainer and engine share on one node."""
    BROADCAST = "broadcast"
    """A collective over NVLink or the network, to other accelerators."""
    FILE = "file"
    """Files, where trainer and engine have accelerators of different vendors and so no collective in common."""


NEAR = (WeightTransport.IPC, WeightTransport.SHARED_MEMORY)
"""Transports within a node. The receiver reads them without waiting for the sender."""


BytesByTransport = Mapping[WeightTransport, int]
"""Bytes of a receiver by transport, the largest number first."""


def share_text(part: int, total: int) -> str:
    """Return such as ``1/2``, in lowest terms. ``fractions`` would do, and takes as long to load as this room."""
    divisor = gcd(part, total)
    return f"{part // divisor}/{total // divisor}"


def transports_text(sizes: BytesByTransport) -> str:
    """Return such as ``ipc`` or ``1/2 ipc, 1/2 shared_memory``."""
    if len(sizes) == 1:
        return next(iter(sizes)).value
    total = sum(sizes.values())
    return ", ".join(f"{share_text(size, total)} {transport.value}" for transport, size in sizes.items())


class TransportChooser:
    """Chooses the best transport of each rollout process from the nodes and accelerators of the trainer.

    How much of a process's weights this transport carries depends on which trainer ranks hold them: see
    :class:`~roost.plan.schedule.TransferSchedule`.
    """

    def __init__(self, trainer: Sequence[Placement]) -> None:
        self._accelerators_by_node: dict[int, set[int]] = {}
        self._vendors = set()
        for placement in trainer:
            on_node = self._accelerators_by_node.setdefault(placement.cluster_node_rank, set())
            on_node.update(placement.accelerators)
            self._vendors.add(placement.accelerator_type)

    def choose(self, rollout: Sequence[Placement]) -> tuple[WeightTransport, ...]:
        """Return the transport of each rollout process; an empty tuple without a trainer."""
        return tuple(map(self._choose, rollout)) if self._accelerators_by_node else ()

    def _choose(self, placement: Placement) -> WeightTransport:
        own = placement.accelerators
        of_trainer = self._accelerators_by_node.get(placement.cluster_node_rank)
        if own and of_trainer is not None and of_trainer.issuperset(own):
            return WeightTransport.IPC
        if not own and of_trainer is not None:
            return WeightTransport.SHARED_MEMORY
        if own and placement.accelerator_type not in self._vendors:
            return WeightTransport.FILE
        return WeightTransport.BROADCAST

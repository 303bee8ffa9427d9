"""Transports that carry weights from a trainer to rollout processes, and the best one that a process's place allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from fractions import Fraction

from roost.placement import Placement

__all__ = ["NEAR", "Shares", "TransportChooser", "WeightTransport", "shares_text"]


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


Shares = Mapping[WeightTransport, Fraction]
"""Share of a receiver's bytes by transport, the largest first. The shares add up to 1."""


def shares_text(shares: Shares) -> str:
    """Return text such as ``ipc`` or ``1/2 ipc, 1/2 shared_memory``."""
    if len(shares) == 1:
        return next(iter(shares)).value
    return ", ".join(f"{share} {transport.value}" for transport, share in shares.items())


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

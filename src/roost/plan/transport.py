"""How weights get from the trainer to each rollout process, by physical overlap."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from roost.placement import Placement

__all__ = ["TransportChooser", "WeightTransport"]


class WeightTransport(Enum):
    """A way for weights from trainer to engine."""

    IPC = "ipc"
    """The same accelerators: handed over in place, by CUDA IPC or the vendor's twin."""
    SHARED_MEMORY = "shared_memory"
    """Processes without accelerators on a node of the trainer."""
    BROADCAST = "broadcast"
    """Other accelerators: a collective over NVLink or the network."""
    FILE = "file"
    """No collective in common: accelerators of different vendors."""


class TransportChooser:
    """Chooses the transport of rollout processes, by the accelerators and nodes of the trainer."""

    def __init__(self, trainer: Sequence[Placement]) -> None:
        self._trained: dict[int, set[int]] = {}
        self._vendors = set()
        for placement in trainer:
            self._trained.setdefault(placement.cluster_node_rank, set()).update(placement.accelerators)
            self._vendors.add(placement.accelerator_type)

    def choose(self, rollout: Sequence[Placement]) -> tuple[WeightTransport, ...]:
        """Return the transport of each rollout process; empty where there is no trainer."""
        return tuple(map(self._choose, rollout)) if self._trained else ()

    def _choose(self, placement: Placement) -> WeightTransport:
        own = placement.accelerators
        here = self._trained.get(placement.cluster_node_rank)
        if own and here is not None and here.issuperset(own):
            return WeightTransport.IPC
        if not own and here is not None:
            return WeightTransport.SHARED_MEMORY
        if own and placement.accelerator_type not in self._vendors:
            return WeightTransport.FILE
        return WeightTransport.BROADCAST

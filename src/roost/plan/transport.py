"""How weights get from the trainer to each rollout process, by physical overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from fractions import Fraction

from roost.placement import Placement

__all__ = ["NEAR", "Shares", "TransportChooser", "WeightTransport", "shares_text", "used_transport"]


class WeightTransport(Enum):
    """A way for weights from trainer to engine."""

    IPC = "ipc"
    """The same accelerators: what is on the engine's own is handed over in place, by CUDA IPC or the vendor's twin."""
    SHARED_MEMORY = "shared_memory"
    """Processes without accelerators on a node of the trainer."""
    BROADCAST = "broadcast"
    """Other accelerators: a collective over NVLink or the network."""
    FILE = "file"
    """No collective in common: accelerators of different vendors."""


NEAR = (WeightTransport.IPC, WeightTransport.SHARED_MEMORY)
"""Transports within a node. A receiver can read what comes by them without waiting for the sender."""


Shares = Mapping[WeightTransport, Fraction]
"""Parts of an engine's bytes by transport, the largest first; together they are 1."""


def shares_text(shares: Shares) -> str:
    """Return such as ``ipc`` or ``1/2 ipc, 1/2 shared_memory``."""
    if len(shares) == 1:
        return next(iter(shares)).value
    return ", ".join(f"{share} {transport.value}" for transport, share in shares.items())


def used_transport(planned: WeightTransport, is_same_node: bool, is_on_own_accelerator: bool) -> WeightTransport:
    """Return how a rank of the trainer sends to an engine whose planned transport is one within a node.

    Args:
        planned: The engine's transport in the plan.
        is_same_node: Whether the rank is on the engine's node.
        is_on_own_accelerator: Whether the rank's weights are on an accelerator that the engine's process has, and
            the process can take them there.
    """
    if not is_same_node:
        return WeightTransport.BROADCAST
    if planned is WeightTransport.IPC and is_on_own_accelerator:
        return WeightTransport.IPC
    return WeightTransport.SHARED_MEMORY


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

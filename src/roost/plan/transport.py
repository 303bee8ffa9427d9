"""How weights get from the trainer to each rollout process, by physical overlap."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from roost.placement import Placement

__all__ = ["WeightTransport", "choose_transports"]


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


def choose_transports(trainer: Sequence[Placement], rollout: Sequence[Placement]) -> tuple[WeightTransport, ...]:
    """The transport of each rollout process; empty where there is no trainer."""
    if not trainer:
        return ()
    trained: dict[int, set[int]] = {}
    vendors = set()
    for placement in trainer:
        trained.setdefault(placement.cluster_node_rank, set()).update(placement.accelerators)
        vendors.add(placement.accelerator_type)
    chosen = []
    for placement in rollout:
        own = placement.accelerators
        here = trained.get(placement.cluster_node_rank)
        if own and here is not None and here.issuperset(own):
            chosen.append(WeightTransport.IPC)
        elif not own and here is not None:
            chosen.append(WeightTransport.SHARED_MEMORY)
        elif own and placement.accelerator_type not in vendors:
            chosen.append(WeightTransport.FILE)
        else:
            chosen.append(WeightTransport.BROADCAST)
    return tuple(chosen)

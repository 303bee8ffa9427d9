"""The nodes of a job on Ray: find, measure, order and reserve them, and lease ports.

Names load on first use, so ``runtime_folder`` and ``ports`` work without importing Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from roost.cluster.version import check_ray

check_ray()

if TYPE_CHECKING:
    from roost.cluster.bundles import Bundles as Bundles
    from roost.cluster.cluster import Cluster as Cluster
    from roost.cluster.managers import CollectiveManager as CollectiveManager
    from roost.cluster.managers import NodeManager as NodeManager
    from roost.cluster.managers import WorkerManager as WorkerManager
    from roost.cluster.nodes import NodeInfo as NodeInfo
    from roost.cluster.ports import PortLease as PortLease
    from roost.cluster.ports import lease_ports as lease_ports

_MODULES = {
    "Bundles": "bundles",
    "Cluster": "cluster",
    "CollectiveManager": "managers",
    "NodeInfo": "nodes",
    "NodeManager": "managers",
    "PortLease": "ports",
    "WorkerManager": "managers",
    "lease_ports": "ports",
}

__all__ = [
    "Bundles",
    "Cluster",
    "CollectiveManager",
    "NodeInfo",
    "NodeManager",
    "PortLease",
    "WorkerManager",
    "lease_ports",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value

"""The only place that talks to Ray about machines: find, order, reserve, hold ports."""

from roost.cluster.version import check_ray

check_ray()

from roost.cluster.bundles import Bundles  # noqa: E402
from roost.cluster.cluster import Cluster  # noqa: E402
from roost.cluster.managers import CollectiveManager, NodeManager, WorkerManager  # noqa: E402
from roost.cluster.nodes import NodeInfo  # noqa: E402
from roost.cluster.ports import PortLease, lease_ports  # noqa: E402

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

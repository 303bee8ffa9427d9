"""The nodes of a cluster, their accelerators and other hardware, and node groups."""

from roost.topology.model import CLUSTER, NODE, Hardware, Node, NodeEnvironment, NodeGroup, Topology

__all__ = [
    "CLUSTER",
    "NODE",
    "Hardware",
    "Node",
    "NodeEnvironment",
    "NodeGroup",
    "Topology",
]

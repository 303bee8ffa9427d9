"""What there is: nodes, their accelerators and other hardware, and groups of nodes."""

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

"""Nodes in groups that fit a screen: racks where the machines say so, else runs of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roost.ranks import format_ranks
from roost.topology import Node, Topology

__all__ = ["Rack", "racks_of"]

LABEL = "rack"
"""The node label that says in which rack a node is."""

MOST_NODES = 16
MOST_ACCELERATORS = 256


@dataclass(frozen=True)
class Rack:
    """Some nodes that are shown together.

    Attributes:
        title: ``rack r1``, or ``nodes 0-15`` where nobody has said.
        node_ranks: Its nodes, ascending.
    """

    title: str
    node_ranks: tuple[int, ...]


def racks_of(topology: Topology) -> list[Rack]:
    """The racks of a topology, in the order of their first nodes.

    Nodes with a label ``rack`` stand together, the others in runs; what would be too large to be
    shown at once is cut.
    """
    by_label: dict[str, list[Node]] = {}
    for node in topology.nodes:
        by_label.setdefault(node.labels.get(LABEL, ""), []).append(node)
    racks = []
    for label, nodes in by_label.items():
        parts = _parts(nodes)
        for part in parts:
            ranks = tuple(node.rank for node in part)
            span = f"node {ranks[0]}" if len(ranks) == 1 else f"nodes {format_ranks(ranks)}"
            title = span if not label else f"rack {label}" if len(parts) == 1 else f"rack {label}, {span}"
            racks.append(Rack(title, ranks))
    return sorted(racks, key=lambda rack: rack.node_ranks[0])


def _parts(nodes: Sequence[Node]) -> list[list[Node]]:
    parts: list[list[Node]] = [[]]
    accelerators = 0
    for node in nodes:
        accelerators += node.num_accelerators
        if parts[-1] and (len(parts[-1]) == MOST_NODES or accelerators > MOST_ACCELERATORS):
            parts.append([])
            accelerators = node.num_accelerators
        parts[-1].append(node)
    return parts

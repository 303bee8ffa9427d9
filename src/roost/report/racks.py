"""Nodes in groups that fit a screen: by their rack label, else runs of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roost.ranks import format_ranks
from roost.topology import Node, Topology

__all__ = ["Rack", "racks_of"]

LABEL = "rack"
"""The node label that names the rack."""

MOST_NODES = 16
MOST_ACCELERATORS = 256


@dataclass(frozen=True)
class Rack:
    """Nodes that are shown together.

    Attributes:
        title: Such as ``rack r1``, or ``nodes 0-15`` for nodes without a rack label.
        node_ranks: Its nodes, ascending.
    """

    title: str
    node_ranks: tuple[int, ...]


def racks_of(topology: Topology) -> list[Rack]:
    """Return the racks of a topology, ordered by their first nodes.

    Nodes with the same label ``rack`` are together, and nodes without it. Groups with more than ``MOST_NODES`` nodes or
    ``MOST_ACCELERATORS`` accelerators are split.
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

"""Resource ranks: the hardware and the node behind each rank of some node groups.

A *resource* is what a node group counts: an accelerator, a robot or another device, or a whole node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from roost.errors import Finding, Fix, PlacementError
from roost.placement.placement import Placement
from roost.ranks import format_ranks
from roost.topology import CLUSTER, NODE, Topology

if TYPE_CHECKING:
    from roost.topology import Node, NodeGroup

__all__ = ["ACCELERATOR", "NodeHardware", "Resources", "place"]

ACCELERATOR = "accelerator"


class NodeHardware:
    """The resources of one node in one group.

    It is not a frozen dataclass because a cluster of 100,000 accelerators needs 12,000 of these for each strategy.

    Attributes:
        first: First resource rank.
        end: Last resource rank plus 1.
        count: Number of resources.
        node: The node.
        label: Label of the group.
        kind: ``"accelerator"``, ``"node"`` or the name of a hardware type.
    """

    __slots__ = ("count", "end", "first", "kind", "label", "node")

    def __init__(self, first: int, count: int, node: Node, label: str, kind: str) -> None:
        self.first = first
        self.count = count
        self.end = first + count
        self.node = node
        self.label = label
        self.kind = kind

    @property
    def ranks(self) -> str:
        """The resource ranks as text."""
        return format_ranks(range(self.first, self.end))


class Resources:
    """All resources of the chosen groups, counted node by node in group order.

    Args:
        topology: The nodes and their groups.
        labels: Labels of node groups; empty for the whole cluster.
        as_nodes: Count nodes, whatever hardware they have.

    Attributes:
        by_node: The resources of each node in each group, in the order of their ranks.
        total: Number of resources.
        most_per_node: The largest number of resources of one node in one group.
        has_hardware: Whether any resource is not a whole node.

    Raises:
        PlacementError: A label is unknown, or two groups count the same resource.
    """

    def __init__(self, topology: Topology, labels: Sequence[str] = (), as_nodes: bool = False) -> None:
        self.topology = topology
        self.labels = tuple(labels) or (CLUSTER,)
        self.as_nodes = as_nodes
        unknown = [topology.unknown_group(label) for label in self.labels if not topology.has_group(label)]
        if unknown:
            raise PlacementError(unknown)
        self.by_node: list[NodeHardware] = []
        self.total = 0
        for label in self.labels:
            self._add(topology.group(label), as_nodes)
        if len(self.labels) > 1:
            self._check_overlap()
        self._firsts = [part.first for part in self.by_node]
        self.most_per_node = max((part.count for part in self.by_node), default=0)
        self.has_hardware = any(part.kind != NODE for part in self.by_node)

    def _add(self, group: NodeGroup, as_nodes: bool) -> None:
        nodes = self.topology.nodes
        if not as_nodes and group.hardware_type:
            kind = group.hardware_type
            counts = [len(group.hardware_by_node.get(rank, ())) for rank in group.node_ranks]
        else:
            counts = [len(nodes[rank].accelerator_ids) for rank in group.node_ranks]
            kind = ACCELERATOR
            if as_nodes or group.label == NODE or not any(counts):
                kind, counts = NODE, [1] * len(counts)
        for rank, count in zip(group.node_ranks, counts, strict=True):
            if count:
                self.by_node.append(NodeHardware(self.total, count, nodes[rank], group.label, kind))
                self.total += count

    def _check_overlap(self) -> None:
        seen: dict[tuple[int, str], NodeHardware] = {}
        for part in self.by_node:
            other = seen.setdefault((part.node.rank, part.kind), part)
            if other is not part:
                message = (
                    f"node groups {other.label!r} and {part.label!r} both have node {part.node.rank}: "
                    f"its {self.noun(part, 2)} would have two ranks each"
                )
                rule = "groups that are counted together have no node in common"
                raise PlacementError([Finding("P116", message, rule=rule)])

    def node_of(self, rank: int) -> NodeHardware:
        """Return the node that has a rank; the rank must be in range."""
        return self.by_node[bisect_right(self._firsts, rank) - 1]

    def nodes_of(self, ranks: range) -> list[NodeHardware]:
        """Return the nodes that have any of a range of ranks, in order."""
        first = bisect_right(self._firsts, ranks[0]) - 1
        last = bisect_right(self._firsts, ranks[-1]) - 1
        return self.by_node[first : last + 1]

    def noun(self, part: NodeHardware | None = None, count: int = 1) -> str:
        """Return the word for a resource: GPU, node, Franka; ``resource`` if they are of several kinds."""
        if part is None and len({part.kind for part in self.by_node}) > 1:
            return "resource" if count == 1 else "resources"
        part = part or (self.by_node[0] if self.by_node else None)
        if part is None or part.kind == NODE:
            word = "node"
        elif part.kind == ACCELERATOR:
            word = part.node.accelerator_type.noun
        else:
            word = part.kind
        return word if count == 1 else f"{word}s"

    def counted(self, count: int) -> str:
        """Return a number of resources in words: ``1 GPU``, ``4 GPUs``."""
        return f"{count:,} {self.noun(count=count)}"

    def describe(self, ranks: range) -> str:
        """Return the nodes and node-local ranks of a range of ranks: ``node 0: 0, 1, 2, 3``."""
        texts = []
        parts = self.nodes_of(ranks)
        for part in parts[:3]:
            low, high = max(ranks[0], part.first) - part.first, min(ranks[-1] + 1, part.end) - part.first
            local = ", ".join(str(i) for i in range(low, high)) if high - low <= 8 else f"{low}-{high - 1}"
            texts.append(f"node {part.node.rank}" + ("" if part.kind == NODE else f": {local}"))
        if len(parts) > 3:
            texts.append(f"… {len(parts) - 3:,} more nodes")
        return "; ".join(texts)

    @property
    def context(self) -> tuple[str, ...]:
        """Lines for an error: the cluster, and the chosen groups."""
        cluster = f"cluster: {self.topology.describe()}"
        if self.labels == (CLUSTER,):
            return (cluster,)
        chosen = " + ".join(f"{label!r}" for label in self.labels[:6])
        what = f"{self.counted(self.total)} (ranks 0-{self.total - 1})" if self.total else "nothing to count"
        return (cluster, f"node group {chosen}: {what}")

    def outside(self, ranks: range) -> Finding | None:
        """Return a finding if some ranks do not exist, else ``None``."""
        if ranks[-1] < self.total:
            return None
        if not self.total:
            message = f"there is nothing to place on: node group {self.labels[0]!r} has no resources"
            return Finding("P115", message, context=self.context)
        shown = f"rank {ranks[-1]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        return Finding(
            "P105",
            f"{shown} of {self.counted(self.total)}: the last one is {self.total - 1}",
            context=self.context,
            rule="ranks count from 0, node by node, in the order of the groups",
            fixes=(Fix("all of them", f"0-{self.total - 1}" if self.total > 1 else "0"),),
        )


def place(
    runs: Iterable[tuple[NodeHardware, tuple[tuple[int, ...], ...]]], isolate_accelerator: bool
) -> list[Placement]:
    """Return the placements of all processes of a component, in rank order.

    Args:
        runs: Consecutive processes on one node: the node's resources, and the node-local resource ranks of each process.
        isolate_accelerator: Whether a process sees only its own accelerators.
    """
    runs = list(runs)
    sizes: dict[int, int] = {}
    node_index: dict[int, int] = {}
    for part, processes in runs:
        node_rank = part.node.rank
        node_index.setdefault(node_rank, len(node_index))
        sizes[node_rank] = sizes.get(node_rank, 0) + len(processes)
    placed: dict[int, int] = {}
    placements: list[Placement] = []
    append = placements.append
    cache: dict[object, list[tuple[int, tuple[str, ...], tuple[int, ...]]]] = {}
    rank = 0
    for part, processes in runs:
        node = part.node
        node_rank, ids, kind = node.rank, node.accelerator_ids, node.accelerator_type
        rows = cache.get(
            (id(processes), id(ids), part.kind)
        )  # `runs` keeps both objects alive, so their ids stay unique
        if rows is None:
            key = (processes, ids, part.kind)
            rows = cache.get(key)
            if rows is None:
                rows = cache[key] = [_row(part.kind, ids, local, isolate_accelerator) for local in processes]
            cache[id(processes), id(ids), part.kind] = rows
        label, size, index = part.label, sizes[node_rank], node_index[node_rank]
        local_rank = placed.get(node_rank, 0)
        for first, visible, local in rows:
            append(
                Placement(
                    rank, node_rank, index, first, kind, local_rank, size, visible, isolate_accelerator, local, label
                )
            )
            rank += 1
            local_rank += 1
        placed[node_rank] = local_rank
    return placements


def _row(
    kind: str, ids: tuple[str, ...], local: tuple[int, ...], isolate: bool
) -> tuple[int, tuple[str, ...], tuple[int, ...]]:
    """Return the first accelerator, the visible accelerators and the resource ranks of a process."""
    if kind == ACCELERATOR:
        return local[0], tuple(ids[i] for i in local) if isolate else ids, local
    return -1, ids, () if kind == NODE else local

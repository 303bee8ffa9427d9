"""Resource ranks: what rank 12 of the chosen node groups is, and on which node."""

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

__all__ = ["ACCELERATOR", "Resources", "Span", "place"]

ACCELERATOR = "accelerator"


class Span:
    """The resources of one node in one group: ranks ``first`` … ``end - 1``.

    ``kind`` is ``"accelerator"``, ``"node"`` or the name of a hardware type. (Not a frozen dataclass:
    a cluster of 100,000 accelerators makes 12,000 of these for every strategy.)
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
        """Its ranks as text."""
        return format_ranks(range(self.first, self.end))


class Resources:
    """All resources of the chosen groups, counted node by node in group order.

    Args:
        topology: The machines.
        labels: Labels of node groups; none means the whole cluster.
        as_nodes: Count nodes, whatever they carry.

    Attributes:
        most_per_node: The largest number of resources of one node.
        has_hardware: Whether any resource is more than a bare node.

    Raises:
        PlacementError: Where a label is unknown, or two groups count the same resource.
    """

    def __init__(self, topology: Topology, labels: Sequence[str] = (), as_nodes: bool = False) -> None:
        self.topology = topology
        self.labels = tuple(labels) or (CLUSTER,)
        self.as_nodes = as_nodes
        unknown = [topology.unknown_group(label) for label in self.labels if not topology.has_group(label)]
        if unknown:
            raise PlacementError(unknown)
        self.spans: list[Span] = []
        self.total = 0
        for label in self.labels:
            self._add(topology.group(label), as_nodes)
        if len(self.labels) > 1:
            self._check_overlap()
        self._firsts = [span.first for span in self.spans]
        self.most_per_node = max((span.count for span in self.spans), default=0)
        self.has_hardware = any(span.kind != NODE for span in self.spans)

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
                self.spans.append(Span(self.total, count, nodes[rank], group.label, kind))
                self.total += count

    def _check_overlap(self) -> None:
        seen: dict[tuple[int, str], Span] = {}
        for span in self.spans:
            other = seen.setdefault((span.node.rank, span.kind), span)
            if other is not span:
                message = (
                    f"node groups {other.label!r} and {span.label!r} both have node {span.node.rank}: "
                    f"its {self.noun(span, 2)} would have two ranks each"
                )
                rule = "groups that are counted together have no node in common"
                raise PlacementError([Finding("P116", message, rule=rule)])

    def span_of(self, rank: int) -> Span:
        """The span that a rank is in; the rank must be in range."""
        return self.spans[bisect_right(self._firsts, rank) - 1]

    def spans_of(self, ranks: range) -> list[Span]:
        """The spans that a range of ranks touches, in order."""
        first = bisect_right(self._firsts, ranks[0]) - 1
        last = bisect_right(self._firsts, ranks[-1]) - 1
        return self.spans[first : last + 1]

    def noun(self, span: Span | None = None, count: int = 1) -> str:
        """What a resource is called: GPU, node, Franka."""
        if span is None and len({span.kind for span in self.spans}) > 1:
            return "resource" if count == 1 else "resources"
        span = span or (self.spans[0] if self.spans else None)
        if span is None or span.kind == NODE:
            word = "node"
        elif span.kind == ACCELERATOR:
            word = span.node.accelerator_type.noun
        else:
            word = span.kind
        return word if count == 1 else f"{word}s"

    def counted(self, count: int) -> str:
        """``1 GPU``, ``4 GPUs``."""
        return f"{count:,} {self.noun(count=count)}"

    def describe(self, ranks: range) -> str:
        """Where a range of ranks is: ``node 0: 0, 1, 2, 3``."""
        parts = []
        spans = self.spans_of(ranks)
        for span in spans[:3]:
            low, high = max(ranks[0], span.first) - span.first, min(ranks[-1] + 1, span.end) - span.first
            local = ", ".join(str(i) for i in range(low, high)) if high - low <= 8 else f"{low}-{high - 1}"
            parts.append(f"node {span.node.rank}" + ("" if span.kind == NODE else f": {local}"))
        if len(spans) > 3:
            parts.append(f"… {len(spans) - 3:,} more nodes")
        return "; ".join(parts)

    @property
    def context(self) -> tuple[str, ...]:
        """Lines that tell a reader of an error what there is."""
        cluster = f"cluster: {self.topology.describe()}"
        if self.labels == (CLUSTER,):
            return (cluster,)
        chosen = " + ".join(f"{label!r}" for label in self.labels[:6])
        what = f"{self.counted(self.total)} (ranks 0-{self.total - 1})" if self.total else "nothing to count"
        return (cluster, f"node group {chosen}: {what}")

    def outside(self, ranks: range) -> Finding | None:
        """The complaint about ranks that there are not, or ``None``."""
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


def place(runs: Iterable[tuple[Span, tuple[tuple[int, ...], ...]]], isolate_accelerator: bool) -> list[Placement]:
    """The placements of processes that are given in rank order, run by run on one node.

    Args:
        runs: Where each run of processes is, and the node-local resource ranks of each process.
        isolate_accelerator: Whether a process sees only its own accelerators.
    """
    runs = list(runs)
    sizes: dict[int, int] = {}
    node_index: dict[int, int] = {}
    for span, processes in runs:
        node_rank = span.node.rank
        node_index.setdefault(node_rank, len(node_index))
        sizes[node_rank] = sizes.get(node_rank, 0) + len(processes)
    placed: dict[int, int] = {}
    placements: list[Placement] = []
    append = placements.append
    cache: dict[object, list[tuple[int, tuple[str, ...], tuple[int, ...]]]] = {}
    rank = 0
    for span, processes in runs:
        node = span.node
        node_rank, ids, kind = node.rank, node.accelerator_ids, node.accelerator_type
        rows = cache.get((id(processes), id(ids), span.kind))  # all of them alive in `runs`
        if rows is None:
            key = (processes, ids, span.kind)
            rows = cache.get(key)
            if rows is None:
                rows = cache[key] = [_row(span.kind, ids, local, isolate_accelerator) for local in processes]
            cache[id(processes), id(ids), span.kind] = rows
        label, size, index = span.label, sizes[node_rank], node_index[node_rank]
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
    """First accelerator, visible accelerators and resource ranks of a process."""
    if kind == ACCELERATOR:
        return local[0], tuple(ids[i] for i in local) if isolate else ids, local
    return -1, ids, () if kind == NODE else local

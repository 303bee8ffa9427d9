"""Long lists folded into few rows: like nodes together, and the middle left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from roost.plan import ComponentPlan, Plan
from roost.ranks import format_ranks

__all__ = ["NodeRow", "ProcessRow", "fold", "node_rows", "process_rows"]

_T = TypeVar("_T")


class NodeRow(NamedTuple):
    """Consecutive nodes that look the same.

    Attributes:
        ranks: Their node ranks.
        name: The name of the first, if it has one.
        kind: What their accelerators are.
        crowds: Who is on each accelerator (see ``Occupancy``).
        on_node: Component index → processes on each node that have no accelerator.
    """

    ranks: range
    name: str
    kind: str
    crowds: tuple[int, ...]
    on_node: tuple[tuple[int, int], ...]


class ProcessRow(NamedTuple):
    """Processes of one component: one, or a node's, or those of like nodes."""

    ranks: str
    nodes: str
    resources: str
    local_ranks: str
    transport: str
    processes: int


def node_rows(plan: Plan, each_up_to: int = 16) -> list[NodeRow]:
    """The nodes of a plan; where they are many, runs of like ones are folded."""
    on_node: dict[int, dict[int, int]] = {}
    for index, component in enumerate(plan.components):
        for placement in component.placements:
            if placement.local_accelerator_rank < 0:
                counts = on_node.setdefault(placement.cluster_node_rank, {})
                counts[index] = counts.get(index, 0) + 1
    rows: list[NodeRow] = []
    for node in plan.topology.nodes:
        kind = node.accelerator_model or (node.accelerator_type.name if node.accelerator_ids else "")
        bare = tuple(sorted(on_node.get(node.rank, {}).items()))
        row = NodeRow(range(node.rank, node.rank + 1), node.name, kind, plan.occupancy.of_node(node.rank), bare)
        last = rows[-1] if rows else None
        many = plan.topology.num_nodes > each_up_to
        if many and last and (last.kind, last.crowds, last.on_node) == (row.kind, row.crowds, row.on_node):
            rows[-1] = NodeRow(range(last.ranks[0], node.rank + 1), last.name, kind, last.crowds, bare)
        else:
            rows.append(row)
    return rows


def process_rows(component: ComponentPlan, transports: Sequence[str] = (), each_up_to: int = 16) -> list[ProcessRow]:
    """The processes of a component: each in a row of its own if they are few, else by node.

    Args:
        component: The component.
        transports: How the weights of each process come, in words.
        each_up_to: How many processes are few.
    """
    if component.world_size <= each_up_to:
        return [_rows_of([index], [(component, index, 1)], transports) for index in range(component.world_size)]
    runs = list(_node_runs(component))
    return [
        _rows_of([first for _, first, _ in group], group, transports)
        for _, found in groupby(_numbered(component, runs, transports), key=lambda item: item[0])
        for group in [[item[1] for item in found]]
    ]


def _node_runs(component: ComponentPlan) -> Iterator[tuple[ComponentPlan, int, int]]:
    """Consecutive ranks on one node: (component, first rank, how many)."""
    first = 0
    for _, run in groupby(component.placements, key=lambda p: p.cluster_node_rank):
        count = sum(1 for _ in run)
        yield component, first, count
        first += count


def _numbered(
    component: ComponentPlan, runs: list[tuple[ComponentPlan, int, int]], transports: Sequence[str]
) -> Iterator[tuple[object, tuple[ComponentPlan, int, int]]]:
    """Runs with a key that is the same as long as nodes are consecutive and look the same."""
    before: object = None
    before_node = -2
    number = 0
    for run in runs:
        _, first, count = run
        placements = component.placements[first : first + count]
        node = placements[0].cluster_node_rank
        shape = (tuple(p.local_hardware_ranks for p in placements), count, tuple(transports[first : first + count]))
        if shape != before or node != before_node + 1:
            number += 1
        before, before_node = shape, node
        yield number, run


def _rows_of(
    firsts: list[int], runs: Sequence[tuple[ComponentPlan, int, int]], transports: Sequence[str]
) -> ProcessRow:
    component, first, count = runs[0]
    total = sum(run[2] for run in runs)
    placements = component.placements[first : first + count]
    start, last = placements[0], component.placements[runs[-1][1]]
    kinds = sorted(set(transports[first : first + count]))
    nodes = [start.cluster_node_rank, last.cluster_node_rank]
    low, high = placements[0].local_rank, placements[-1].local_rank
    return ProcessRow(
        _range(firsts[0], firsts[0] + total - 1),
        _range(*nodes),
        _resources([p.local_hardware_ranks for p in placements]),
        f"{_range(low, high)} of {start.local_world_size}",
        " or ".join(kinds),
        total,
    )


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _resources(given: list[tuple[int, ...]]) -> str:
    """``0,2 · 1,3``; processes that share are counted: ``0 x2``."""
    if not any(given):
        return "-"
    parts = []
    for ranks, run in groupby(given):
        count = sum(1 for _ in run)
        parts.append(format_ranks(ranks) + (f" x{count}" if count > 1 else ""))
    if len(parts) > 1 and all(len(ranks) == 1 for ranks in given) and len(parts) == len(given):
        return f"{format_ranks(rank for (rank,) in given)}, one each"
    return " · ".join(parts[:8]) + (f" · … {len(parts) - 8} more" if len(parts) > 8 else "")


def fold(rows: Sequence[_T], head: int, tail: int) -> tuple[Sequence[_T], Sequence[_T], Sequence[_T]]:
    """The first rows, those left out, and the last."""
    if len(rows) <= head + tail + 1:
        return rows, (), ()
    return rows[:head], rows[head : len(rows) - tail], rows[len(rows) - tail :]

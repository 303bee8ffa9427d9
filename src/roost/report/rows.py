"""Long lists as few rows: equal nodes share a row, and the middle is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from roost.plan import ComponentPlan, Plan
from roost.ranks import format_ranks

__all__ = ["NodeRow", "ProcessRow", "fold", "node_rows", "process_rows"]

_T = TypeVar("_T")


class NodeRow(NamedTuple):
    """Consecutive nodes with the same accelerators and processes.

    Attributes:
        ranks: Their node ranks.
        name: The name of the first node; may be empty.
        model: Model of their accelerators, else the vendor; empty without accelerators.
        crowds: The crowd of each accelerator (see ``Occupancy``).
        on_node: (component index, number of its processes on each node that have no accelerator).
    """

    ranks: range
    name: str
    model: str
    crowds: tuple[int, ...]
    on_node: tuple[tuple[int, int], ...]


class ProcessRow(NamedTuple):
    """Processes of one component: one process, those of a node, or those of equal consecutive nodes."""

    ranks: str
    nodes: str
    resources: str
    local_ranks: str
    transport: str
    processes: int


def node_rows(plan: Plan, each_up_to: int = 16) -> list[NodeRow]:
    """Return the nodes of a plan; in plans with more than ``each_up_to`` nodes, equal consecutive nodes share a row."""
    on_node: dict[int, dict[int, int]] = {}
    for index, component in enumerate(plan.components):
        for placement in component.placements:
            if placement.local_accelerator_rank < 0:
                counts = on_node.setdefault(placement.cluster_node_rank, {})
                counts[index] = counts.get(index, 0) + 1
    rows: list[NodeRow] = []
    for node in plan.topology.nodes:
        model = node.accelerator_model or (node.accelerator_type.name if node.accelerator_ids else "")
        bare = tuple(sorted(on_node.get(node.rank, {}).items()))
        row = NodeRow(range(node.rank, node.rank + 1), node.name, model, plan.occupancy.of_node(node.rank), bare)
        last = rows[-1] if rows else None
        many = plan.topology.num_nodes > each_up_to
        if many and last and (last.model, last.crowds, last.on_node) == (row.model, row.crowds, row.on_node):
            rows[-1] = NodeRow(range(last.ranks[0], node.rank + 1), last.name, model, last.crowds, bare)
        else:
            rows.append(row)
    return rows


def process_rows(component: ComponentPlan, transports: Sequence[str] = (), each_up_to: int = 16) -> list[ProcessRow]:
    """Return the processes of a component, with a row each if they are few, else by node.

    Args:
        component: The component.
        transports: The transports of each process, as text.
        each_up_to: Largest number of processes that have a row each.
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
    """Yield the consecutive ranks on one node as (component, first rank, number of ranks)."""
    first = 0
    for _, run in groupby(component.placements, key=lambda p: p.cluster_node_rank):
        count = sum(1 for _ in run)
        yield component, first, count
        first += count


def _numbered(
    component: ComponentPlan, runs: list[tuple[ComponentPlan, int, int]], transports: Sequence[str]
) -> Iterator[tuple[object, tuple[ComponentPlan, int, int]]]:
    """Yield runs with a key that is equal while nodes are consecutive and have the same processes."""
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
    """Return such as ``0,2 · 1,3``, or ``0 x2`` for two processes that share."""
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
    """Return the first rows, the rows that are left out, and the last rows."""
    if len(rows) <= head + tail + 1:
        return rows, (), ()
    return rows[:head], rows[head : len(rows) - tail], rows[len(rows) - tail :]

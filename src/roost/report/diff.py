"""The differences between two plans, for a terminal, in few rows even for many processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from rich.text import Text

from roost.placement import Placement
from roost.plan.diff import Details, PlanDiff
from roost.plan.node_changes import NodeChange
from roost.ranks import format_ranks
from roost.report.columns import align
from roost.report.rows import fold
from roost.report.stretches import Stretch, stretches_of

__all__ = ["draw_diff", "node_change_line"]

_STYLES = {"+": "green", "~": "yellow", "-": "red"}
_MOST_WIDE = 8


def draw_diff(diff: PlanDiff, before: str = "", after: str = "", noun: str = "GPU") -> Text:
    """Return all differences, with a row for each stretch of processes that change in the same way, and a summary.

    Args:
        diff: The differences.
        before: Name of the first plan.
        after: Name of the second plan.
        noun: Word for an accelerator, such as ``GPU``.
    """
    parts = []
    if before or after:
        parts.append(Text(f"{before} → {after}", style="bold"))
    about = [f"  mode: {diff.mode[0]} → {diff.mode[1]}"] if diff.mode else []
    head, middle, tail = fold(diff.nodes, 16, 2)
    about += [f"  {node_change_line(change)}" for change in head]
    if middle:
        about.append(f"  … {len(middle):,} more differences of nodes")
        about += [f"  {node_change_line(change)}" for change in tail]
    for name, details in diff.components.items():
        about.append(f"  {name}: " + _details_text(details))
    if about:
        parts.append(Text("\n".join(about)))
    if diff.processes:
        parts.append(_table(stretches_of(diff.processes), noun))
    parts.append(Text(diff.summary, style="bold"))
    return Text("\n\n").join(parts)


def node_change_line(change: NodeChange) -> str:
    """Return such as ``node 1: address: 10.0.0.2 → 10.0.0.9``."""
    return f"{change.nodes}: {change.what}: {change.planned} → {change.found}"


def _table(stretches: Sequence[Stretch], noun: str) -> Text:
    head, middle, tail = fold(stretches, 40, 5)
    rows: list[list[Text]] = [_row(stretch, noun) for stretch in head]
    if middle:
        left_out = sum(stretch.processes for stretch in middle)
        rows.append([Text(f"… {len(middle):,} more rows, {left_out:,} processes (--json has all)", style="dim")])
        rows += [_row(stretch, noun) for stretch in tail]
    return align(rows, header=False)


def _row(stretch: Stretch, noun: str) -> list[Text]:
    first, last = stretch.first, stretch.last
    ranks = str(first.rank) if first.rank == last.rank else f"{first.rank}-{last.rank}"
    style = _STYLES[first.sign]
    where = [_place(stretch, side, noun) for side in ("before", "after") if getattr(first, side) is not None]
    texts = [" → ".join(where if first.is_moved else where[:1])]
    if stretch.shown:
        texts.append(_details_text(stretch.shown))
    return [Text(f"{first.sign} {first.component}[{ranks}]", style=style), Text("; ".join(texts))]


def _place(stretch: Stretch, side: str, noun: str) -> str:
    """Return such as ``nodes 0-3 GPU 0-7``: the accelerators of the first node's processes, with all nodes."""
    placements: list[Placement] = [getattr(change, side) for change in stretch.changes]
    last: Placement = getattr(stretch.last, side)
    node, end = placements[0].cluster_node_rank, last.cluster_node_rank
    if stretch.node_ends is not None:
        return _sequence(placements[0], last, stretch.node_ends[side], noun)
    nodes = f"node {node}" if node == end else f"nodes {node}-{end}"
    given = [placement.local_hardware_ranks for placement in placements]
    if not any(given):
        return nodes
    return f"{nodes} {noun if placements[0].local_accelerator_rank >= 0 else 'hardware'} {_resources(given)}"


def _sequence(first: Placement, last: Placement, end_of_node: int | None, noun: str) -> str:
    """Return such as ``node 0 GPU 4 … node 9 GPU 3`` for places that follow one another."""
    begin, end, width = first.accelerators, last.accelerators, len(first.accelerators)
    node, last_node = first.cluster_node_rank, last.cluster_node_rank
    each = f", {width} each" if width > 1 else ""
    if end_of_node is None:
        return f"node {node} {noun} {begin[0]}-{end[-1]}{each}"
    if begin[0] == 0 and end[-1] == end_of_node:
        return f"nodes {node}-{last_node} {noun} {format_ranks(range(end_of_node + 1))}{each}"
    all_of_node = format_ranks(range(end_of_node + 1))
    return f"node {node} {noun} {format_ranks(begin)} … node {last_node} {noun} {format_ranks(end)} ({all_of_node} of each)"


def _resources(given: Sequence[tuple[int, ...]]) -> str:
    """Return such as ``0-3`` (one each), ``0,2 · 1,3`` (several each) or ``0 x2`` (shared by two processes)."""
    flat = [rank for ranks in given for rank in ranks]
    if len(flat) == len(given) and all(rank < other for rank, other in pairwise(flat)):
        return format_ranks(flat)
    runs = [(format_ranks(ranks), sum(1 for _ in run)) for ranks, run in groupby(given)]
    parts = [f"{text} x{count}" if count > 1 else text for text, count in runs[:_MOST_WIDE]]
    more = f" · … {len(runs) - _MOST_WIDE} more" if len(runs) > _MOST_WIDE else ""
    return " · ".join(parts) + more


def _details_text(details: Details) -> str:
    return "; ".join(f"{what} {_value(before)} → {_value(after)}" for what, (before, after) in details.items())


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)

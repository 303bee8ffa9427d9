"""Running jobs for a terminal: a map with states, the worker groups, the ranks, and the last errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from roost.errors import counted
from roost.plan.states import STATES, AcceleratorStatus, GroupStatus, JobStatus, NodeStatus, RankStatus
from roost.report.columns import align
from roost.report.letters import COLOURS, component_letters
from roost.report.live_parts import (
    MARKS,
    Member,
    accelerators_of,
    all_ranks,
    crowds,
    doing,
    duration,
    headline,
    last_errors,
    one_line,
    tally,
    worst_first,
)
from roost.report.rows import fold

__all__ = ["draw_jobs"]

MAX_RANKS = 64
"""With more ranks than this, only the ranks in the worst states are listed."""
STYLES = {"dead": "bold red", "silent": "magenta", "starting": "cyan", "busy": "yellow", "ready": "green"}
_GRID_COLUMNS = 16
_IDLE = "·"
_Crowd = tuple[list[tuple[Member, ...]], tuple[Member, ...]]


@dataclass(frozen=True)
class _Titles:
    """Optional columns of a map, before its accelerators."""

    names: bool
    usage: bool


def draw_jobs(jobs: Sequence[JobStatus], width: int | None = None, height: int | None = None) -> Text:
    """Return all jobs as text.

    Args:
        jobs: The jobs.
        width: Number of columns; ``None``: no limit.
        height: Number of lines, shared equally among the jobs; ``None``: no limit.
    """
    if not jobs:
        return _fit(Text("no Roost job runs on this Ray"), width, height)
    share = height // len(jobs) if height is not None else None
    return Text("\n\n").join([_fit(_Painter(job, share).frame(), width, share) for job in jobs])


def _fit(text: Text, width: int | None, height: int | None) -> Text:
    """Truncate long lines, and leave out lines beyond the height."""
    if width is None and height is None:
        return text
    lines = list(text.split("\n", allow_blank=True))
    if height is not None and len(lines) > height:
        lines = [*lines[: max(0, height - 1)], Text(f"… {len(lines) - height + 1:,} more lines", style="dim")]
    if width is not None:
        for line in lines:
            line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


class _Painter:
    def __init__(self, job: JobStatus, height: int | None) -> None:
        self.job = job
        self.height = height
        names = [group.name for group in job.groups]
        self.letters = component_letters(names)
        self.colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}

    def frame(self) -> Text:
        parts = [self._title()]
        if not self.job.groups:
            return Text("\n").join([*parts, Text("  no groups")])
        lines = self.height if self.height is not None else 10_000
        parts += [self._map(max(4, lines // 3)), self._groups(max(3, lines // 4))]
        errors = last_errors(self.job, 5 if lines >= 24 else 2)
        used = sum(str(part.plain).count("\n") + 2 for part in parts) + (len(errors) + 2 if errors else 0)
        parts.append(self._ranks(max(1, lines - used - 3)))
        if errors:
            title = Text("last errors", style="dim")
            parts.append(Text("\n").join([title, *(Text(f"  {line}", style="red") for line in errors)]))
        return Text("\n\n").join(parts)

    def _title(self) -> Text:
        counts = dict.fromkeys(STATES, 0)
        for _, rank in all_ranks(self.job):
            counts[rank.state] = counts.get(rank.state, 0) + 1
        total = sum(counts.values())
        text = Text(headline(self.job), style="bold")
        if total:
            present = {state: count for state, count in counts.items() if count}
            text.append(f"\n{counted(total, 'rank')}: ", style="not bold").append(tally(present), style="not bold")
        return text

    # The map -------------------------------------------------------------------------------

    def _map(self, limit: int) -> Text:
        found = crowds(self.job)
        nodes = [node for node in self.job.nodes if node.rank in found]
        widest = max((len(cells) for cells, _ in found.values()), default=0)
        is_grid = widest <= _GRID_COLUMNS
        titles = _Titles(any(node.name for node in nodes), any(map(_has_usage, nodes)))
        header = ["node", *(["name"] * titles.names), *([""] * titles.usage)]
        header += [str(index) for index in range(widest)] if is_grid else ["accelerators"] * bool(widest)
        header.append("on the node" if any(bare for _, bare in found.values()) else "")
        rows: list[list[list[Text | str]]] = []  # one or three lines per run of nodes that look the same
        for _, run in groupby(nodes, key=lambda node: self._looks(node, found[node.rank], len(nodes))):
            alike = list(run)
            cells, bare = found[alike[0].rank]
            rows.append(self._node_lines(alike, cells, bare, widest if is_grid else -1, titles))
        fits = limit - 3
        head, middle, tail = fold(rows, max(1, fits // max(map(len, rows), default=1) - 2), 1)
        lines: list[list[Text | str]] = [list(header), *(line for node in head for line in node)]
        if middle:
            lines.append([Text(f"… {len(middle):,} more rows", style="dim")])
            lines += [line for node in tail for line in node]
        return align(lines, gap=2, rule=True)

    @staticmethod
    def _looks(node: NodeStatus, crowd: _Crowd, num_nodes: int) -> object:
        """Return a key that is equal for nodes that can share a row. Few nodes have a row each."""
        if num_nodes <= _GRID_COLUMNS or _has_usage(node):
            return node.rank
        cells, bare = crowd
        return str([[(m.group, m.state, m.count) for m in cell] for cell in [*cells, bare]])

    def _node_lines(
        self,
        nodes: Sequence[NodeStatus],
        cells: Sequence[tuple[Member, ...]],
        bare: tuple[Member, ...],
        widest: int,
        titles: _Titles,
    ) -> list[list[Text | str]]:
        """Return the line of equal nodes; three lines for a node whose memory and use are known."""
        first, many = nodes[0], len(nodes) > 1
        start: list[Text | str] = [f"{first.rank}-{nodes[-1].rank}" if many else f"{first.rank}"]
        if titles.names:
            start.append(one_line(f"{first.name} …" if many else first.name))
        blank: list[Text | str] = [""] * len(start)
        start += [""] * titles.usage
        if widest < 0:
            return [[*start, self._accelerator_runs(cells), self._on_node(bare)]]
        pad: list[Text | str] = [""] * (widest - len(cells))
        lines: list[list[Text | str]] = [[*start, *map(self._crowd, cells), *pad, self._on_node(bare)]]
        if not many and _has_usage(first):
            for title, show in (("memory", _memory), ("busy", _busy)):
                row = [show(accelerator) for accelerator in first.accelerators]
                lines.append([*blank, Text(title, style="dim"), *row, *pad, ""])
        return lines

    def _crowd(self, members: Sequence[Member]) -> Text:
        if not members:
            return Text(_IDLE, style="dim")
        text = Text()
        for member in members:
            text.append(self.letters[member.group], style=f"bold {self.colours[member.group]}")
            text.append(str(member.count) if member.count > 1 else "")
            text.append(MARKS.get(member.state, "?"), style=STYLES.get(member.state, ""))
        return text

    def _accelerator_runs(self, cells: Sequence[tuple[Member, ...]]) -> Text:
        """Return such as ``0-31 A*  32-63 R``, for a node with more accelerators than a terminal has columns."""
        text = Text()
        for _, run in groupby(enumerate(cells), key=lambda pair: str([(m.group, m.state, m.count) for m in pair[1]])):
            places = list(run)
            first, last = places[0][0], places[-1][0]
            text.append(f"{first}-{last} " if last > first else f"{first} ", style="dim")
            text.append_text(self._crowd(places[0][1])).append("  ")
        text.rstrip()
        return text

    def _on_node(self, members: Sequence[Member]) -> Text:
        return Text("  ").join(self._crowd([member]) for member in members)

    # The tables ----------------------------------------------------------------------------

    def _groups(self, limit: int) -> Text:
        heading: list[Text | str] = ["group", "ranks", *(f"{state}{MARKS[state]}" for state in STATES)]
        lines: list[list[Text | str]] = [[*heading, "calls", "errors", "longest in"]]
        head, middle, tail = fold(self.job.groups, max(1, limit - 3), 1)
        lines += [self._group_row(group) for group in head]
        if middle:
            lines.append([Text(f"… {len(middle):,} more groups", style="dim")])
            lines += [self._group_row(group) for group in tail]
        return align(lines, gap=2)

    def _group_row(self, group: GroupStatus) -> list[Text | str]:
        counts = group.counts()
        name = Text(self.letters[group.name], style=f"bold {self.colours[group.name]}")
        name.append(f" {one_line(group.name)}", style="not bold default")
        row: list[Text | str] = [name, f"{len(group.workers):,}"]
        row += [
            Text(f"{counts[state]:,}", style=STYLES[state]) if counts.get(state) else Text("-", style="dim")
            for state in STATES
        ]
        busy = [rank for rank in group.workers if rank.state == "busy"]
        longest = max(busy, key=lambda rank: rank.since_s, default=None)
        errors = sum(rank.errors for rank in group.workers)
        row += [f"{sum(rank.calls for rank in group.workers):,}", Text(f"{errors:,}", style="red" if errors else "dim")]
        row.append(f"{one_line(longest.call)} {duration(longest.since_s)}" if longest is not None else "-")
        return row

    def _ranks(self, limit: int) -> Text:
        everyone = list(all_ranks(self.job))
        is_all = len(everyone) <= min(MAX_RANKS, limit)
        chosen = everyone if is_all else worst_first(self.job)[: min(limit, 16)]
        heading: list[Text | str] = ["rank", "node", "accelerators", "process", "state"]
        lines: list[list[Text | str]] = [heading, *(self._rank_row(name, rank) for name, rank in chosen)]
        if not is_all:
            lines.append([Text(f"… {len(everyone) - len(chosen):,} more ranks", style="dim")])
        return align(lines, gap=2)

    def _rank_row(self, name: str, rank: RankStatus) -> list[Text | str]:
        state = Text(doing(rank), style=STYLES.get(rank.state, ""))
        if rank.note:
            state.append(f"  {one_line(rank.note)}", style="dim")
        process = str(rank.pid) if rank.pid else "-"
        return [f"{one_line(name)}[{rank.rank}]", str(rank.node_rank), accelerators_of(rank), process, state]


def _has_usage(node: NodeStatus) -> bool:
    return any(accelerator.used_gib is not None for accelerator in node.accelerators)


def _memory(accelerator: AcceleratorStatus) -> Text:
    if accelerator.used_gib is None or not accelerator.memory_gib:
        return Text("-", style="dim")
    share = accelerator.used_gib / accelerator.memory_gib
    return Text(f"{share:.0%}", style="red" if share > 0.95 else "")


def _busy(accelerator: AcceleratorStatus) -> Text:
    return Text("-", style="dim") if accelerator.busy is None else Text(f"{accelerator.busy:.0%}")

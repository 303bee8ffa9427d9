"""The placement language: parse texts such as ``0-1:0-3,3-5,7-10:7-14`` into segments.

A segment is ``resource_ranks[:process_ranks]``; each side is one rank or one range, and a comma ends the segment. The
time to parse a text grows with its segments, not with its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from roost.errors import Finding, Fix, RankError
from roost.placement.resources import NodeHardware, Resources
from roost.placement.strategies import MAX_PROCESSES
from roost.ranks import parse_range
from roost.source import Tree
from roost.topology import NODE

__all__ = ["Segment", "format_segments", "parse_placement"]

MAX_FINDINGS = 50
"""Largest number of problems reported for one placement text."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment: ``resources[:processes]``.

    Attributes:
        resources: Resource ranks.
        processes: Process ranks.
        explicit: Whether the process ranks are written; otherwise each resource has one process.
        offset: Position of the resource ranks in the text, from 0.
        resource_length: Their number of characters.
        process_offset: Position of the process ranks in the text, from 0.
        process_length: Their number of characters.
    """

    resources: range
    processes: range
    explicit: bool = False
    offset: int = 0
    resource_length: int = 0
    process_offset: int = 0
    process_length: int = 0

    def resources_of_processes(self, on_nodes: bool) -> Iterator[tuple[int, ...]]:
        """Yield the resource ranks of each process, in rank order.

        Args:
            on_nodes: Whether the resources are whole nodes, which may have different numbers of processes.
        """
        resources, count = self.resources, len(self.processes)
        if count <= len(resources):
            size = len(resources) // count
            for first in range(resources[0], resources[-1] + 1, size):
                yield tuple(range(first, first + size))
            return
        size, extra = divmod(count, len(resources)) if on_nodes else (count // len(resources), 0)
        for index, rank in enumerate(resources):
            share = (rank,)
            for _ in range(size + (index < extra)):
                yield share


def format_segments(segments: list[Segment]) -> str:
    """Return the text of segments. Process ranks are included if they were written, or are not one per resource."""
    parts = []
    for segment in segments:
        text = _format_range(segment.resources)
        if segment.explicit or len(segment.resources) != len(segment.processes):
            text += f":{_format_range(segment.processes)}"
        parts.append(text)
    return ",".join(parts)


def _format_range(ranks: range) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def parse_placement(tree: Tree, name: str, resources: Resources, findings: list[Finding]) -> list[Segment]:
    """Return the segments of a placement text after checking all rules.

    Args:
        tree: The text, with its place.
        name: Name of the component, for messages.
        resources: The resources that the ranks count.
        findings: Where problems go; the segments are valid only if none is added.
    """
    return _Parser(tree, name, resources, findings).parse()


class _Parser:
    def __init__(self, tree: Tree, name: str, resources: Resources, findings: list[Finding]) -> None:
        self.tree = tree
        self.name = name
        self.resources = resources
        self.findings = findings
        self.limit = len(findings) + MAX_FINDINGS

    def parse(self) -> list[Segment]:
        tree = self.tree
        if tree.value is None or isinstance(tree.value, (bool, float)) or not isinstance(tree.value, (str, int)):
            message = f"{self.name}: a placement is a text such as 0-7 or 0-3:0-1, not {tree.kind}"
            self._complain("P101", message, 0, None)
            return []
        before = len(self.findings)
        segments = self._segments(tree.text)
        if len(self.findings) == before:
            for segment in segments:
                outside = self.resources.outside(segment.resources)
                if outside is not None:
                    self._outside(outside, segment)
                    break  # ranks ascend, so all later segments are outside too
                self._check_counts(segment)
        if len(self.findings) == before:
            for segment in segments:
                self._check_nodes(segment)
        return segments

    # Reading -------------------------------------------------------------------------------

    def _segments(self, text: str) -> list[Segment]:
        segments: list[Segment] = []
        offset = 0
        next_process = 0
        last_resource = -1
        ordered = True
        for item in text.split(","):
            if len(self.findings) >= self.limit:
                break
            segment = self._segment(item, offset, next_process)
            offset += len(item) + 1
            if segment is None:
                ordered = False  # the next process rank is unknown
                continue
            if segment.resources[0] <= last_resource:
                self._repeated_resources(segment, last_resource, [s.resources for s in segments])
            last_resource = max(last_resource, segment.resources[-1])
            if ordered and segment.processes[0] != next_process:
                self._broken_processes(segment, next_process, [*segments, segment])
                ordered = False
            next_process = max(next_process, segment.processes[-1] + 1)
            if next_process > MAX_PROCESSES:
                message = f"{self.name}: {next_process:,} processes: more than {MAX_PROCESSES:,} is a typing error"
                self._complain("P103", message, segment.offset, segment.resource_length)
                break
            segments.append(segment)
        return segments

    def _segment(self, item: str, offset: int, next_process: int) -> Segment | None:
        left, colon, right = item.partition(":")
        start = offset + len(left) - len(left.lstrip())
        length = len(left.strip())
        process_start = offset + len(left) + 1 + len(right) - len(right.lstrip())
        try:
            if left.strip(" \t\r\n") == "all":
                if not self.resources.total:
                    outside = self.resources.outside(range(1))
                    if outside is not None:
                        self._add(outside, start, length)
                    return None
                ranks = range(self.resources.total)
            else:
                ranks = parse_range(left, offset)
            if not colon:
                processes = range(next_process, next_process + len(ranks))
                return Segment(ranks, processes, False, start, length, start, length)
            if right.strip() == "all":
                message = f"{self.name}: 'all' stands for resources; process ranks are numbers"
                fix = Fix("one process per resource", f"{self.name}: {left.strip()}")
                self._complain("P108", message, process_start, 3, fixes=(fix,))
                return None
            processes = parse_range(right, offset + len(left) + 1)
        except RankError as error:
            self._rank_error(error)
            return None
        return Segment(ranks, processes, True, start, length, process_start, len(right.strip()))

    def _rank_error(self, error: RankError) -> None:
        code = "P102" if error.suggestion else "P103" if "too large" in error.reason else "P101"
        text = self.tree.text
        fixes = []
        if error.suggestion:
            fixed = text[: error.offset] + error.suggestion + text[error.offset + error.length :]
            fixes.append(Fix("the other way round", f"{self.name}: {fixed.strip()}"))
        if "${" in text:
            fixes.append(Fix("interpolations are resolved by OmegaConf: pass its config, or run through Hydra"))
        rule = "resource_ranks[:process_ranks], joined with commas; ranks like 3 or 0-7, or 'all'"
        self._complain(code, f"{self.name}: {error.reason}", error.offset, error.length, rule, tuple(fixes))

    # Rules between segments ----------------------------------------------------------------

    def _repeated_resources(self, segment: Segment, last: int, before: list[range]) -> None:
        noun = self.resources.noun(count=2)
        shown = _format_range(segment.resources)
        ranks = segment.resources
        twice = next((r for r in before if r[0] <= ranks[-1] and ranks[0] <= r[-1]), None)
        if twice is not None:
            both = _format_range(range(max(twice[0], ranks[0]), min(twice[-1], ranks[-1]) + 1))
            what = f"{noun} {both} are" if "-" in both else f"{self.resources.noun()} {both} is"
            message = f"{self.name}: {what} named twice"
        else:
            message = f"{self.name}: {noun} {shown} are named after {last}, and ranks ascend"
        fix = Fix("several processes on one resource are written with a colon", f"{self.name}: 0-3:0-7")
        rule = "resource ranks ascend and do not repeat"
        self._complain("P106", message, segment.offset, segment.resource_length, rule, (fix,))

    def _broken_processes(self, segment: Segment, expected: int, segments: list[Segment]) -> None:
        got = segment.processes[0]
        if got < expected:
            message = f"{self.name}: process {got} is placed twice"
        elif expected == 0:
            message = f"{self.name}: process ranks start at {got}, and must start at 0"
        else:
            message = f"{self.name}: process {expected} is missing: ranks go on at {got}"
        fixes = []
        meant = self._as_meant(segment, segments)
        if meant:
            fixes.append(Fix("probably meant", f"{self.name}: {meant}"))
        else:
            moved = range(expected, expected + len(segment.processes))
            part = f"{_format_range(segment.resources)}:{_format_range(moved)}"
            before = format_segments(segments[:-1])
            fixes.append(Fix("go on where the ranks end", f"{self.name}: {before + ',' if before else ''}{part}"))
        rule = "process ranks are contiguous from 0, each once"
        self._complain("P107", message, segment.process_offset, segment.process_length, rule, tuple(fixes))

    def _as_meant(self, last: Segment, segments: list[Segment]) -> str:
        """Return ``0-3:0-3,5-7:4-6`` for ``0-3,5-7:0-6``, where the process ranks were meant for all segments before them.

        The text is empty if the segments do not have this mistake.
        """
        run = [last]
        for segment in reversed(segments[:-1]):
            if segment.explicit or len(run) > 20:
                break
            run.insert(0, segment)
        total = sum(len(segment.resources) for segment in run)
        first = run[0].processes[0] if len(run) > 1 else -1
        if last.processes[0] != first or len(last.processes) % total or len(run) > 20:
            return ""
        each = len(last.processes) // total
        parts = []
        for segment in run:
            count = len(segment.resources) * each
            parts.append(f"{_format_range(segment.resources)}:{_format_range(range(first, first + count))}")
            first += count
        before = format_segments(segments[: len(segments) - len(run)])
        return ",".join([before, *parts] if before else parts)

    # Rules inside a segment ----------------------------------------------------------------

    def _check_counts(self, segment: Segment) -> None:
        if len(self.findings) >= self.limit:
            return
        resources, processes = len(segment.resources), len(segment.processes)
        on_nodes = self._on_nodes(segment)
        if on_nodes and processes < resources:
            rule = "a process lives on one node"
            fix = Fix("one process per node", f"{self.name}: {_format_range(segment.resources)}")
            message = f"{self.name}: {processes} processes cannot live on {resources} nodes"
            if processes == 1:
                message = f"{self.name}: a process cannot live on {resources} nodes"
            self._complain("P114", message, segment.offset, segment.resource_length, rule, (fix,))
        elif not on_nodes and max(resources, processes) % min(resources, processes):
            self._indivisible(segment)

    def _on_nodes(self, segment: Segment) -> bool:
        return self.resources.node_of(segment.resources[0]).kind == NODE

    def _outside(self, outside: Finding, segment: Segment) -> None:
        fixes = tuple(Fix(fix.text, f"{self.name}: {fix.paste}") for fix in outside.fixes)
        if not self.tree.has_source and isinstance(self.tree.value, int) and self.tree.value >= 60:
            hours, minutes = divmod(self.tree.value, 60)
            guess = f"{hours}:{minutes}"
            fixes = (
                Fix(
                    f"YAML reads an unquoted {guess} as the number {self.tree.value} (base 60): quote it",
                    f'{self.name}: "{guess}"',
                ),
                *fixes,
            )
        finding = Finding(
            outside.code, f"{self.name}: {outside.message}", context=outside.context, rule=outside.rule, fixes=fixes
        )
        self._add(finding, segment.offset, segment.resource_length)

    def _indivisible(self, segment: Segment) -> None:
        """Add the problem that neither count divides the other; mark both sides and suggest two fixes."""
        resources, processes = segment.resources, segment.processes
        noun = self.resources.noun(count=2)
        ranks = ", ".join(map(str, processes)) if len(processes) <= 8 else _format_range(processes)
        counted = self.resources.counted(len(resources))
        tree = self.tree
        marks = (
            tree.mark(segment.process_offset, segment.process_length, f"{len(processes)} processes ({ranks})"),
            tree.mark(
                segment.offset, segment.resource_length,
                f"{counted} ({self.resources.describe(resources)})", primary=False,
            ),
        )  # fmt: skip
        self.findings.append(
            Finding(
                "P104",
                f"{self.name}: {len(processes)} processes cannot be spread evenly over {counted}",
                tree.place(segment.process_offset),
                marks,
                self.resources.context,
                "one count must divide the other",
                tuple(self._even_fixes(segment, noun)),
            )
        )

    def _even_fixes(self, segment: Segment, noun: str) -> Iterator[Fix]:
        resources, first = segment.resources, segment.processes[0]
        count = len(resources)
        left = _format_range(resources)
        yield Fix(f"one process per {noun[:-1]}", f"{self.name}: {left}:{_format_range(range(first, first + count))}")
        if len(segment.processes) < count:
            fewer = max(d for d in range(1, min(len(segment.processes), 10_000) + 1) if count % d == 0)
            each = count // fewer
            word = "two" if each == 2 else str(each)
            text = f"{self.name}: {left}:{_format_range(range(first, first + fewer))}"
            yield Fix(f"{word} {noun} per process", text)
        else:
            each = round(len(segment.processes) / count)
            if each > 1:
                text = f"{self.name}: {left}:{_format_range(range(first, first + count * each))}"
                yield Fix(f"{each} processes per {noun[:-1]}", text)

    def _check_nodes(self, segment: Segment) -> None:
        """Check at each node boundary in the segment that no process spans nodes or mixes hardware types."""
        resources, processes = len(segment.resources), len(segment.processes)
        if resources == processes or len(self.findings) >= self.limit:
            return
        parts = self.resources.nodes_of(segment.resources)
        if len({part.kind == NODE for part in parts}) > 1:
            message = f"{self.name}: a segment mixes nodes and hardware, and its counts differ"
            border = next(after.first for before, after in pairwise(parts) if before.kind != after.kind)
            fix = Fix("split it", f"{self.name}: {segment.resources[0]}-{border - 1},{border}-{segment.resources[-1]}")
            rule = "what is spread evenly is of one type"
            self._complain("P110", message, segment.offset, segment.resource_length, rule, (fix,))
            return
        size = max(1, resources // processes)
        for before, after in pairwise(parts):
            if (after.first - segment.resources[0]) % size:
                self._spanning(segment, size, before, after)
                return

    def _spanning(self, segment: Segment, size: int, before: NodeHardware, after: NodeHardware) -> None:
        index = (after.first - segment.resources[0]) // size
        first = segment.resources[0] + index * size
        rank = segment.processes[0] + index
        noun = self.resources.noun(before, 2)
        same_node = before.node.rank == after.node.rank
        if same_node:
            code, what = "P110", f"mixes {noun} and {self.resources.noun(after, 2)}"
            rule = "a process has one type of hardware"
        else:
            code = "P109"
            what = (
                f"would span nodes: {noun} {first}-{first + size - 1} are on node {before.node.rank} "
                f"({before.ranks}) and node {after.node.rank} ({after.ranks})"
            )
            rule = "the resources of a process are on one node"
        message = f"{self.name}: process {rank} {what}"
        fixes = tuple(self._aligned(segment, size, (before.first, after.first)))
        self._complain(code, message, segment.offset, segment.resource_length, rule, fixes)

    def _aligned(self, segment: Segment, size: int, starts: tuple[int, ...]) -> Iterator[Fix]:
        """Yield a fix that moves the segment to a place where no process spans nodes, if there is one nearby."""
        for start in starts:
            moved = range(start, start + len(segment.resources))
            if moved[-1] < self.resources.total and not any(
                (part.first - start) % size for part in self.resources.nodes_of(moved)[1:]
            ):
                text = f"{_format_range(moved)}:{_format_range(segment.processes)}"
                yield Fix("aligned with the nodes", f"{self.name}: {text}")
                return

    # Complaining ---------------------------------------------------------------------------

    def _complain(
        self,
        code: str,
        message: str,
        offset: int,
        length: int | None,
        rule: str = "",
        fixes: tuple[Fix, ...] = (),
    ) -> None:
        fixes = tuple(fix for fix in fixes if len(fix.paste) <= 200)  # longer texts do not help
        self._add(Finding(code, message, context=self.resources.context, rule=rule, fixes=fixes), offset, length)

    def _add(self, finding: Finding, offset: int, length: int | None) -> None:
        place, mark = self.tree.place(offset), self.tree.mark(offset, length)
        self.findings.append(
            Finding(finding.code, finding.message, place, (mark,), finding.context, finding.rule, finding.fixes)
        )

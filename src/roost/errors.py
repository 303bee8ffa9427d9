"""Every exception of Roost, and the findings that they carry.

The tree::

    RoostError
     ├── ConfigError      (also ValueError)                  a job file, or a value in it
     ├── TopologyError    (also ValueError)                  a description of machines
     ├── PlacementError   (also ValueError, AssertionError)  a placement that cannot be
     ├── RankError        (also ValueError)                  a text that is no rank or range
     ├── ClusterError     (also RuntimeError)                a cluster that cannot be had
     │    ├── ReservationError                               accelerators that cannot be had
     │    └── LaunchError                                    workers that did not start
     │         └── AttestationError                          workers that got something else
     ├── RolloutError     (also RuntimeError)                engines, samples, the buffer or the lock
     │    └── GenerationError                                requests that failed, beside others that did not
     ├── CallTimeoutError (also TimeoutError)                a call that did not end in time
     └── WorkerError      (also RuntimeError)                an exception in a worker
          └── WorkerDiedError                                a worker or its node is gone

An error carries every problem of its input as a :class:`Finding`: what is wrong, where it
stands, which rule it breaks, and what to write instead. ``str(error)`` shows all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "AttestationError",
    "CallTimeoutError",
    "ClusterError",
    "ConfigError",
    "Finding",
    "Fix",
    "GenerationError",
    "LaunchError",
    "Mark",
    "Place",
    "PlacementError",
    "RankError",
    "ReservationError",
    "RolloutError",
    "RoostError",
    "TopologyError",
    "WorkerDiedError",
    "WorkerError",
    "counted",
    "did_you_mean",
    "printable",
    "raise_problems",
    "shown",
]

MAX_SHOWN = 20
"""How many findings ``str(error)`` spells out; the rest are counted."""

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and newline, DEL, C1
    "\u2028\u2029\u202a-\u202e\u2066-\u2069"  # line separators; marks that turn the direction of text
    "\ud800-\udfff]"  # halves of surrogate pairs, as in names of files that are not UTF-8: they cannot be written
)

MAX_WIDTH = 110
"""How much of a long source line is shown around its first mark."""


@dataclass(frozen=True)
class Place:
    """Where a value stands: a file position, a dotted path of keys, or both.

    Attributes:
        path: Dotted keys, such as ``cluster.component_placement.actor``.
        file: Name of the file, or ``None`` where the value did not come from one.
        line: Line number, from 1; 0 where unknown.
        column: Column number, from 1; 0 where unknown.
        source: The text of that line; the value itself where it came from no file.
    """

    path: str = ""
    file: str | None = None
    line: int = 0
    column: int = 0
    source: str = ""

    def __str__(self) -> str:
        position = f"{self.file}:{self.line}:{self.column}" if self.file and self.line else self.file
        if position and self.path:
            return f"{position}  ({self.path})"
        return position or self.path


@dataclass(frozen=True)
class Mark:
    """A stretch of the source line and what there is to say about it.

    Attributes:
        column: First column, from 1.
        length: Number of characters.
        text: What to say.
        primary: Whether this is the culprit (``^``) or what it collides with (``~``).
    """

    column: int
    length: int
    text: str = ""
    primary: bool = True


@dataclass(frozen=True)
class Fix:
    """A remedy: what it does, and the text to paste."""

    text: str
    paste: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing worth saying about an input: a problem, or a note.

    ``str(finding)`` is the message alone; :meth:`render` is the full text with source line,
    rule and fixes.
    """

    code: str
    message: str
    place: Place | None = None
    marks: tuple[Mark, ...] = ()
    context: tuple[str, ...] = ()
    rule: str = ""
    fixes: tuple[Fix, ...] = ()
    severity: Literal["problem", "note"] = "problem"

    def __str__(self) -> str:
        return self.message

    @property
    def is_problem(self) -> bool:
        """Whether this forbids a launch."""
        return self.severity == "problem"

    def render(self) -> str:
        """The full text: message, place, source with marks, context, rule, fixes."""
        word = "error" if self.is_problem else "note"
        lines = [f"{word}[{self.code}]: {self.message}"]
        gutter = "  "
        if self.place is not None and str(self.place):
            gutter = " " * (len(str(self.place.line)) + 1) if self.place.line else "  "
            lines.append(f"{gutter}--> {self.place}")
            if self.place.column and self.place.source.strip():
                lines.extend(_render_source(self.place, self.marks, gutter))
        lines.extend(f"{gutter} = {line}" for line in self.context)
        if self.rule:
            lines.append(f"{gutter} = rule: {self.rule}")
        width = max((len(fix.text) for fix in self.fixes if fix.paste), default=0)
        for fix in self.fixes:
            lines.append(f"help: {fix.text:<{width}}    {fix.paste}" if fix.paste else f"help: {fix.text}")
        return printable("\n".join(lines))


def _render_source(place: Place, marks: Sequence[Mark], gutter: str) -> list[str]:
    """The source line with its marks under it; a long line is cut around the first mark."""
    marks = marks or (Mark(place.column, 1),)
    primary = next((mark for mark in marks if mark.primary), marks[0])
    source = place.source
    start = 0
    if len(source) > MAX_WIDTH:
        start = max(0, min(mark.column for mark in marks) - 1 - MAX_WIDTH // 3)
        if primary.column - start > MAX_WIDTH:
            start = max(0, primary.column - 1 - MAX_WIDTH // 3)
    part = source[start : start + MAX_WIDTH]
    line = "".join(c if c.isprintable() else "→" if c == "\t" else "�" for c in part)
    if start:
        line = "…" + line[1:]
    if start + MAX_WIDTH < len(source):
        line += "…"
    number = str(place.line) if place.line else ""
    lines = [f"{gutter} |", f"{number.rjust(len(gutter))} | {line}"]

    inside = [mark for mark in marks if 0 <= mark.column - 1 - start <= len(line)]
    row = [" "] * (len(line) + 1)
    for mark in sorted(inside, key=lambda mark: mark.primary):
        begin = mark.column - 1 - start
        end = min(begin + max(1, mark.length), len(line) + 1)
        row[begin:end] = ("^" if mark.primary else "~") * (end - begin)
    carets = "".join(row).rstrip()
    labelled = [mark for mark in inside if mark.text]
    last = max(inside, key=lambda mark: mark.column, default=None)
    if last is not None and last.text:
        carets += f" {last.text}"
        labelled.remove(last)
    lines.append(f"{gutter} | {carets}".rstrip())
    for mark in sorted(labelled, key=lambda mark: -mark.column):
        lines.append(f"{gutter} | {' ' * (mark.column - 1 - start)}{mark.text}")
    return lines


class RoostError(Exception):
    """Base of all errors that Roost raises.

    Attributes:
        findings: Every problem of the input, each with place, rule and fixes.
    """

    def __init__(self, findings: Iterable[Finding] | str = ()) -> None:
        if isinstance(findings, str):
            findings = (Finding("R000", findings),)
        self.findings: tuple[Finding, ...] = tuple(findings)
        super().__init__(self.findings)

    def __str__(self) -> str:
        shown = [finding.render() for finding in self.findings[:MAX_SHOWN]]
        more = len(self.findings) - len(shown)
        if more > 0:
            shown.append(f"… and {more:,} more problem{'s' if more > 1 else ''}")
        return "\n\n".join(shown)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of all findings, in order."""
        return tuple(finding.code for finding in self.findings)


class ConfigError(RoostError, ValueError):
    """A job file, or a value in it, is not what it must be."""


class TopologyError(RoostError, ValueError):
    """A description of machines is not what it must be."""


class PlacementError(RoostError, ValueError, AssertionError):
    """A placement cannot be.

    It is an ``AssertionError`` too: code written for older launchers catches that.
    """


class RankError(RoostError, ValueError):
    """A text is not a rank, a range, or a list of them; whoever knows its place says more.

    Attributes:
        reason: What is wrong, in words for people.
        offset: Where in the text, from 0.
        length: How many characters are concerned.
        suggestion: A text that is right and probably meant, or empty.
    """

    def __init__(self, reason: str, offset: int = 0, length: int = 1, suggestion: str = "") -> None:
        super().__init__([Finding("P101", reason)])
        self.reason = reason
        self.offset = offset
        self.length = length
        self.suggestion = suggestion

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.reason, self.offset, self.length, self.suggestion))


class ClusterError(RoostError, RuntimeError):
    """A cluster cannot be had, or is not what was asked for."""


class ReservationError(ClusterError):
    """Accelerators, CPUs or anything else cannot be reserved."""


class LaunchError(ClusterError):
    """Workers did not start; nothing of their group is left running."""


class AttestationError(LaunchError):
    """Workers started, and found something else than their plan says."""


class RolloutError(RoostError, RuntimeError):
    """Generating went wrong: an engine, its samples, the buffer that keeps them, or the lock around weights."""


class GenerationError(RolloutError):
    """Requests failed or timed out; what the other requests gave is kept.

    Attributes:
        finished: What was generated nevertheless, by its index in the list that was given: the outputs of a
            request where ``EngineClient`` raises, a finished ``SampleGroup`` where ``RolloutManager`` raises.
    """

    def __init__(self, findings: Iterable[Finding] | str = (), finished: Mapping[int, Any] | None = None) -> None:
        super().__init__(findings)
        self.finished: dict[int, Any] = dict(finished or {})

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.findings, self.finished))


class WorkerError(RoostError, RuntimeError):
    """An exception in a worker.

    Attributes:
        group: Name of its group.
        rank: Its rank.
        node_rank: Its node.
        remote_traceback: The traceback, as the worker saw it.
    """

    def __init__(
        self,
        findings: Iterable[Finding] | str,
        group: str = "",
        rank: int = -1,
        node_rank: int = -1,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(findings)
        self.group = group
        self.rank = rank
        self.node_rank = node_rank
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        trace = f"\n\n{printable(self.remote_traceback.rstrip())}" if self.remote_traceback else ""
        return super().__str__() + trace

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.findings, self.group, self.rank, self.node_rank, self.remote_traceback)
        return (type(self), fields)


class CheckpointError(RoostError, RuntimeError):
    """A trainer's checkpoint cannot be written or read."""


class CallTimeoutError(RoostError, TimeoutError):
    """A call did not end in time; it says what it waited for: ranks that are still at it, who holds what."""


class WorkerDiedError(WorkerError):
    """A worker process, or the node it was on, is gone."""


def raise_problems(findings: Iterable[Finding]) -> None:
    """Raises one error that carries all problems among the findings; none: returns.

    A placement fault makes it a :class:`PlacementError`, whatever else was found beside it;
    faults of machine descriptions alone make a :class:`TopologyError`.
    """
    problems = tuple(finding for finding in findings if finding.is_problem)
    if not problems:
        return
    letters = {problem.code[0] for problem in problems}
    if "P" in letters:
        raise PlacementError(problems)
    if letters == {"T"}:
        raise TopologyError(problems)
    raise ConfigError(problems)


def counted(count: int, noun: str) -> str:
    """``1 process``, ``4 processes``, ``12,000 GPUs``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def printable(text: str) -> str:
    r"""Return a text in which control characters are spelled out (``\x1b``), so that no terminal obeys them.

    Labels, paths, addresses and contents of files may come from somebody else. Newlines and tabs stay as they are.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shown(value: object, width: int = 60) -> str:
    """A value for a message: short, and whatever it is (an int may be too long to print)."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= width else text[: width - 1] + "…"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word that comes nearest to a mistyped one, if any is near."""
    if len(word) > 100:
        return None
    import difflib  # only a mistyped word is worth the time

    by_folded = {candidate.casefold(): candidate for candidate in known}
    near = difflib.get_close_matches(word.casefold(), list(by_folded)[:10_000], n=1, cutoff=0.6)
    return by_folded[near[0]] if near else None

"""The exceptions of Roost, and the findings that they carry.

The tree::

    RoostError
     ├── ConfigError      (also ValueError)                  a job file, or a value in it
     ├── TopologyError    (also ValueError)                  a description of machines
     ├── PlacementError   (also ValueError, AssertionError)  an impossible placement
     ├── RankError        (also ValueError)                  a text that is not a rank or a range
     ├── ClusterError     (also RuntimeError)                a cluster that is missing or unsuitable
     │    ├── ReservationError                               accelerators that cannot be reserved
     │    └── LaunchError                                    workers that did not start
     │         └── AttestationError                          workers whose node or GPUs differ from the plan
     ├── RolloutError     (also RuntimeError)                engines, samples, the buffer or the lock
     │    └── GenerationError                                some of several requests failed
     ├── CheckpointError  (also RuntimeError)                a trainer's checkpoint that cannot be written or read
 ├── CallTimeoutError (also TimeoutError)                a call that did not finish in time
     └── WorkerError      (also RuntimeError)                an exception in a worker
          └── WorkerDiedError                                a worker or its node is gone

An error carries every problem of its input as a :class:`Finding`: what is wrong, where, which rule it breaks, and what
to write instead. ``str(error)`` shows the first 20 findings in full and the number of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "AttestationError",
    "CallTimeoutError",
    "CheckpointError",
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
"""Number of findings that ``str(error)`` shows in full."""

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and newline, DEL, C1
    "\u2028\u2029\u202a-\u202e\u2066-\u2069"  # line separators; marks that change the direction of text
    "\ud800-\udfff]"  # lone surrogates, as in file names that are not UTF-8: they cannot be encoded
)

MAX_WIDTH = 110
"""Number of characters shown of a long source line, around its first mark."""


@dataclass(frozen=True)
class Place:
    """The place of a value: a position in a file, a dotted path of keys, or both.

    Attributes:
        path: Dotted keys, such as ``cluster.component_placement.actor``.
        file: Name of the file; ``None`` if the value did not come from a file.
        line: Line number, from 1; 0 if unknown.
        column: Column number, from 1; 0 if unknown.
        source: The text of that line, or the value itself if it did not come from a file.
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
    """A part of the source line, with a remark.

    Attributes:
        column: First column, from 1.
        length: Number of characters.
        text: The remark; may be empty.
        primary: Whether this part is wrong (``^``), or conflicts with the wrong part (``~``).
    """

    column: int
    length: int
    text: str = ""
    primary: bool = True


@dataclass(frozen=True)
class Fix:
    """A remedy: what it does, and a text to paste, which may be empty."""

    text: str
    paste: str = ""


@dataclass(frozen=True)
class Finding:
    """A problem of an input, or a note about it.

    ``str(finding)`` returns the message alone; :meth:`render` returns the full text.

    Attributes:
        code: Code in the error reference, such as ``P104``.
        message: What is wrong, in one line.
        place: Place of the value that is wrong, if known.
        marks: Parts of the source line to underline.
        context: Further facts, one per line, such as the size of the cluster.
        rule: The rule that the input breaks.
        fixes: Remedies.
        severity: A ``problem`` forbids a launch, a ``note`` does not.
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
        """Return the full text: message, place, source line with marks, context, rule, fixes."""
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
    """Return the source line with its marks below; a long line is cut around the first mark."""
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
    """Base class of all errors that Roost raises.

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
    """A job file, or a value in it, is wrong."""


class TopologyError(RoostError, ValueError):
    """A description of nodes is wrong."""


class PlacementError(RoostError, ValueError, AssertionError):
    """The requested placement is impossible.

    It is also an ``AssertionError``, because code written for older launchers catches that.
    """


class RankError(RoostError, ValueError):
    """A text is not a rank, a range, or a list of them. Code that knows the place of the text adds it.

    Attributes:
        reason: What is wrong.
        offset: Position of the wrong part in the text, from 0.
        length: Number of characters of the wrong part.
        suggestion: A correct text that was probably meant; empty if there is none.
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
    """A cluster cannot be reached or started, or is not as requested."""


class ReservationError(ClusterError):
    """Accelerators, CPUs or other Ray resources cannot be reserved."""


class LaunchError(ClusterError):
    """A worker group did not start; none of its processes is left running."""


class AttestationError(LaunchError):
    """Workers started on another node or with other accelerators than their plan says."""


class RolloutError(RoostError, RuntimeError):
    """Generation failed: in an engine, its samples, the buffer that keeps them, or the lock around weights."""


class GenerationError(RolloutError):
    """Some requests failed or timed out; the results of the others are kept.

    Attributes:
        finished: Results of the requests that succeeded, by their index in the list of requests. Each is the outputs
            of a request if ``EngineClient`` raises, and a finished ``SampleGroup`` if ``RolloutManager`` raises.
    """

    def __init__(self, findings: Iterable[Finding] | str = (), finished: Mapping[int, Any] | None = None) -> None:
        super().__init__(findings)
        self.finished: dict[int, Any] = dict(finished or {})

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.findings, self.finished))


class WorkerError(RoostError, RuntimeError):
    """An exception in a worker.

    Attributes:
        group: Name of the worker group.
        rank: Rank of the worker; -1 if unknown.
        node_rank: Rank of its node; -1 if unknown.
        remote_traceback: The traceback in the worker process.
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
    """A call did not finish in time. The message names the ranks still running, or the holder of the lock."""


class WorkerDiedError(WorkerError):
    """A worker process, or its node, died."""


def raise_problems(findings: Iterable[Finding]) -> None:
    """Raise one error with all problems among the findings; return if there are none.

    Raises:
        PlacementError: At least one problem is about a placement.
        TopologyError: All problems are about the description of nodes.
        ConfigError: Otherwise.
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
    """Return a count with its noun: ``1 process``, ``4 processes``, ``12,000 GPUs``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def printable(text: str) -> str:
    r"""Return a text in which control characters are spelled out (``\x1b``), so that a terminal does not interpret them.

    Labels, paths, addresses and file contents may come from other users. Newlines and tabs are kept.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shown(value: object, width: int = 60) -> str:
    """Return any value as a short text for a message. Python may refuse to print a value, such as a very long integer."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= width else text[: width - 1] + "…"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to a mistyped word; ``None`` if no word is near."""
    if len(word) > 100:
        return None
    import difflib  # slow to import, and needed only for mistyped words

    by_folded = {candidate.casefold(): candidate for candidate in known}
    near = difflib.get_close_matches(word.casefold(), list(by_folded)[:10_000], n=1, cutoff=0.6)
    return by_folded[near[0]] if near else None

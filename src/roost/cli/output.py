"""Print results to stdout and problems to stderr, in colour on a terminal.

All output of commands goes through this module. It spells out control characters, so that a label or the content of
a file cannot control the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.text import Text

from roost.errors import Finding, RoostError, printable

__all__ = ["print_error", "print_json", "print_notes", "print_problems", "print_view", "spelled_out"]

_STYLES = (("error[", "bold red"), ("note[", "bold cyan"), ("help:", "green"))


def print_view(view: Text | str, stream: TextIO | None = None) -> None:
    """Print text to a stream, by default stdout, without wrapping lines."""
    _write(stream or sys.stdout, view)


def print_json(text: str) -> None:
    """Print JSON to stdout, with control characters as JSON escapes."""
    characters = (c if printable(c) == c else f"\\u{ord(c):04x}" for c in text)
    sys.stdout.write(text if printable(text) == text else "".join(characters))


def spelled_out(text: Text) -> Text:
    """Return styled text with control characters spelled out; the same object if there are none."""
    if printable(text.plain) == text.plain:
        return text
    edges = [edge for index, c in enumerate(text.plain) if printable(c) != c for edge in (index, index + 1)]
    found = Text()
    for piece in text.divide(edges):
        is_clean = printable(piece.plain) == piece.plain
        found.append_text(piece if is_clean else Text(printable(piece.plain), style="reverse"))
    return found


def print_problems(findings: Iterable[Finding]) -> int:
    """Print the problems among findings to stderr, and return their number."""
    problems = [finding for finding in findings if finding.is_problem]
    if problems:
        print_error(RoostError(problems))
    return len(problems)


def print_notes(findings: Iterable[Finding]) -> None:
    """Print the notes among findings to stdout, with their fixes."""
    for finding in findings:
        if not finding.is_problem:
            _write(sys.stdout, Text.assemble((f"note[{finding.code}]", "bold cyan"), f": {finding}"))
            for fix in finding.fixes:
                _write(sys.stdout, Text(f"  help: {fix.text}    {fix.paste}".rstrip(), style="green"))


def print_error(error: RoostError) -> None:
    """Print all problems of an error to stderr, and their number if there are several."""
    sys.stdout.flush()
    for line in str(error).splitlines():
        style = next((style for start, style in _STYLES if line.startswith(start)), "")
        _write(sys.stderr, Text(line, style=style))
    count = len(error.findings)
    if count > 1:
        _write(sys.stderr, Text(f"\n{count:,} problems", style="bold"))


def _write(stream: TextIO, text: Text | str) -> None:
    text = printable(text) if isinstance(text, str) else spelled_out(text)
    is_coloured = (stream.isatty() or os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    if not is_coloured:  # rich.console would add a fifth to the time of a small plan
        stream.write(f"{text.plain if isinstance(text, Text) else text}\n")
        return
    from rich.console import Console

    Console(file=stream, highlight=False, emoji=False, markup=False).print(text, soft_wrap=True)

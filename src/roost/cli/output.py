"""Where output goes: results to stdout, problems to stderr; in colour where a terminal shows it.

All that commands print goes through here, and control characters in it are spelled out: a label or the content of a file
must not command the terminal.
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
    """Prints a drawing, to stdout where no other stream is given; lines are never wrapped."""
    _write(stream or sys.stdout, view)


def print_json(text: str) -> None:
    """Prints JSON, and nothing else, to stdout; control characters as JSON spells them, which means the same."""
    characters = (c if printable(c) == c else f"\\u{ord(c):04x}" for c in text)
    sys.stdout.write(text if printable(text) == text else "".join(characters))


def spelled_out(text: Text) -> Text:
    """A styled text with control characters spelled out; the same text where there are none."""
    if printable(text.plain) == text.plain:
        return text
    edges = [edge for index, c in enumerate(text.plain) if printable(c) != c for edge in (index, index + 1)]
    found = Text()
    for piece in text.divide(edges):
        is_clean = printable(piece.plain) == piece.plain
        found.append_text(piece if is_clean else Text(printable(piece.plain), style="reverse"))
    return found


def print_problems(findings: Iterable[Finding]) -> int:
    """Prints the problems among findings to stderr; returns how many there are."""
    problems = [finding for finding in findings if finding.is_problem]
    if problems:
        print_error(RoostError(problems))
    return len(problems)


def print_notes(findings: Iterable[Finding]) -> None:
    """Prints the notes among findings to stdout, a line each, with their fixes."""
    for finding in findings:
        if not finding.is_problem:
            _write(sys.stdout, Text.assemble((f"note[{finding.code}]", "bold cyan"), f": {finding}"))
            for fix in finding.fixes:
                _write(sys.stdout, Text(f"  help: {fix.text}    {fix.paste}".rstrip(), style="green"))


def print_error(error: RoostError) -> None:
    """Prints all problems of an error to stderr, and how many they are."""
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
    if not is_coloured:  # a console costs a fifth of the time of a small plan
        stream.write(f"{text.plain if isinstance(text, Text) else text}\n")
        return
    from rich.console import Console

    Console(file=stream, highlight=False, emoji=False, markup=False).print(text, soft_wrap=True)

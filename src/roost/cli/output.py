"""Where output goes: results to stdout, problems to stderr; in colour where a terminal shows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.text import Text

from roost.errors import Finding, RoostError

__all__ = ["print_error", "print_notes", "print_problems", "print_view"]

_STYLES = (("error[", "bold red"), ("note[", "bold cyan"), ("help:", "green"))


def print_view(view: Text | str) -> None:
    """Prints a drawing to stdout; lines are never wrapped."""
    _write(sys.stdout, view)


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
    is_coloured = (stream.isatty() or os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    if not is_coloured:  # a console costs a fifth of the time of a small plan
        stream.write(f"{text.plain if isinstance(text, Text) else text}\n")
        return
    from rich.console import Console

    Console(file=stream, highlight=False, emoji=False, markup=False).print(text, soft_wrap=True)

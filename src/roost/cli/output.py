"""Where output goes: results to stdout, problems to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from roost.errors import Finding, RoostError

__all__ = ["print_error", "print_notes", "print_problems", "print_view", "stdout"]

_STYLES = (("error[", "bold red"), ("note[", "bold cyan"), ("help:", "green"))


def stdout() -> Console:
    """The console for results."""
    return Console(highlight=False, emoji=False, markup=False)


def print_view(view: Text | str) -> None:
    """Prints a drawing to stdout; lines are never wrapped."""
    stdout().print(view, soft_wrap=True)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, emoji=False, markup=False)


def print_problems(findings: Iterable[Finding]) -> int:
    """Prints the problems among findings to stderr; returns how many there are."""
    problems = [finding for finding in findings if finding.is_problem]
    if problems:
        print_error(RoostError(problems))
    return len(problems)


def print_notes(findings: Iterable[Finding]) -> None:
    """Prints the notes among findings to stdout, a line each, with their fixes."""
    console = stdout()
    for finding in findings:
        if not finding.is_problem:
            console.print(Text.assemble((f"note[{finding.code}]", "bold cyan"), f": {finding}"), soft_wrap=True)
            for fix in finding.fixes:
                console.print(Text(f"  help: {fix.text}    {fix.paste}".rstrip(), style="green"), soft_wrap=True)


def print_error(error: RoostError) -> None:
    """Prints all problems of an error to stderr, and how many they are."""
    sys.stdout.flush()
    console = _stderr()
    for line in str(error).splitlines():
        style = next((style for start, style in _STYLES if line.startswith(start)), "")
        console.print(Text(line, style=style), soft_wrap=True)
    count = len(error.findings)
    if count > 1:
        console.print(Text(f"\n{count:,} problems", style="bold"))

"""Pages of the reference that are made from the source: ``make snapshots`` writes them anew."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from roost.cli import build_parser

DOCS = Path(__file__).parents[2] / "docs"


def pages() -> dict[Path, str]:
    """Return each generated page and its text."""
    return {DOCS / "reference" / "cli.md": command_line()}


def command_line() -> str:
    """Return the page about the command line, made from the parser of ``roost``."""
    parts = [
        "# Command line",
        "This page is generated from the command itself; `roost COMMAND --help` prints the same.",
    ]
    for words, parser in _commands(build_parser(), ("roost",)):
        parts.append(f"{'#' * len(words)} `{' '.join(words)}`")
        parts += _prose(parser.description or "")
        parts += _table(parser)
    epilog = _prose(build_parser().epilog or "")
    return "\n\n".join([*parts, "## Exit codes and colours", *epilog]) + "\n"


def _commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield all commands below a parser, with their words."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield (*words, name), child
                yield from _commands(child, (*words, name))


def _prose(text: str) -> list[str]:
    """Return a help text as Markdown: paragraphs, and what is indented or aligned as blocks."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.splitlines()
        if any(re.search(r"^  |\S {3,}\S", line) for line in lines):
            indent = min(len(line) - len(line.lstrip()) for line in lines)
            parts.append("\n".join(["```text", *(line[indent:] for line in lines), "```"]))
        elif paragraph.strip():
            words = _escaped(" ".join(line.strip() for line in lines))
            parts.append(textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False))
    return parts


def _table(parser: argparse.ArgumentParser) -> list[str]:
    """Return the arguments of a command as a table; nothing if it has none."""
    rows = [
        f"| `{_name(action)}` | {_escaped(_meaning(action))} |"
        for action in parser._actions
        if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
    ]
    return ["\n".join(["| argument | meaning |", "|---|---|", *rows])] if rows else []


def _name(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else None
    if action.choices is not None and value is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return value or action.dest
    flag = ", ".join(action.option_strings)
    return flag if action.nargs == 0 else f"{flag} {value or action.dest.upper()}"


def _meaning(action: argparse.Action) -> str:
    text = " ".join((action.help or "").split()).replace("%(default)s", str(action.default)).replace("%%", "%")
    return f"{text} (required)" if action.required and action.option_strings else text


def _escaped(text: str) -> str:
    """Return a text whose quoted commands are code, and whose other signs mean nothing to Markdown."""
    text = re.sub(r"(?<!\w)'([^'\s][^']*)'", r"`\1`", text)
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<>\[\]|])", r"\\\1", p) for p in pieces)

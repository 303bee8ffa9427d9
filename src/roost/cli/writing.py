"""Write job files for people: YAML with comments."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from roost.cli.inputs import UsageError
from roost.errors import Finding, Fix

__all__ = ["Writer", "check_free", "ranks", "scalar"]

_WIDTH = 100
_NOTES_AT = 26
"""The smallest column in which notes start."""
_RANK_KEYS = ("placement", "node_ranks")
_PLAIN = re.compile(r"[A-Za-z0-9_./$][A-Za-z0-9_./ ,:()<>=+$-]*\Z")


class Writer:
    """Collects the lines of a YAML file. Notes follow values, and comments have lines of their own."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, str]] = []

    def comment(self, text: str, depth: int = 0) -> Writer:
        """Add comment lines, wrapped at 100 columns; an empty text adds an empty comment line."""
        indent = "  " * depth
        for part in text.splitlines() or [""]:
            hanging = "  " if part.startswith("- ") else re.match(r" *", part)[0]  # type: ignore[index]
            for line in textwrap.wrap(
                part,
                _WIDTH - 2 - len(indent),
                subsequent_indent=hanging,
                break_long_words=False,
                break_on_hyphens=False,
            ) or [""]:
                self._lines.append((f"{indent}# {line}".rstrip(), ""))
        return self

    def blank(self) -> Writer:
        """Add an empty line."""
        self._lines.append(("", ""))
        return self

    def raw(self, line: str, note: str = "") -> Writer:
        """Add a line unchanged."""
        self._lines.append((line, note))
        return self

    def key(self, key: str, value: Any = None, note: str = "", depth: int = 0) -> Writer:
        """Add a key with a scalar, a mapping or a list; without a value, the caller adds the lines below the key."""
        if key in _RANK_KEYS and isinstance(value, str) and value.isdigit():
            value = int(value)  # a rank needs no quotes
        self._value("  " * depth + scalar(key) + ":", value, depth, note)
        return self

    def _value(self, head: str, value: Any, depth: int, note: str = "") -> None:
        if value is None:
            self._lines.append((head, note))
        elif isinstance(value, Mapping) and not _is_small(value):
            self._lines.append((head, note))
            for key, child in value.items():
                self._value("  " * (depth + 1) + scalar(key) + ":", _NULL if child is None else child, depth + 1)
        elif isinstance(value, (list, tuple)) and value and not _is_small(value):
            self._lines.append((head, note))
            for item in value:
                self._item(item, depth + 1)
        else:
            self._lines.append((f"{head} {_flow(value)}", note))

    def _item(self, item: Any, depth: int) -> None:
        if not isinstance(item, Mapping) or _is_small(item):
            self._lines.append(("  " * depth + f"- {_flow(item)}", ""))
            return
        start = len(self._lines)
        for key, child in item.items():
            self._value("  " * (depth + 1) + scalar(key) + ":", _NULL if child is None else child, depth + 1)
        first, note = self._lines[start]
        self._lines[start] = ("  " * depth + "- " + first.lstrip(), note)

    def text(self) -> str:
        """Return the text of the file."""
        lines = []
        for index, (line, note) in enumerate(self._lines):
            if not note:
                lines.append(line)
                continue
            column = max(_NOTES_AT, *(len(self._lines[i][0]) for i in self._neighbours(index)))
            lines.append(f"{line:<{column}}  # {note}")
        return "\n".join(lines).strip("\n") + "\n"

    def _neighbours(self, index: int) -> range:
        """Return the adjacent lines with notes, whose notes start in the same column."""
        first = last = index
        while first > 0 and self._lines[first - 1][1]:
            first -= 1
        while last + 1 < len(self._lines) and self._lines[last + 1][1]:
            last += 1
        return range(first, last + 1)


class _Null:
    pass


_NULL = _Null()


def _is_small(value: Any) -> bool:
    """Return whether a mapping or list fits on one line."""
    children = list(value.values()) if isinstance(value, Mapping) else list(value)
    return all(not isinstance(child, (Mapping, list, tuple)) for child in children) and (
        len(_flow(value)) <= 70 and (isinstance(value, (list, tuple)) or len(children) <= 3)
    )


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(k)}: {_in_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_in_flow(item) for item in value) + "]"
    return scalar(value)


def _in_flow(value: Any) -> str:
    text = _flow(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and "," in text and text[0] != '"' else text


def scalar(value: Any) -> str:
    """Return a scalar as YAML, quoted if a loader of YAML 1.1 or 1.2 would read something else."""
    if value is None or isinstance(value, _Null):
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, str):
        return str(value)
    is_plain = _PLAIN.match(value) and ": " not in value and not value.endswith((":", " "))
    return value if is_plain and _is_read_as_text(value) else json.dumps(value, ensure_ascii=False)


def _is_read_as_text(value: str) -> bool:
    """Return whether loaders of YAML 1.1 and 1.2 read a plain scalar as text, not as a number, a date or ``yes``."""
    import yaml

    from roost.source.yaml import read_value

    try:
        return bool(yaml.safe_load(value) == value and read_value(value, "").value == value)
    except (yaml.YAMLError, ValueError):  # not YAML, or an invalid date
        return False


def ranks(first: int, count: int) -> str:
    """Return ``count`` ranks from ``first`` on, such as ``3`` or ``0-7``."""
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def check_free(path: str, force: bool) -> None:
    """Raise if a path exists, unless ``force`` is set.

    Raises:
        UsageError: If the path exists (U130).
    """
    is_file = os.path.isfile(path) or os.path.islink(path) or os.path.isdir(path)  # /dev/stdout may be written to
    if is_file and not force:
        fixes = (Fix("overwrite it", "--force"), Fix("or write another", "--out other.yaml"))
        raise UsageError([Finding("U130", f"{path} already exists", fixes=fixes)])

"""The rank grammar: ``3``, ``0-7``, ``0-3,5,8-11``.

Ranks are ASCII digits, ranges are inclusive, spaces are ignored. A list of ranks is a tuple of ``range`` objects, so
that parsing ``0-999999999999`` does not build a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from roost.errors import RankError

__all__ = ["MAX_RANK", "format_ranks", "parse_range", "parse_ranks"]

MAX_RANK = 2**40
"""Larger numbers are typing errors and are refused."""

_RANGE = re.compile(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?\Z", re.ASCII)


def parse_range(text: str, offset: int = 0) -> range:
    """Return one rank or one inclusive range as a ``range``.

    Args:
        text: A text such as ``"3"`` or ``"0-7"``.
        offset: Position of the text in a longer one; added to the position in errors.

    Raises:
        RankError: The text is not a rank or a range, the range runs backwards, or a number is too large.
    """
    match = _RANGE.match(text)
    if match is None:
        stripped = text.strip()
        start = offset + len(text) - len(text.lstrip())
        if not stripped:
            raise RankError("a rank is missing here", offset, max(1, len(text)))
        shown = stripped if len(stripped) <= 40 else stripped[:39] + "…"
        if stripped.startswith("-"):
            raise RankError(f"ranks are never negative: {shown!r}", start, len(stripped))
        raise RankError(f"{shown!r} is not a rank (3) or a range (0-7)", start, len(stripped))
    first, last = match[1], match[2]
    for group in (1, 2):
        digits = match[group] or "0"
        if len(digits) > 13 or int(digits) >= MAX_RANK:
            shown = digits if len(digits) <= 20 else f"{digits[:17]}…"
            raise RankError(f"{shown} is no rank: it is too large", offset + match.start(group), len(digits))
    begin = int(first)
    end = begin if last is None else int(last)
    if end < begin:
        start, length = offset + match.start(1), match.end(2) - match.start(1)
        raise RankError(f"the range {begin}-{end} runs backwards", start, length, f"{end}-{begin}")
    return range(begin, end + 1)


def parse_ranks(text: str) -> tuple[range, ...]:
    """Return the ranks and ranges of a comma-separated list, in the order written.

    Raises:
        RankError: An item is not a rank or a range; the first such item is reported.
    """
    ranges = []
    offset = 0
    for item in text.split(","):
        ranges.append(parse_range(item, offset))
        offset += len(item) + 1
    return tuple(ranges)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return the shortest text for ascending ranks: ``[0, 1, 2, 5]`` → ``"0-2,5"``."""
    parts: list[str] = []
    first = last = None
    for rank in ranks:
        if last is not None and rank == last + 1:
            last = rank
            continue
        if first is not None:
            parts.append(f"{first}" if first == last else f"{first}-{last}")
        first = last = rank
    if first is not None:
        parts.append(f"{first}" if first == last else f"{first}-{last}")
    return ",".join(parts)

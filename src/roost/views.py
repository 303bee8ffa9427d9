"""Who draws a value that shows itself, as in a notebook.

A plan may not know the reports, which stand above it. So the package's front, which knows them all, leaves
here a function per kind of view, and the plan asks for it; the report is loaded when something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["draw", "register_view"]

_views: dict[str, Callable[[Any], str]] = {}


def register_view(kind: str, function: Callable[[Any], str]) -> None:
    """Makes a function the one that draws values of a kind."""
    _views[kind] = function


def draw(kind: str, value: object) -> str | None:
    """The drawing of a value; ``None`` where nobody draws its kind."""
    function = _views.get(kind)
    return None if function is None else function(value)

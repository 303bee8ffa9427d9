"""The terminal's component colours, for pages and pictures."""

from __future__ import annotations

from roost.report.letters import COLOURS

__all__ = ["IDLE", "PALETTE", "Paint", "paint_of"]

Paint = tuple[str, str]
"""Fill colour of a field, and text colour on it."""

PALETTE: dict[str, Paint] = {
    "bright_cyan": ("#67d8ef", "#06343f"),
    "bright_magenta": ("#f0a6f2", "#4d0f52"),
    "bright_green": ("#86e3a1", "#0b3d1e"),
    "bright_yellow": ("#fbd35c", "#463204"),
    "bright_blue": ("#93bdfd", "#0c2a66"),
    "bright_red": ("#ff9d92", "#5a120b"),
    "cyan": ("#0e7490", "#ffffff"),
    "magenta": ("#97279d", "#ffffff"),
    "green": ("#15803d", "#ffffff"),
    "yellow": ("#976407", "#ffffff"),
    "blue": ("#2456c9", "#ffffff"),
    "red": ("#b3372b", "#ffffff"),
}
"""Light fields with dark text, then dark fields with white text. Both are legible on light and dark pages."""

IDLE: Paint = ("none", "#7c8796")


def paint_of(index: int) -> Paint:
    """Return the paint of a component by its index; the hue is that of the terminal."""
    return PALETTE[COLOURS[index % len(COLOURS)]]

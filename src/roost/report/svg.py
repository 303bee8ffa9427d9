"""A plan as one SVG picture without scripts, for papers, READMEs and notebooks."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from xml.sax.saxutils import escape

from roost.plan import ComponentPlan, Plan
from roost.report.letters import component_letters
from roost.report.palette import paint_of
from roost.report.rows import NodeRow, fold, node_rows
from roost.report.terminal import summary

__all__ = ["draw_image", "draw_svg"]

_CELL_WIDTH, _CELL_HEIGHT, _GAP = 54, 54, 5
_COLUMNS = 8
_MARGIN = 18
_LABEL_WIDTH = 8
"""Upper estimate of the width of a letter, in pixels."""

_STYLE = """\
.roost text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #17202c; }
.roost .muted { fill: #5b6879; font-size: 12px; }
.roost .title { font-weight: 600; font-size: 14px; }
.roost .letter { font: 700 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; text-anchor: middle; }
.roost .index { fill: #5b6879; font-size: 11px; text-anchor: middle; }
.roost .page { fill: #ffffff; stroke: #dbe1e9; }
.roost .field { fill: #eef1f5; }
.roost .edge { fill: none; stroke: #98a4b3; }
.roost .idle { fill: none; stroke: #98a4b3; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  .roost text { fill: #e7edf5; }
  .roost .muted, .roost .index { fill: #96a4b6; }
  .roost .page { fill: #171e28; stroke: #2a3543; }
  .roost .field { fill: #1e2733; }
}
"""
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def draw_svg(plan: Plan) -> str:
    """Return the map of a plan as SVG text, identical for equal plans.

    Nodes are rows. Accelerators are fields, divided by the shares of their components. In large plans equal nodes share
    a row, as in the terminal.
    """
    return _Picture(plan).draw()


def draw_image(plan: Plan) -> str:
    """Return the map as an HTML image, so that its style and that of a notebook do not mix."""
    data = b64encode(draw_svg(plan).encode()).decode()
    return f'<img alt="{_escaped(summary(plan))}" src="data:image/svg+xml;base64,{data}">'


class _Picture:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        names = [component.name for component in plan.components]
        self.letters = component_letters(names)
        self.paints = {name: paint_of(index) for index, name in enumerate(names)}
        self.parts: list[str] = []
        self.width = 0.0

    def draw(self) -> str:
        head, middle, tail = fold(node_rows(self.plan), 14, 2)
        labels = [_label(row) for row in (*head, *tail)]
        left = _MARGIN + max(_text_width(text) for pair in labels for text in pair) + 12
        title = summary(self.plan)
        self._text(title, _MARGIN, _MARGIN + 12, "title")
        widest = max(len(row.crowds) for row in (*head, *tail))
        for index in range(widest if widest <= _COLUMNS else 0):
            x = left + index * (_CELL_WIDTH + _GAP) + _CELL_WIDTH / 2
            self.parts.append(f'<text class="index" x="{_n(x)}" y="{_MARGIN + 35}">{index}</text>')
        y = _MARGIN + 42.0
        for row in head:
            y = self._row(row, left, y)
        if middle:
            left_out = sum(len(row.ranks) for row in middle)
            self._text(f"… {left_out:,} more nodes", _MARGIN, y + 10, "muted")
            y += 26
            for row in tail:
                y = self._row(row, left, y)
        self.width = max(self.width, _MARGIN + 1.2 * _text_width(title))
        y = self._legend(y + 8)
        return self._whole(self.width + _MARGIN, y + _MARGIN - 4, title)

    def _whole(self, width: float, height: float, title: str) -> str:
        size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
        page = f'<rect class="page" x="0.5" y="0.5" width="{_n(width - 1)}" height="{_n(height - 1)}" rx="10"/>'
        body = "\n".join(self.parts)
        return (
            f'<svg class="roost" xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{_escaped(title)}">\n'
            f"<title>{_escaped(title)}</title>\n<style>\n{_STYLE}</style>\n{page}\n{body}\n</svg>\n"
        )

    # Nodes ---------------------------------------------------------------------------------

    def _row(self, row: NodeRow, left: float, y: float) -> float:
        lines = max(1, -(-len(row.crowds) // _COLUMNS))
        height = lines * (_CELL_HEIGHT + _GAP)
        first, second = _label(row)
        self._text(first, _MARGIN, y + (24 if second else 32), "")
        if second:
            self._text(second, _MARGIN, y + 41, "muted")
        for index, crowd in enumerate(row.crowds):
            x = left + index % _COLUMNS * (_CELL_WIDTH + _GAP)
            self._cell(crowd, x, y + index // _COLUMNS * (_CELL_HEIGHT + _GAP))
        columns = min(len(row.crowds), _COLUMNS)
        self._on_node(row.on_node, left + columns * (_CELL_WIDTH + _GAP) + 6, y)
        return y + height + 6

    def _cell(self, crowd: int, x: float, y: float) -> None:
        frame = f'x="{_n(x + 0.5)}" y="{_n(y + 0.5)}" width="{_CELL_WIDTH - 1}" height="{_CELL_HEIGHT - 1}" rx="3"'
        self.width = max(self.width, x + _CELL_WIDTH)
        if not crowd:
            self.parts.append(f'<rect class="idle" {frame}/>')
            return
        self.parts.append(f'<rect class="field" {frame}/>')
        members = [(self.plan.components[index], count) for index, count in self.plan.occupancy.members(crowd).items()]
        top = y + 1.0
        for (component, count), share in zip(members, shares_of(members), strict=True):
            height = share * (_CELL_HEIGHT - 2)
            fill, ink = self.paints[component.name]
            opacity = ' fill-opacity="0.35"' if component.placeholder else ""
            self.parts.append(
                f'<rect x="{_n(x + 1)}" y="{_n(top)}" width="{_CELL_WIDTH - 2}" height="{_n(height)}" '
                f'fill="{fill}"{opacity}/>'
            )
            size = "" if height >= 13 else f"font-size:{_n(max(6.0, height))}px"
            text = self.letters[component.name] + (f"×{count}" if count > 1 else "")
            self._letter(text, x + _CELL_WIDTH / 2, top + height / 2, ink, size)
            top += height
        self.parts.append(f'<rect class="edge" {frame}/>')

    def _on_node(self, counts: Sequence[tuple[int, int]], x: float, y: float) -> None:
        for index, count in counts:
            component = self.plan.components[index]
            text = self.letters[component.name] + (f" ×{count:,}" if count > 1 else "")
            width = 14.0 + 8 * len(text)
            fill, ink = self.paints[component.name]
            self.parts.append(
                f'<rect x="{_n(x)}" y="{_n(y + 16)}" width="{_n(width)}" height="22" rx="11" fill="{fill}"/>'
            )
            self._letter(text, x + width / 2, y + 27, ink)
            x += width + 5
            self.width = max(self.width, x)

    # Texts ---------------------------------------------------------------------------------

    def _legend(self, y: float) -> float:
        x = float(_MARGIN)
        for component in self.plan.components:
            text = component.name + (" (reserved)" if component.placeholder else "")
            x, y = self._fit(x, y, 28 + _text_width(text))
            fill, ink = self.paints[component.name]
            self.parts.append(f'<rect x="{_n(x)}" y="{_n(y)}" width="22" height="20" rx="5" fill="{fill}"/>')
            self._letter(self.letters[component.name], x + 11, y + 10, ink)
            self._text(text, x + 28, y + 15, "")
            x += 28 + _text_width(text) + 14
        if self.plan.idle_accelerators:
            x, y = self._fit(x, y, 60)
            self.parts.append(f'<rect class="idle" x="{_n(x)}" y="{_n(y)}" width="22" height="20" rx="5"/>')
            self._text("idle", x + 28, y + 15, "")
        return y + 20

    def _fit(self, x: float, y: float, width: float) -> tuple[float, float]:
        """Return the place of the next entry of the legend: on this line, or on the next one."""
        return (x, y) if x == _MARGIN or x + width <= max(self.width, 420) else (float(_MARGIN), y + 28)

    def _text(self, text: str, x: float, y: float, style: str) -> None:
        css_class = f' class="{style}"' if style else ""
        self.parts.append(f'<text{css_class} x="{_n(x)}" y="{_n(y)}">{_escaped(text)}</text>')

    def _letter(self, text: str, x: float, y: float, ink: str, style: str = "") -> None:
        inline = f"fill:{ink}" + (f";{style}" if style else "")
        self.parts.append(
            f'<text class="letter" x="{_n(x)}" y="{_n(y)}" dominant-baseline="central" style="{inline}">{_escaped(text)}</text>'
        )


def shares_of(members: Sequence[tuple[ComponentPlan, int]]) -> list[float]:
    """Return the share of an accelerator that each component is drawn with.

    Components without a declared share divide the rest. Shares add up to 1 at most: larger sums are scaled down.
    """
    declared = [None if c.gpu_share is None else c.gpu_share * count for c, count in members]
    spent = sum(share for share in declared if share is not None)
    unknown = sum(share is None for share in declared)
    left = max(1 - spent, 0.15 * unknown) / unknown if unknown else 0.0
    shares = [left if share is None else share for share in declared]
    total = sum(shares)
    return [share / total for share in shares] if total > 1 else shares


def _label(row: NodeRow) -> tuple[str, str]:
    ranks = row.ranks
    first = f"node {ranks[0]}" if len(ranks) == 1 else f"nodes {ranks[0]}-{ranks[-1]}"
    name = row.name if len(ranks) == 1 else f"{row.name} …" if row.name else ""
    return first, " · ".join(_short(text) for text in (name, row.model) if text)


def _short(text: str) -> str:
    return text if len(text) <= 28 else text[:27] + "…"


def _text_width(text: str) -> float:
    return _LABEL_WIDTH * len(text) * 0.95


def _n(value: float) -> str:
    """Return a number with one decimal place, or none."""
    return f"{value:.1f}".removesuffix(".0")


def _escaped(text: str) -> str:
    return escape(_UNPRINTABLE.sub("\ufffd", text), {'"': "&quot;"})

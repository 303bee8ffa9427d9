"""Aligned columns of styled text.

A ``rich.Table`` would do, at three times the start-up and drawing time of a whole ``roost plan``.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from roost.errors import printable

__all__ = ["align"]


def align(rows: Sequence[Sequence[Text | str]], gap: int = 3, header: bool = True, rule: bool = False) -> Text:
    """Rows as lines whose columns line up; the first is dimmed as a header, with a rule under it.

    A row may be shorter than the others; its last cell may then run over the columns after it.
    """
    cells = [[cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row] for row in rows]
    columns = max(len(row) for row in cells)
    widths = [
        max((row[i].cell_len for row in cells if i < len(row) and (i + 1 < len(row) or len(row) == columns)), default=0)
        for i in range(columns)
    ]
    lines = Text()
    for index, row in enumerate(cells):
        line = Text()
        for i, cell in enumerate(row):
            line.append_text(cell)
            if i + 1 < len(row):
                line.append(" " * (widths[i] - cell.cell_len + gap))
        line.rstrip()
        if header and index == 0:
            line.stylize("dim")
        lines.append_text(line)
        if rule and index == 0:
            lines.append("\n" + "─" * (sum(widths) + gap * (columns - 1)), style="dim")
        if index + 1 < len(cells):
            lines.append("\n")
    return lines

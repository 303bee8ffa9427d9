"""Aligned columns of styled text.

``rich.Table`` would triple the time of a whole ``roost plan``, from start-up to output.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from roost.errors import printable

__all__ = ["align"]


def align(rows: Sequence[Sequence[Text | str]], gap: int = 3, header: bool = True, rule: bool = False) -> Text:
    """Return rows as lines with aligned columns.

    Args:
        rows: The rows. A row may be shorter than the others; its last cell may then overlap the columns after it.
        gap: Spaces between columns.
        header: Whether the first row is a header, which is dimmed.
        rule: Whether a line stands under the first row.
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

"""A curve drawn with characters."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def draw_curve(values: Sequence[float], *, width: int = 60, height: int = 8, top: float = 1.0, label: str = "") -> str:
    """Values from 0 to ``top`` as columns of blocks; neighbours are averaged where there are more than columns."""
    if not values:
        return ""
    columns = []
    count = min(width, len(values))
    for column in range(count):
        part = values[column * len(values) // count : (column + 1) * len(values) // count]
        columns.append(max(0.0, min(1.0, sum(part) / len(part) / top)))
    lines = []
    for row in range(height, 0, -1):
        cells = [_EIGHTHS[round(8 * max(0.0, min(1.0, value * height - (row - 1))))] for value in columns]
        scale = f"{top * row / height:5.2f} " if row in (height, (height + 1) // 2) else " " * 6
        lines.append(f"{scale}┤{''.join(cells)}")
    lines.append(f" 0.00 └{'─' * count}")
    last = f"step {len(values) - 1}"
    lines.append(f"{'':7}step 0 {last:>{max(len(last), count - 7)}}  {label}")
    return "\n".join(lines)

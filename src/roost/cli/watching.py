"""``roost status --watch``: print or draw a frame per interval."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from roost.cli.output import spelled_out
from roost.errors import printable

__all__ = ["Frame", "watch_lines", "watch_screen"]

Frame = Callable[[int | None, int | None], Text]
"""Draws the current state for a number of columns and lines. Raises ``EOFError`` if there is nothing left to watch."""

_ENDING_KEYS = frozenset("qQ\x03\x04")


def watch_lines(draw: Callable[[], str], interval_s: float, count: int | None) -> None:
    """Print a frame per interval as lines, for files, pipes and scripts; return after ``count`` frames."""
    number = 0
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            began = time.monotonic()
            sys.stdout.write(f"{printable(draw())}\n")
            sys.stdout.flush()
            number += 1
            if count is not None and number >= count:
                return
            time.sleep(max(0.0, interval_s - (time.monotonic() - began)))


def watch_screen(draw: Frame, interval_s: float, count: int | None) -> None:
    """Draw frames in place on the alternate screen, until ``q``, Ctrl-C or ``count`` frames.

    The terminal is restored in every case.
    """
    console = Console(highlight=False, emoji=False, markup=False)
    number = 0
    # Without automatic refreshes a slow connection never shows half a frame.
    screen = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with contextlib.suppress(EOFError, KeyboardInterrupt), _keys() as pressed, screen as live:
        while True:
            began = time.monotonic()
            width, height = console.size
            frame = spelled_out(draw(width, height - 2))
            live.update(Text("\n\n").join([frame, Text("q to quit", style="dim")]), refresh=True)
            number += 1
            if count is not None and number >= count:
                return
            if pressed(max(0.05, interval_s - (time.monotonic() - began))):
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read single keys. Yield a function that waits the given seconds and returns whether an ending key was pressed."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield wait
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([descriptor], [], [], left)
            if ready:
                keys = os.read(descriptor, 64)
                if not keys or _ENDING_KEYS & set(keys.decode(errors="ignore")):
                    return True
        return False

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

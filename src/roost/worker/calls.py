"""The calls of one worker: those that run, the last ones that ended, and the last error.

Kept in the worker's process; a call costs two clock readings and one entry in a ring.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from typing import Any

__all__ = ["CONSTRUCTOR", "KEPT", "CallRecord", "describe_error"]

CONSTRUCTOR = "__init__"
KEPT = 1000
"""How many calls that ended are remembered."""
MESSAGE_LENGTH = 300


def describe_error(error: BaseException) -> str:
    """The type of an error, and the first line of what it says."""
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # an error of the user's whose own text cannot be had
        lines = []
    kind = type(error).__name__
    return f"{kind}: {lines[0][:MESSAGE_LENGTH]}" if lines else kind


class CallRecord:
    """Which calls a worker runs and ran. Threads may use it at once."""

    def __init__(self) -> None:
        self.started = 0
        self.failed = 0
        self._counting = threading.Lock()
        self._numbers = itertools.count(1)
        self._running: dict[int, tuple[str, float]] = {}
        self._ended: deque[tuple[int, str, float, float, str]] = deque(maxlen=KEPT)
        self._last_error: tuple[str, str, float] | None = None

    def begin(self, name: str) -> int:
        """Notes that a call begins; returns its number. The constructor is no call that counts."""
        with self._counting:
            number = next(self._numbers)
            self.started += name != CONSTRUCTOR
        self._running[number] = (name, time.monotonic())
        return number

    def end(self, number: int, error: BaseException | None = None) -> float:
        """Notes that a call ended, well or with an error; returns how long it took."""
        ended = time.monotonic()
        name, began = self._running.pop(number)
        text = ""
        if error is not None:
            text = describe_error(error)
            with self._counting:
                self.failed += 1
            self._last_error = (name, text, ended)
        self._ended.append((number, name, began, ended, text))
        return ended - began

    @property
    def is_busy(self) -> bool:
        """Whether a call runs."""
        return bool(self._running)

    def longest(self) -> tuple[str, float, int]:
        """Of the calls that run: the name of the one that runs longest, for how long, and how many they are."""
        running = list(self._running.values())
        if not running:
            return "", 0.0, 0
        name, began = min(running, key=lambda call: call[1])
        return name, time.monotonic() - began, len(running)

    def last_error(self) -> dict[str, Any] | None:
        """The last call that failed: its name, the error, when by the clock of this node, and how long ago."""
        if self._last_error is None:
            return None
        name, text, when = self._last_error
        ago_s = time.monotonic() - when
        return {"call": name, "error": text, "at": time.time() - ago_s, "ago_s": ago_s}

    def timeline(self, last_s: float) -> dict[str, Any]:
        """Calls of the last seconds, in order: name, begin by this node's clock, duration, error.

        A call that still runs has the error ``None``. ``lost`` says whether calls of that time are not kept.
        """
        now, clock = time.monotonic(), time.time()
        ended = list(self._ended)
        calls: list[tuple[str, float, float, str | None]] = [
            (name, clock - (now - began), done - began, text)
            for _, name, began, done, text in ended
            if done >= now - last_s
        ]
        calls += [(name, clock - (now - began), now - began, None) for name, began in list(self._running.values())]
        calls.sort(key=lambda call: call[1])
        lost = len(ended) == KEPT and ended[0][0] > 1 and ended[0][3] >= now - last_s
        return {"now": clock, "calls": calls, "lost": lost}

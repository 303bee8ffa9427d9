"""The calls of one worker: the running calls, the last finished calls, and the last error.

The record is kept in the worker's process. A call costs two clock readings and one entry in a ring buffer.
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
"""Number of finished calls that are remembered."""
MESSAGE_LENGTH = 300


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # the user's exception class has a __str__ that fails
        lines = []
    kind = type(error).__name__
    return f"{kind}: {lines[0][:MESSAGE_LENGTH]}" if lines else kind


class CallRecord:
    """The running and the finished calls of a worker. Thread-safe.

    Attributes:
        started: Number of calls that have begun; the constructor does not count.
        failed: Number of calls, or constructors, that ended with an error.
    """

    def __init__(self) -> None:
        self.started = 0
        self.failed = 0
        self._counting = threading.Lock()
        self._numbers = itertools.count(1)
        self._running: dict[int, tuple[str, float]] = {}
        self._ended: deque[tuple[int, str, float, float, str]] = deque(maxlen=KEPT)
        self._ids: dict[int, str] = {}  # number → id of a running call
        self._durations: dict[str, float] = {}  # id → seconds of a finished call, oldest first
        self._last_error: tuple[str, str, float] | None = None

    def begin(self, name: str, call_id: str = "") -> int:
        """Record that a call begins; return its number for :meth:`end`.

        Args:
            name: The method.
            call_id: Id by which :meth:`duration_of` finds the call.
        """
        with self._counting:
            number = next(self._numbers)
            self.started += name != CONSTRUCTOR
        if call_id:
            self._ids[number] = call_id
        self._running[number] = (name, time.monotonic())
        return number

    def end(self, number: int, error: BaseException | None = None) -> None:
        """Record that a call has ended, with a value or with an error."""
        ended = time.monotonic()
        name, began = self._running.pop(number)
        text = ""
        if error is not None:
            text = describe_error(error)
            with self._counting:
                self.failed += 1
            self._last_error = (name, text, ended)
        self._ended.append((number, name, began, ended, text))
        call_id = self._ids.pop(number, "")
        if call_id:
            with self._counting:
                self._durations[call_id] = ended - began
                if len(self._durations) > KEPT:
                    del self._durations[next(iter(self._durations))]

    def duration_of(self, call_id: str) -> float | None:
        """Return the seconds that a finished call took; ``None`` if it is not among the last :data:`KEPT` calls."""
        return self._durations.get(call_id)

    @property
    def is_busy(self) -> bool:
        """Whether a call is running."""
        return bool(self._running)

    def longest(self) -> tuple[str, float, int]:
        """Return the name and the seconds of the call that has been running longest, and the number of running calls."""
        running = list(self._running.values())
        if not running:
            return "", 0.0, 0
        name, began = min(running, key=lambda call: call[1])
        return name, time.monotonic() - began, len(running)

    def last_error(self) -> dict[str, Any] | None:
        """Return the last call that failed: ``call``, ``error``, ``at`` (this node's clock) and ``ago_s``."""
        if self._last_error is None:
            return None
        name, text, when = self._last_error
        ago_s = time.monotonic() - when
        return {"call": name, "error": text, "at": time.time() - ago_s, "ago_s": ago_s}

    def timeline(self, last_s: float) -> dict[str, Any]:
        """Return the calls of the last seconds.

        Returns:
            ``calls``: (name, begin by this node's clock, seconds, error) of each call, in the order of their begin; the
            error is empty for a call that returned, and ``None`` for a running call. ``lost``: whether some calls of
            that time are forgotten. ``now``: this node's clock.
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

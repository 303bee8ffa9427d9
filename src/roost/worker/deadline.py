"""``Deadline``: the time at which an operation gives up, shared by all of its steps."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """The time at which an operation gives up. Each of its steps waits at most :meth:`left_s`.

    Args:
        timeout_s: Seconds from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s

    def left_s(self, at_least_s: float = 0.0) -> float:
        """Return the seconds that are left, or ``at_least_s`` if that is more."""
        return max(at_least_s, self._until_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._until_s

    def extend(self, seconds: float) -> None:
        """Move the deadline back by the length of a wait that does not count."""
        self._until_s += seconds

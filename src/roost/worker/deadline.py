"""``Deadline``: when an operation must have ended, shared by all of its steps."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """The moment at which an operation gives up. Its steps wait for :meth:`left_s`, not for timeouts of their own.

    Args:
        timeout_s: Seconds from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s

    def left_s(self, at_least_s: float = 0.0) -> float:
        """Seconds that are left, or ``at_least_s`` if that is more."""
        return max(at_least_s, self._until_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._until_s

    def extend(self, seconds: float) -> None:
        """Move it by the length of a wait that does not count."""
        self._until_s += seconds

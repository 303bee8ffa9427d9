"""First-in, first-out queues of threads that wait for a condition, such as room in a buffer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.errors import RoostError, counted

__all__ = ["WaitQueue", "Waiter", "abbreviated", "serve"]

MAX_NAMED = 5
"""Names that a message lists; further ones are only counted."""


@dataclass(slots=True)
class Waiter:
    """A blocked call.

    Attributes:
        attempt: Returns the call's value, or ``None`` where it is not possible yet. It runs with the owner's lock held.
        caller: Name of the caller, for messages.
        count: Number of groups that the call wants to put or take, for messages.
        since_s: Time of the call (``time.monotonic``).
        checked: Scratch value of ``attempt``: the sequence number up to which it has checked groups.
        woken: Set when the call has its value or its error; ``None`` until the caller's thread blocks.
    """

    attempt: Callable[[Waiter], Any]
    caller: str
    count: int
    since_s: float = field(default_factory=time.monotonic)
    checked: int = -1
    woken: threading.Event | None = None
    _is_done: bool = False
    _result: Any = None
    _error: RoostError | None = None

    def try_now(self) -> bool:
        """Run the attempt; return whether the call is done, with a value or an error."""
        try:
            self._result = self.attempt(self)
        except RoostError as error:
            self.finish(error)
        else:
            if self._result is not None:
                self.finish()
        return self._is_done

    def finish(self, error: RoostError | None = None) -> None:
        """End the call, with an error or with the attempt's value, and wake its thread."""
        self._error = error
        self._is_done = True
        if self.woken is not None:
            self.woken.set()

    def is_done(self) -> bool:
        """Return whether the call has a value or an error."""
        return self._is_done

    def result(self) -> Any:
        """Return the value of a call that is done, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result


@dataclass(slots=True)
class WaitQueue:
    """Blocked calls of one method.

    Attributes:
        waiters: The calls, the oldest first.
        waited_s: Seconds that all calls which have left the queue waited, together.
    """

    waiters: deque[Waiter] = field(default_factory=deque)
    waited_s: float = 0.0

    def described(self) -> str:
        """Return the callers, how many groups each wants, and how long each has waited."""
        now_s = time.monotonic()
        waits = [
            f"{one.caller} ({counted(one.count, 'group')}, since {now_s - one.since_s:.1f} s)" for one in self.waiters
        ]
        return abbreviated(waits) or "nobody"


def serve(queues: Iterable[WaitQueue]) -> None:
    """Complete blocked calls until no further one is possible.

    Only the first call of each queue is attempted, so no call overtakes another of its queue. A completed put
    may make a take possible, and a take that sets stale groups aside may make room for a put.
    """
    queues = tuple(queues)
    has_changed = True
    while has_changed:
        has_changed = False
        for queue in queues:
            while queue.waiters and queue.waiters[0].try_now():
                queue.waiters.popleft()
                has_changed = True


def abbreviated(names: Sequence[str]) -> str:
    """Return the first :data:`MAX_NAMED` names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more:,} more" if more > 0 else "")

"""Lines of waiting threads, served in the order in which they came."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.errors import RoostError, counted

__all__ = ["Line", "Request", "serve", "some"]

MAX_NAMED = 5
"""How many names a message spells out; the rest are counted."""


@dataclass(slots=True)
class Request:
    """Somebody in a line.

    Attributes:
        attempt: Gives what is wanted, or ``None`` where that cannot be yet; called under the owner's lock.
        who: A name for messages.
        count: How many are wanted, for messages.
        since_s: When it came.
        checked: A note for the attempt: how far it has looked.
    """

    attempt: Callable[[Request], Any]
    who: str
    count: int
    since_s: float = field(default_factory=time.monotonic)
    checked: int = -1
    woken: threading.Event | None = None
    _is_done: bool = False
    _result: Any = None
    _error: RoostError | None = None

    def try_now(self) -> bool:
        """Attempts it; whether it is settled, by a result or an error."""
        try:
            self._result = self.attempt(self)
        except RoostError as error:
            self.settle(error)
        else:
            if self._result is not None:
                self.settle()
        return self._is_done

    def settle(self, error: RoostError | None = None) -> None:
        """Ends the wait."""
        self._error = error
        self._is_done = True
        if self.woken is not None:
            self.woken.set()

    def is_done(self) -> bool:
        """Whether it is settled."""
        return self._is_done

    def outcome(self) -> Any:
        """The result; raises the error."""
        if self._error is not None:
            raise self._error
        return self._result


@dataclass(slots=True)
class Line:
    """Those who wait for one thing.

    Attributes:
        requests: They, the first one at the front.
        waited_s: How long all those who are gone have waited, together.
    """

    requests: deque[Request] = field(default_factory=deque)
    waited_s: float = 0.0

    def described(self) -> str:
        """Who waits, for how much, and since when."""
        now_s = time.monotonic()
        waits = [
            f"{one.who} ({counted(one.count, 'group')}, since {now_s - one.since_s:.1f} s)" for one in self.requests
        ]
        return some(waits) or "nobody"


def serve(lines: Iterable[Line]) -> None:
    """Serves whoever stands in front and can be served, until nobody can. Nobody overtakes in a line."""
    lines = tuple(lines)
    has_changed = True
    while has_changed:
        has_changed = False
        for line in lines:
            while line.requests and line.requests[0].try_now():
                line.requests.popleft()
                has_changed = True


def some(words: Sequence[str]) -> str:
    """The first few of them; the rest are counted."""
    more = len(words) - MAX_NAMED
    return ", ".join(words[:MAX_NAMED]) + (f" and {more:,} more" if more > 0 else "")

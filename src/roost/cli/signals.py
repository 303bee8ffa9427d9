"""SIGTERM and SIGINT stop a command: it closes what it has opened, and exits with 143 or 130."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["StopSignals", "ignore_stop_signals", "one_stop_signal"]

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context manager in which SIGTERM and SIGINT raise ``KeyboardInterrupt`` in the main thread.

    A signal that was ignored when this process started stays ignored. In a thread other than the main thread this
    does nothing.

    Attributes:
        received: The number of the first signal; 0 before one arrives.
    """

    received = 0
    is_one_enough = False
    """Whether signals after the first do nothing; see :func:`one_stop_signal`."""

    def __enter__(self) -> StopSignals:
        self._before: dict[int, Any] = {}
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(ValueError):  # Python sets handlers in the main thread only
                    self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    @property
    def exit_code(self) -> int:
        """The exit code of a process that the signal stopped: 128 and the number of the signal."""
        return 128 + (self.received or signal.SIGINT)

    @property
    def name(self) -> str:
        """The name of the signal."""
        return signal.Signals(self.received or signal.SIGINT).name

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.received and self.is_one_enough:
            return
        self.received = self.received or number
        raise KeyboardInterrupt


@contextmanager
def one_stop_signal() -> Iterator[None]:
    """Let only the first signal raise while this is entered; if that leaves the body, later signals do nothing either.

    A Ray whose start is interrupted is ended before its ``__enter__`` returns, so :func:`ignore_stop_signals` cannot
    be called in between. It could not replace the handler either: ``keep_signal_handlers`` puts that of SIGTERM back.
    """
    handlers = [getattr(signal.getsignal(number), "__self__", None) for number in _STOP_SIGNALS]
    owners = [owner for owner in handlers if isinstance(owner, StopSignals)]
    for owner in owners:
        owner.is_one_enough = True
    yield
    for owner in owners:
        owner.is_one_enough = False


def ignore_stop_signals() -> None:
    """Ignore further stop signals while a command closes: a launcher and a terminal often send the same signal twice."""
    for number in _STOP_SIGNALS:
        if isinstance(getattr(signal.getsignal(number), "__self__", None), StopSignals):
            signal.signal(number, lambda number, frame: None)

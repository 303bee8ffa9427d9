"""Calls into communication libraries that end at a deadline, or when somebody knows that they cannot succeed.

A broadcast waits until every rank takes part. Where an engine has died or hangs, that is until the library's own
timeout, and vLLM's NCCL communicator has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol

import torch

from roost.errors import Finding, RolloutError, RoostError

__all__ = ["STOP_S", "FailureWatch", "Stoppable"]

GRACE_S = 2.0
"""Seconds that an aborted call has to return. After them its thread is left behind."""
POLL_S = 0.05
WATCH_S = 0.2
STOP_S = 10.0
"""Seconds to wait until all ranks of a trainer know that a broadcast is given up."""


class Stoppable:
    """Runs calls in threads of their own, and gives up those that do not end."""

    def __init__(self) -> None:
        self._reason = ""

    def run(self, action: Callable[[], object], abort: Callable[[], object], timeout_s: float, what: str) -> None:
        """Run a call and wait until it ends, for ``timeout_s`` at most, or until :meth:`stop`.

        Args:
            action: The call. It runs with the caller's current CUDA device and stream. It keeps references to what it
                uses: it may run on after it was given up.
            abort: Makes the call return, as far as the library can do that. It runs in a thread too, since it may
                block as well.
            timeout_s: Seconds.
            what: Names the call in the error.

        Raises:
            RolloutError: The call was given up (S207).
        """
        ended = threading.Event()
        failures: list[BaseException] = []
        place = (torch.cuda.current_device(), torch.cuda.current_stream()) if torch.cuda.is_initialized() else None

        def call() -> None:
            try:
                # A thread begins with the first device and its default stream. On another stream than the caller's,
                # a broadcast would not wait for the kernels that write the weights.
                if place is not None:
                    torch.cuda.set_device(place[0])
                    torch.cuda.set_stream(place[1])
                action()
            except BaseException as error:
                failures.append(error)
            finally:
                ended.set()

        threading.Thread(target=call, name="broadcast", daemon=True).start()
        deadline = time.monotonic() + timeout_s
        while not ended.wait(min(POLL_S, max(0.0, deadline - time.monotonic()))):
            if self._reason or time.monotonic() >= deadline:
                reason = self._reason or f"not all of its ranks took part within {timeout_s:g} s"
                threading.Thread(target=abort, name="abort", daemon=True).start()
                ended.wait(GRACE_S)
                raise RolloutError([Finding("S207", f"{what} was given up: {reason}")])
        if failures:
            raise failures[0]

    def stop(self, reason: str) -> None:
        """Give up the call that runs, and those that would follow; from any thread, without waiting for it."""
        self._reason = reason


class _Call(Protocol):
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> object: ...


class FailureWatch:
    """While it is entered, looks whether one of some calls has failed, and says so once.

    Args:
        calls: The calls. Those that cannot be asked whether they have ended are not watched.
        on_failure: Called in a thread with the first failure.
    """

    def __init__(self, calls: Sequence[object], on_failure: Callable[[RoostError], object]) -> None:
        self._calls: list[_Call] = [call for call in calls if hasattr(call, "done")]  # type: ignore[misc]
        self._on_failure = on_failure
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failures", daemon=True)

    def __enter__(self) -> FailureWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        left = self._calls
        while left and not self._is_over.wait(WATCH_S):
            ended = [call for call in left if call.done()]
            left = [call for call in left if call not in ended]
            for call in ended:
                try:
                    call.wait()
                except RoostError as error:
                    with suppress(Exception):  # who waits for the calls raises the failure itself
                        self._on_failure(error)
                    return

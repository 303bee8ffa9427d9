"""Calls into communication libraries that can be aborted, by a timeout or by another thread.

A broadcast waits until all ranks take part. If an engine has died or hangs, it waits until the library's own timeout,
and vLLM's NCCL communicator has none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from roost.errors import Finding, RolloutError, RoostError
from roost.weights.parties import CallResult

__all__ = ["STOP_S", "FailureWatch", "Stoppable"]

logger = logging.getLogger("roost")

GRACE_S = 2.0
"""Seconds that an aborted call has to return. Then its thread is abandoned."""
POLL_S = 0.05
"""Seconds between two checks whether a call was stopped."""
WATCH_S = 0.2
"""Seconds between two checks whether a watched call has failed."""
STOP_S = 10.0
"""Seconds to wait until all ranks of a trainer have been asked to stop their broadcasts."""


class Stoppable:
    """A runner of calls in threads, which aborts calls that do not end in time."""

    def __init__(self) -> None:
        self._reason = ""

    def run(self, action: Callable[[], object], abort: Callable[[], object], timeout_s: float, what: str) -> None:
        """Run a call in a thread; block until it ends, for at most ``timeout_s``, or until :meth:`stop`.

        Args:
            action: The call. It runs with the caller's current CUDA device and stream. It must keep references to
                everything that it uses, because it may go on after it was aborted.
            abort: Makes the call return, where the library supports that. It may block, so it runs in a thread too.
            timeout_s: Seconds to wait for the call.
            what: Name of the call, for the error.

        Raises:
            RolloutError: The call was aborted (S207).
        """
        ended = threading.Event()
        failures: list[BaseException] = []
        has_cuda: Callable[[], bool] = torch.cuda.is_initialized
        current = (torch.cuda.current_device(), torch.cuda.current_stream()) if has_cuda() else None

        def call() -> None:
            try:
                # A new thread uses the first device and its default stream. On another stream than the caller's, a
                # broadcast would not wait for the kernels that write the weights.
                if current is not None:
                    torch.cuda.set_device(current[0])
                    torch.cuda.set_stream(current[1])
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
        """Abort the call that runs and all later ones. Any thread may call it; it does not wait for the call to end."""
        self._reason = reason


class FailureWatch:
    """A context manager that watches calls in a thread, and reports the first one that fails.

    Args:
        calls: The calls.
        on_failure: Called once, in the thread, with the first error.
    """

    def __init__(self, calls: Sequence[CallResult], on_failure: Callable[[RoostError], object]) -> None:
        self._calls = list(calls)
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
                    try:
                        self._on_failure(error)
                    except Exception:  # the thread that waits for the calls raises the error itself
                        logger.debug("a failed call could not be reported", exc_info=True)
                    return

"""Waiting for several calls of engines and of a trainer."""

from __future__ import annotations

from collections.abc import Sequence

from roost.errors import CallTimeoutError, RoostError, WorkerDiedError
from roost.weights.parties import CallResult
from roost.worker.deadline import Deadline

__all__ = ["have_ended", "wait_all"]


def wait_all(results: Sequence[CallResult], deadline: Deadline) -> None:
    """Block until all calls have ended, also after one has failed; raise the root cause of the failures.

    The death of a worker comes first, then errors other than broken connections, which are consequences.
    """
    errors: list[RoostError] = []
    is_late = False
    for result in results:
        if is_late and not result.done():  # one timeout error is enough
            continue
        try:
            result.wait(deadline.left_s())
        except RoostError as error:
            is_late = is_late or isinstance(error, CallTimeoutError)
            errors.append(error)
    if not errors:
        return
    died = [error for error in errors if isinstance(error, WorkerDiedError)]
    consequences = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "error[S207]")
    causes = [error for error in errors if not any(text in str(error) for text in consequences)]
    raise (died or causes or errors)[0]


def have_ended(results: Sequence[CallResult]) -> bool:
    """Return whether a call has failed, or all have ended. Does not block."""
    ended = [result for result in results if result.done()]
    for result in ended:
        try:
            result.wait()
        except RoostError:
            return True
    return len(ended) == len(results)

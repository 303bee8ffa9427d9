"""Waiting for calls of engines and of a trainer that belong together."""

from __future__ import annotations

from collections.abc import Sequence

from roost.errors import CallTimeoutError, RoostError, WorkerDiedError
from roost.worker import GroupResult
from roost.worker.deadline import Deadline
from roost.worker.results import LaneResult

__all__ = ["are_over", "wait_all"]


def wait_all(results: Sequence[GroupResult | LaneResult], deadline: Deadline) -> None:
    """Wait for all, also after a failure; raise the first cause: an error rather than what it entailed."""
    errors: list[RoostError] = []
    is_late = False
    for result in results:
        if is_late and not result.done():  # one error says that the deadline has passed
            continue
        try:
            result.wait(deadline.left_s())
        except RoostError as error:
            is_late = is_late or isinstance(error, CallTimeoutError)
            errors.append(error)
    if not errors:
        return
    died = [error for error in errors if isinstance(error, WorkerDiedError)]
    torn = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "error[S207]")
    own = [error for error in errors if not any(text in str(error) for text in torn)]
    raise (died or own or errors)[0]


def are_over(results: Sequence[GroupResult | LaneResult]) -> bool:
    """Whether one of them has ended badly, or all have ended."""
    ended = [result for result in results if result.done()]
    for result in ended:
        try:
            result.wait()
        except RoostError:
            return True
    return len(ended) == len(results)

"""The result of a call on a worker group: wait for its values, iterate over them, or await them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RaySystemError, RayTaskError

from roost.cluster.log_files import log_folder
from roost.cluster.losses import NEW_CLUSTER
from roost.errors import CallTimeoutError, Finding, Fix, RoostError, WorkerDiedError, WorkerError
from roost.ranks import format_ranks
from roost.worker.calls import describe_error
from roost.worker.lane import LaneCall, LaneError

if TYPE_CHECKING:
    from roost.worker.group import WorkerGroup

__all__ = ["GroupResult", "LaneResult", "failure_of"]

CHECK_EVERY_S = 2.0
"""Seconds between two checks, during a wait, that the cluster is still open."""
ASK_BEFORE_S = 1.0
"""Seconds before a timeout at which late ranks are asked for their state."""
MAX_NAMED = 8
"""Largest number of late ranks that an error describes."""
GRACE_S = 0.4
"""Seconds that a timeout error may come late while the states of late ranks arrive."""
FIND_FAILED_S = 5.0
"""Seconds to look for the rank whose call failed."""


class GroupResult:
    """The future values of a call on a worker group, one per called rank.

    ``result.wait()`` and ``await result`` return all values in rank order; ``result.as_completed()`` yields them in
    completion order. The call runs on, whatever happens to this object.

    Attributes:
        refs: One Ray reference per called rank, in rank order; ``ray.get`` returns the plain values.
    """

    def __init__(
        self, group: WorkerGroup, method: str, ranks: Sequence[int], refs: Sequence[ray.ObjectRef[Any]], call_id: str
    ) -> None:
        self._group = group
        self._method = method
        self._ranks = list(ranks)
        self._call_id = call_id
        self.refs = list(refs)
        self._values: list[Any] | None = None

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Return the value of each rank, in rank order.

        Without a timeout this blocks as long as every rank is alive; the death of a rank ends it. After a timeout the
        call still runs, and this method can be called again.

        Raises:
            WorkerError: A worker raised an exception (W201); it has the rank, the node and the remote traceback.
            WorkerDiedError: A worker or its node died (W202, W205).
            CallTimeoutError: Ranks did not finish in time (W203); it says what they are doing.
        """
        deadline = _deadline(timeout_s)
        slice_s, ask_at = CHECK_EVERY_S, deadline - min(ASK_BEFORE_S, (timeout_s or 0.0) / 2)
        asked: dict[int, ray.ObjectRef[Any]] = {}
        while self._values is None:
            self._group._check_open()
            left_s = max(0.0, ask_at - time.monotonic())
            try:
                self._values = ray.get(self.refs, timeout=min(slice_s, left_s))
            except GetTimeoutError:
                if self._have_finished():  # ray.get starts the transfer of large values anew after each timeout
                    slice_s, ask_at = 86_400.0, deadline
                if timeout_s is not None and time.monotonic() >= deadline:
                    raise self._late(timeout_s, asked) from None
                if time.monotonic() >= ask_at:
                    asked, ask_at = self._ask_late(), deadline
            except RayError as error:
                raise self._failure(error) from _cause(error)
        return list(self._values)

    def done(self) -> bool:
        """Return at once whether every rank has finished, with a value or an error."""
        if self._values is not None:
            return True
        self._group._check_open()
        return self._have_finished()

    def as_completed(self, timeout_s: float | None = None) -> Iterator[tuple[int, Any]]:
        """Yield ``(rank, value)`` in the order in which ranks finish.

        Args:
            timeout_s: Seconds, from the first value asked for, in which all ranks must finish; default: as long as
                they are alive.

        Raises:
            WorkerError: See :meth:`wait`; it is raised when the failed rank's turn comes.
            WorkerDiedError: See :meth:`wait`.
            CallTimeoutError: See :meth:`wait`.
        """
        deadline = _deadline(timeout_s)
        rank_of = dict(zip(self.refs, self._ranks, strict=True))
        left = list(self.refs)
        while left:
            self._group._check_open()
            slice_s = max(0.0, min(CHECK_EVERY_S, deadline - time.monotonic()))
            ready, left = ray.wait(left, num_returns=1, timeout=slice_s)
            for ref in ready:
                try:
                    yield rank_of[ref], ray.get(ref)
                except RayError as error:
                    raise failure_of(self._group, rank_of[ref], error, f"{self._method}()") from _cause(error)
            if timeout_s is not None and not ready and time.monotonic() >= deadline:
                raise self._late(timeout_s, self._ask_late())

    def __await__(self) -> Generator[Any, None, list[Any]]:
        """Return what :meth:`wait` returns, without blocking the running event loop."""
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> list[Any]:
        if self._values is None:
            waiting = asyncio.gather(*self.refs)
            try:
                while not waiting.done():
                    self._group._check_open()
                    await asyncio.wait([waiting], timeout=CHECK_EVERY_S)
                self._values = list(waiting.result())
            except RayError as error:
                raise self._failure(error) from _cause(error)
            finally:
                waiting.cancel()
        return list(self._values)

    @property
    def timings_s(self) -> list[float]:
        """Seconds that the call took in each worker, in rank order; blocks until the call has finished.

        A worker remembers its last 1000 calls; the value is ``nan`` for an older one.
        """
        self.wait()
        return self._group._durations_of(self._ranks, self._call_id)

    def _have_finished(self) -> bool:
        ready, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        return len(ready) == len(self.refs)

    def _ask_late(self) -> dict[int, ray.ObjectRef[Any]]:
        """Ask late ranks for their state; return a reference by rank at once."""
        _, late = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        return self._group.ask_states([self._ranks[self.refs.index(ref)] for ref in late[:MAX_NAMED]])

    def _failure(self, error: RayError) -> RoostError:
        """Return the error of the first rank that is known to have failed."""
        deadline = time.monotonic() + FIND_FAILED_S
        while time.monotonic() < deadline:
            ready, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0.05)
            for ref in ready:
                try:
                    ray.get(ref)
                except RayError as found:
                    rank = self._ranks[self.refs.index(ref)]
                    return failure_of(self._group, rank, found, f"{self._method}()")
        return WorkerError([Finding("W201", f"{self._group.name}.{self._method}() failed: {error}")])

    def _late(self, timeout_s: float, asked: Mapping[int, ray.ObjectRef[Any]]) -> CallTimeoutError:
        """Return the error of a timeout, with the states of the late ranks that were asked."""
        _, late = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        ranks = {self._ranks[self.refs.index(ref)] for ref in late}
        states = self._group.read_states({rank: ref for rank, ref in asked.items() if rank in ranks}, GRACE_S)
        lines = tuple(f"rank {state['rank']}: {_activity(state)}" for state in states)
        message = (
            f"{self._group.name}.{self._method}(): {len(late)} of {len(self.refs)} ranks did not end within "
            f"{round(timeout_s, 2):g} s"
        )
        fixes = (Fix("see the Python stacks of a worker", "group.stacks(rank)"),)
        return CallTimeoutError([Finding("W203", message, context=lines, fixes=fixes)])


class LaneResult:
    """The future value of a call of one worker through its lane; waited for like a :class:`GroupResult`."""

    def __init__(self, group: WorkerGroup, method: str, rank: int, call: LaneCall) -> None:
        self._group = group
        self._method = method
        self._rank = rank
        self._call = call

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Return a list with the one value; see :meth:`GroupResult.wait`."""
        group, rank = self._group, self._rank
        where = f"{group.name}[{rank}] on node {group.node_rank_of(rank)}"
        deadline = _deadline(timeout_s)
        while True:
            try:
                return [self._call.result(max(0.0, min(CHECK_EVERY_S, deadline - time.monotonic())))]
            except LaneError as error:
                message = f"{where}: {self._method}() raised {describe_error(error.cause)}"
                finding = Finding("W201", message)
                raise WorkerError([finding], group.name, rank, group.node_rank_of(rank), error.trace) from error.cause
            except (OSError, EOFError) as error:
                if not isinstance(error, TimeoutError) or error.errno:  # with a number, the connection timed out
                    raise _death(group, rank, f"{self._method}()", "its connection has ended") from error
                if timeout_s is not None and time.monotonic() >= deadline:
                    message = f"{group.name}.{self._method}(): rank {rank} did not end within {timeout_s:g} s"
                    raise CallTimeoutError([Finding("W203", message)]) from None
                group._check_open()

    def done(self) -> bool:
        """Return at once whether the call has finished, with a value or an error."""
        return self._call.done()

    def forget(self) -> None:
        """Discard the value when it arrives; this result must not be used any more."""
        self._call.forget()


def _deadline(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def _activity(state: Mapping[str, Any]) -> str:
    if state["state"] == "busy":
        return f"busy in {state['call']}() for {state['since_s']:.1f} s"
    return "does not answer" if state["state"] == "silent" else str(state["state"])


def _cause(error: BaseException) -> BaseException | None:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else None


def failure_of(group: WorkerGroup, rank: int, error: BaseException, what: str) -> WorkerError:
    """Return an error of Ray as an error of Roost: an exception in the worker, or the death of the worker.

    Args:
        group: The worker group.
        rank: The rank that failed.
        error: What ``ray.get`` raised.
        what: What the worker was doing, such as ``"step()"``.
    """
    node_rank = group.node_rank_of(rank)
    where = f"{group.name}[{rank}] on node {node_rank}"
    if isinstance(error, RayTaskError):
        cause = _cause(error)
        kind = type(cause).__name__ if cause is not None else "an exception"
        message = f"{where}: {what} raised {kind}: {_first_line(cause)}"
        return WorkerError([Finding("W201", message)], group.name, rank, node_rank, _without_colours(str(error)))
    if isinstance(error, RaySystemError) or type(error).__name__ == "UnserializableException":  # the latter: Ray 2.50
        message = f"{where}: {what} raised an exception, or returned a value, that cannot be loaded here"
        return WorkerError([Finding("W201", message)], group.name, rank, node_rank, _without_colours(str(error)))
    return _death(group, rank, what, _first_line(error))


def _death(group: WorkerGroup, rank: int, what: str, reason: str) -> WorkerDiedError:
    """Return the error of a dead rank: W205 if its node is lost, else W202."""
    node_rank = group.node_rank_of(rank)
    where = f"{group.name}[{rank}] on node {node_rank}"
    for lost in group._lost_nodes([node_rank]):
        ranks = [other for other in range(group.world_size) if group.node_rank_of(other) == node_rank]
        message = f"{lost}; {where} died with it during {what}"
        context = (f"ranks of {group.name} on it: {format_ranks(ranks)}", f"Ray: {reason}")
        rule = "a node that was lost does not come back to a running job, and nothing can be started on it again"
        finding = Finding("W205", message, context=context, rule=rule, fixes=(NEW_CLUSTER,))
        return WorkerDiedError([finding], group.name, rank, node_rank)
    actor_id = group.actor_id(rank)
    fixes = (Fix("its log", f"ray logs actor --id {actor_id}  or, on node {node_rank}, the files in {log_folder()}"),)
    message = f"{where} died during {what}: {reason}"
    return WorkerDiedError([Finding("W202", message, fixes=fixes)], group.name, rank, node_rank)


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] if error is not None else []
    return lines[0][:300] if lines else ""

"""The result of a call on a group."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
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

SLICE_S = 2.0
"""How often a call that waits looks whether its cluster is still there."""
LOOK_S = 1.0
"""Seconds before a timeout at which ranks that are late are asked what they are doing."""
MAX_NAMED = 8
"""How many ranks that are late an error names."""
GRACE_S = 0.4
"""Seconds that the error of a timeout may come late, to wait for what they answer."""


class GroupResult:
    """What a call on a group will give: one value per rank.

    Iterate over it for ``(rank, value)`` as ranks finish.
    """

    def __init__(self, group: WorkerGroup, method: str, ranks: Sequence[int], refs: Sequence[ray.ObjectRef]) -> None:
        self._group = group
        self._method = method
        self._ranks = list(ranks)
        self.refs = list(refs)
        self._values: list[tuple[Any, float]] | None = None

    def wait(self, timeout: float | None = None) -> list[Any]:
        """The value of each rank, in rank order.

        Without a timeout it waits as long as every rank is alive: a death ends it.

        Raises:
            WorkerError: Where a worker raised; with its rank, node and traceback.
            WorkerDiedError: Where a worker or its node is gone.
            CallTimeoutError: Where the timeout ran out; it says who is still busy.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        limit_s, look_s = SLICE_S, deadline - min(LOOK_S, (timeout or 0.0) / 2)
        asked: dict[int, ray.ObjectRef] = {}
        while self._values is None:
            self._group._check_open()
            left_s = max(0.0, look_s - time.monotonic())
            try:
                self._values = ray.get(self.refs, timeout=min(limit_s, left_s))
            except GetTimeoutError:
                if self._have_ended():  # a wait that times out starts the transfer of large values anew
                    limit_s, look_s = 86_400.0, deadline
                if time.monotonic() >= deadline:
                    raise self._late(timeout, asked) from None
                if time.monotonic() >= look_s:
                    asked, look_s = self._ask_late(), deadline
            except RayError as error:
                raise self._failure(error) from _cause(error)
        return [value for value, _ in self._values]

    def _have_ended(self) -> bool:
        ready, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        return len(ready) == len(self.refs)

    def _ask_late(self) -> dict[int, ray.ObjectRef]:
        """Ask ranks that are late what they are doing."""
        _, late = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        return self._group.ask_states([self._ranks[self.refs.index(ref)] for ref in late[:MAX_NAMED]])

    def done(self) -> bool:
        """Whether every rank has finished, well or not."""
        if self._values is not None:
            return True
        self._group._check_open()
        return self._have_ended()

    async def async_wait(self) -> list[Any]:
        """As :meth:`wait`, for code that runs in an event loop."""
        if self._values is None:
            waiting = asyncio.gather(*self.refs)
            try:
                while not waiting.done():
                    self._group._check_open()
                    await asyncio.wait([waiting], timeout=SLICE_S)
                self._values = list(waiting.result())
            except RayError as error:
                raise self._failure(error) from _cause(error)
            finally:
                waiting.cancel()
        return [value for value, _ in self._values]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        rank_of = dict(zip(self.refs, self._ranks, strict=True))
        left = list(self.refs)
        while left:
            self._group._check_open()
            ready, left = ray.wait(left, num_returns=1, timeout=SLICE_S)
            for ref in ready:
                try:
                    yield rank_of[ref], ray.get(ref)[0]
                except RayError as error:
                    raise failure_of(self._group, rank_of[ref], error, f"{self._method}()") from _cause(error)

    def __len__(self) -> int:
        return len(self.refs)

    @property
    def timings_s(self) -> list[float]:
        """How long the call took on each rank; waits for it."""
        self.wait()
        return [seconds for _, seconds in self._values or []]

    def _failure(self, error: RayError) -> RoostError:
        """The error of the rank that failed: the first one that is known to have."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            ready, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0.05)
            for ref in ready:
                try:
                    ray.get(ref)
                except RayError as found:
                    rank = self._ranks[self.refs.index(ref)]
                    return failure_of(self._group, rank, found, f"{self._method}()")
        return WorkerError([Finding("W201", f"{self._group.name}.{self._method}() failed: {error}")])

    def _late(self, timeout: float, asked: Mapping[int, ray.ObjectRef]) -> CallTimeoutError:
        _, late = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        ranks = {self._ranks[self.refs.index(ref)] for ref in late}
        states = self._group.read_states({rank: ref for rank, ref in asked.items() if rank in ranks}, GRACE_S)
        lines = tuple(f"rank {state['rank']}: {_doing(state)}" for state in states)
        message = f"{self._group.name}.{self._method}(): {len(late)} of {len(self.refs)} ranks did not end within {round(timeout, 2):g} s"
        fixes = (Fix("see where they are", "group.stacks()"),)
        return CallTimeoutError([Finding("W203", message, context=lines, fixes=fixes)])


class LaneResult:
    """What a call through a lane will give; it is waited for like others."""

    def __init__(self, group: WorkerGroup, method: str, rank: int, call: LaneCall) -> None:
        self._group = group
        self._method = method
        self._rank = rank
        self._call = call

    def wait(self, timeout: float | None = None) -> list[Any]:
        """As :meth:`GroupResult.wait`."""
        group, rank = self._group, self._rank
        what = f"{group.name}[{rank}] on node {group.node_rank_of(rank)}"
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        try:
            while True:
                try:
                    return [self._call.result(max(0.0, min(SLICE_S, deadline - time.monotonic())))]
                except TimeoutError as error:
                    if error.errno or time.monotonic() >= deadline:
                        raise
                    group._check_open()
        except LaneError as error:
            message = f"{what}: {self._method}() raised {describe_error(error.cause)}"
            finding = Finding("W201", message)
            raise WorkerError([finding], group.name, rank, group.node_rank_of(rank), error.trace) from error.cause
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError) and not error.errno:  # with a number, the connection timed out
                message = f"{group.name}.{self._method}(): rank {rank} did not end within {timeout:g} s"
                raise CallTimeoutError([Finding("W203", message)]) from None
            raise _death(group, rank, f"{self._method}()", "its connection has ended") from error

    def done(self) -> bool:
        """Whether it has finished, well or not."""
        return self._call.done()

    def forget(self) -> None:
        """Nobody wants what it gives."""
        self._call.forget()


def _doing(state: dict[str, Any]) -> str:
    if state["state"] == "busy":
        return f"busy in {state['call']}() for {state['since_s']:.1f} s"
    return "does not answer" if state["state"] == "silent" else str(state["state"])


def _cause(error: BaseException) -> BaseException | None:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else None


def failure_of(group: WorkerGroup, rank: int, error: BaseException, what: str) -> WorkerError:
    """A failed call as an error of Roost: an exception, or a death."""
    node_rank = group.node_rank_of(rank)
    where = f"{group.name}[{rank}] on node {node_rank}"
    if isinstance(error, RayTaskError):
        cause = _cause(error)
        kind = type(cause).__name__ if cause is not None else "an exception"
        message = f"{where}: {what} raised {kind}: {_first_line(cause)}"
        return WorkerError([Finding("W201", message)], group.name, rank, node_rank, _plain(str(error)))
    if isinstance(error, RaySystemError) or type(error).__name__ == "UnserializableException":  # the latter: Ray 2.50
        message = f"{where}: {what} raised an exception, or returned a value, that cannot be loaded here"
        return WorkerError([Finding("W201", message)], group.name, rank, node_rank, _plain(str(error)))
    return _death(group, rank, what, _first_line(error))


def _death(group: WorkerGroup, rank: int, what: str, reason: str) -> WorkerDiedError:
    """The error of a rank that is gone; it says so where the rank's whole node is."""
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


def _plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] if error is not None else []
    return lines[0][:300] if lines else ""

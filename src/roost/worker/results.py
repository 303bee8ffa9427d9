"""The result of a call on a group."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RaySystemError, RayTaskError

from roost.cluster.log_files import log_folder
from roost.errors import CallTimeoutError, Finding, Fix, RoostError, WorkerDiedError, WorkerError
from roost.worker.calls import describe_error
from roost.worker.lane import LaneCall, LaneError

if TYPE_CHECKING:
    from roost.worker.group import WorkerGroup

__all__ = ["GroupResult", "LaneResult", "failure_of"]


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
        if self._values is None:
            self._group._check_open()
            try:
                self._values = ray.get(self.refs, timeout=timeout)
            except GetTimeoutError:
                raise self._late(timeout) from None
            except RayError as error:
                raise self._failure(error) from _cause(error)
        return [value for value, _ in self._values]

    def done(self) -> bool:
        """Whether every rank has finished, well or not."""
        if self._values is not None:
            return True
        self._group._check_open()
        ready, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        return len(ready) == len(self.refs)

    async def async_wait(self) -> list[Any]:
        """As :meth:`wait`, for code that runs in an event loop."""
        if self._values is None:
            self._group._check_open()
            try:
                self._values = list(await asyncio.gather(*self.refs))
            except RayError as error:
                raise self._failure(error) from _cause(error)
        return [value for value, _ in self._values]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        rank_of = dict(zip(self.refs, self._ranks, strict=True))
        left = list(self.refs)
        while left:
            self._group._check_open()
            ready, left = ray.wait(left, num_returns=1)
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

    def _late(self, timeout: float | None) -> CallTimeoutError:
        _, late = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        ranks = [self._ranks[self.refs.index(ref)] for ref in late]
        states = self._group.states(ranks[:8])
        lines = tuple(f"rank {state['rank']}: {_doing(state)}" for state in states)
        message = f"{self._group.name}.{self._method}(): {len(late)} of {len(self.refs)} ranks did not end within {timeout:g} s"
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
        try:
            return [self._call.result(timeout)]
        except LaneError as error:
            message = f"{what}: {self._method}() raised {describe_error(error.cause)}"
            finding = Finding("W201", message)
            raise WorkerError([finding], group.name, rank, group.node_rank_of(rank), error.trace) from error.cause
        except TimeoutError:
            message = f"{group.name}.{self._method}(): rank {rank} did not end within {timeout:g} s"
            raise CallTimeoutError([Finding("W203", message)]) from None
        except (OSError, EOFError) as error:
            finding = Finding("W202", f"{what} died during {self._method}(): its connection has ended")
            raise WorkerDiedError([finding], group.name, rank, group.node_rank_of(rank)) from error

    def done(self) -> bool:
        """Whether it has finished, well or not."""
        return self._call.done()

    def forget(self) -> None:
        """Nobody wants what it gives."""
        self._call.forget()


def _doing(state: dict[str, Any]) -> str:
    if state["state"] == "busy":
        return f"busy in {state['call']}() for {state['since_s']:.1f} s"
    return str(state["state"])


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
    message = f"{where} died during {what}: {_first_line(error)}"
    actor_id = group._handles[rank]._actor_id.hex()
    fixes = (Fix("its log", f"ray logs actor --id {actor_id}  or, on node {node_rank}, the files in {log_folder()}"),)
    return WorkerDiedError([Finding("W202", message, fixes=fixes)], group.name, rank, node_rank)


def _plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] if error is not None else []
    return lines[0][:300] if lines else ""

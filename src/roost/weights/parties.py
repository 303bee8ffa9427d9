"""The trainer and the engines, as far as weight sync uses them. Rooms above implement these protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from roost.plan import Plan, WeightTransport
from roost.worker import GroupResult, WorkerGroup
from roost.worker.results import LaneResult

__all__ = ["CallResult", "ManagedEngine", "SyncEngine", "SyncTrainer"]


class CallResult(Protocol):
    """The result of a call that may still run."""

    def wait(self, timeout_s: float | None = None, /) -> Sequence[object]:
        """Block until the call ends; return one value for each rank, or raise the call's error."""
        ...

    def done(self) -> bool:
        """Return whether the call has ended. Does not block."""
        ...


class SyncTrainer(Protocol):
    """A running trainer."""

    @property
    def workers(self) -> WorkerGroup:
        """The trainer's ranks; their methods are those of ``TrainWorker``."""
        ...

    @property
    def plan(self) -> Plan:
        """The plan of the job."""
        ...

    @property
    def component(self) -> str:
        """The trainer's component in the plan."""
        ...


class SyncEngine(Protocol):
    """An engine that receives weights.

    An engine of the job has one or more members, each a worker on one node. An engine that runs outside of the job is
    known by its URL. It has one member without a worker, so :meth:`call` returns no results.

    Attributes:
        version: Version of the weights that it serves.
        is_alive: Whether it runs, as far as is known.
    """

    version: int
    is_alive: bool

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    @property
    def identity(self) -> tuple[str, int]:
        """Name and number of starts: another one after a restart."""
        ...

    @property
    def num_members(self) -> int:
        """Number of members."""
        ...

    def describe(self) -> GroupResult | None:
        """Ask the first member for its ``WeightDescription``; ``None``: the engine wants all tensors in full."""
        ...

    def call(self, member: int, method: str, *args: Any) -> Sequence[CallResult]:
        """Call a method of a member's worker."""
        ...

    def commit(self, member: int, version: int, pause: str, folder: str) -> Sequence[CallResult]:
        """Have a member load the version that was staged for it, or that is in a folder."""
        ...

    def location(self, member: int) -> tuple[int, int]:
        """Return node rank and local accelerator rank of a member; -1 where they are unknown."""
        ...

    def accelerators(self, member: int) -> tuple[int, ...]:
        """Return the local ranks of all accelerators of a member."""
        ...

    def transport(self, member: int) -> WeightTransport:
        """Return the transport of a member in the plan."""
        ...


@runtime_checkable
class ManagedEngine(SyncEngine, Protocol):
    """An engine whose members are workers of the job."""

    def open_lane(self, member: int, timeout_s: float) -> None:
        """Connect to a member's worker directly, so that :meth:`begin` does not go through Ray."""
        ...

    def begin(self, member: int, method: str, *args: Any) -> GroupResult | LaneResult:
        """Call a method of a member's worker over its direct connection, where there is one."""
        ...

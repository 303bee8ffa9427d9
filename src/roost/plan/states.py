"""What a job that runs looks like at one moment, and what its ranks called: plain data to draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "STATES",
    "AcceleratorStatus",
    "Call",
    "CallError",
    "GroupStatus",
    "JobStatus",
    "NodeStatus",
    "RankStatus",
    "RankTimeline",
]

STATES = ("dead", "silent", "starting", "busy", "ready")
"""All states of a rank, the worst first. Silent: its process is not known to be dead, and does not answer."""


@dataclass(frozen=True)
class CallError:
    """The last call of a rank that failed.

    Attributes:
        call: The method.
        error: Type and first line of the error.
        at: When, in seconds since 1970 by the clock of the rank's node.
        ago_s: How long ago.
    """

    call: str
    error: str
    at: float
    ago_s: float


@dataclass(frozen=True)
class RankStatus:
    """One process of a group.

    Attributes:
        rank: Its rank.
        node_rank: The node that it is on.
        address: Address of that node; empty before the process runs.
        pid: Its process id there; 0 before it runs.
        accelerators: Node-local ranks of its accelerators.
        visible: What its visible-devices variable said at its start.
        state: One of :data:`STATES`.
        call: The call that it is in, or was in when it was last heard.
        since_s: How long it has been in that call, or in that state.
        running: How many calls run at once.
        calls: How many calls it was given.
        errors: How many of those failed.
        last_error: The last of those.
        note: What the worker says about itself.
        reason: Why it is dead.
    """

    rank: int
    node_rank: int
    address: str = ""
    pid: int = 0
    accelerators: tuple[int, ...] = ()
    visible: str | None = None
    state: str = "starting"
    call: str = ""
    since_s: float = 0.0
    running: int = 0
    calls: int = 0
    errors: int = 0
    last_error: CallError | None = None
    note: str = ""
    reason: str = ""


@dataclass(frozen=True)
class GroupStatus:
    """A group of the job.

    Attributes:
        name: Its name.
        workers: Its ranks, in order.
        kind: Name of the class of its workers.
    """

    name: str
    workers: tuple[RankStatus, ...]
    kind: str = ""

    def counts(self) -> dict[str, int]:
        """State → number of ranks, the worst first; states that none is in are left out."""
        found = dict.fromkeys(STATES, 0)
        for worker in self.workers:
            found[worker.state] = found.get(worker.state, 0) + 1
        return {state: count for state, count in found.items() if count}


@dataclass(frozen=True)
class AcceleratorStatus:
    """How much of an accelerator is used; ``None`` where nobody tells.

    Attributes:
        memory_gib: Its memory.
        used_gib: How much of that is in use.
        busy: Share of the last moments in which it computed, from 0 to 1.
    """

    memory_gib: float | None = None
    used_gib: float | None = None
    busy: float | None = None


@dataclass(frozen=True)
class NodeStatus:
    """A node of the job, with its accelerators in the order of their local ranks."""

    rank: int
    address: str
    name: str = ""
    model: str = ""
    accelerators: tuple[AcceleratorStatus, ...] = ()


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment.

    Attributes:
        owner: Who runs it: user, host, pid, since, namespace.
        machines: Its machines, in words.
        groups: Its groups, by name.
        nodes: Its nodes, in order.
        at: When, in seconds since 1970.
    """

    owner: Mapping[str, Any]
    machines: str
    groups: tuple[GroupStatus, ...]
    nodes: tuple[NodeStatus, ...] = ()
    at: float = 0.0

    @property
    def namespace(self) -> str:
        """The name of the job on its Ray."""
        return str(self.owner.get("namespace", ""))

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Call:
    """A call of a rank.

    Attributes:
        name: The method.
        start_s: When it began, in seconds since 1970, by one clock for all ranks.
        duration_s: How long it took, or has taken so far.
        error: Type and first line of its error; empty where it ended well; ``None`` where it still runs.
    """

    name: str
    start_s: float
    duration_s: float
    error: str | None = ""


@dataclass(frozen=True)
class RankTimeline:
    """The calls of a rank, in the order of their begin.

    Attributes:
        job: Name of the job.
        group: Name of the group.
        rank: The rank.
        node_rank: Its node.
        address: Address of that node.
        calls: Its calls.
        is_cut: Whether it made more calls in that time than are kept.
        offset_s: What was taken off the clock of its node.
    """

    job: str
    group: str
    rank: int
    node_rank: int
    address: str = ""
    calls: tuple[Call, ...] = field(default=())
    is_cut: bool = False
    offset_s: float = 0.0

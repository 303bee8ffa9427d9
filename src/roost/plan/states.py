"""The state of a running job at one moment, and the calls of its ranks, as plain data for reports."""

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
"""All states of a rank, the worst first. A silent rank does not answer, and is not known to be dead."""


@dataclass(frozen=True)
class CallError:
    """The last call of a rank that failed.

    Attributes:
        call: The method.
        error: Type and first line of the error.
        at: Unix time of the failure, by the clock of the rank's node.
        ago_s: Seconds since the failure.
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
        node_rank: Its node.
        address: Address of the node; empty before the process runs.
        pid: Its process id; 0 before it runs.
        accelerators: Node-local ranks of its accelerators.
        visible: Value of its visible-devices variable (such as ``CUDA_VISIBLE_DEVICES``) when it started.
        state: One of :data:`STATES`.
        call: The method that runs, or ran when the rank last answered.
        since_s: Seconds in that call, or in that state.
        running: Number of calls that run at the same time.
        calls: Number of calls that it received.
        errors: Number of calls that failed.
        last_error: The last call that failed.
        note: The note that the worker set about itself.
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
    """A worker group of the job.

    Attributes:
        name: Its name.
        workers: Its ranks, in order.
        kind: Class name of its workers.
    """

    name: str
    workers: tuple[RankStatus, ...]
    kind: str = ""

    def counts(self) -> dict[str, int]:
        """Return the number of ranks by state, the worst state first. States without ranks are left out."""
        found = dict.fromkeys(STATES, 0)
        for worker in self.workers:
            found[worker.state] = found.get(worker.state, 0) + 1
        return {state: count for state, count in found.items() if count}


@dataclass(frozen=True)
class AcceleratorStatus:
    """Use of an accelerator; ``None`` for values that its driver does not report.

    Attributes:
        memory_gib: Its memory.
        used_gib: Its used memory.
        busy: Share of the driver's last sampling period in which it computed, from 0 to 1.
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
        owner: The process that runs the job: user, host, pid, since, namespace.
        machines: Description of its nodes.
        groups: Its worker groups, by name.
        nodes: Its nodes, in order.
        at: Unix time of this state.
    """

    owner: Mapping[str, Any]
    machines: str
    groups: tuple[GroupStatus, ...]
    nodes: tuple[NodeStatus, ...] = ()
    at: float = 0.0

    @property
    def namespace(self) -> str:
        """The Ray namespace of the job, which is its name."""
        return str(self.owner.get("namespace", ""))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Call:
    """A call of a rank.

    Attributes:
        name: The method.
        start_s: Unix time of its start, by one clock for all ranks.
        duration_s: Seconds that it took, or has taken so far.
        error: Type and first line of its error; empty after success; ``None`` while it runs.
    """

    name: str
    start_s: float
    duration_s: float
    error: str | None = ""


@dataclass(frozen=True)
class RankTimeline:
    """The calls of a rank, ordered by start.

    Attributes:
        job: Name of the job.
        group: Name of the worker group.
        rank: The rank.
        node_rank: Its node.
        address: Address of the node.
        calls: Its calls.
        is_cut: Whether older calls of the requested time are missing, because a worker keeps a limited number.
        offset_s: Seconds by which its node's clock was ahead; they are already subtracted from ``start_s``.
    """

    job: str
    group: str
    rank: int
    node_rank: int
    address: str = ""
    calls: tuple[Call, ...] = field(default=())
    is_cut: bool = False
    offset_s: float = 0.0

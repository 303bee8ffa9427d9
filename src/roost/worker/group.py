"""``WorkerGroup``: the running workers of one component, called together."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.cluster import Cluster
from roost.cluster.losses import LostNode
from roost.cluster.manager_calls import ask_managers
from roost.cluster.ray_private import id_of_actor
from roost.errors import CallTimeoutError, ClusterError, Finding, PlacementError, WorkerError
from roost.worker.binding import Attestation, Binding
from roost.worker.lane import LaneClient
from roost.worker.processes import kill_if_same
from roost.worker.results import GroupResult, LaneResult, failure_of

__all__ = ["PerRank", "WorkerGroup", "end_workers", "kill_workers_of"]

logger = logging.getLogger("roost")

ANSWER_S = 1.0
"""Seconds to wait for a worker's reply before its process is killed by SIGKILL instead of through Ray."""
KILLED_S = 10.0
"""Seconds to wait until the names of killed actors are free again."""
DURATIONS_S = 30.0
"""Seconds to wait until workers tell how long a call took."""


class WorkerGroup:
    """The running workers of one component: ``group.method(args)`` calls a method on every rank at once.

    A call returns a :class:`GroupResult`. A group is a context manager; :meth:`close` is idempotent.

    Attributes:
        name: Name of the group in the job.
        world_size: Number of workers.
        cluster: The cluster on which the workers run.
        binding: The nodes and accelerators of the workers; ``None`` if this process attached to the group.
    """

    name: str
    world_size: int
    binding: Binding | None

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        handles: Sequence[ray.actor.ActorHandle[Any]],
        node_ranks: Sequence[int],
        methods: Sequence[str],
        binding: Binding | None = None,
    ) -> None:
        self.name = name
        self.world_size = len(handles)
        self.binding = binding
        self.cluster = cluster
        self._handles = list(handles)
        self._node_ranks = list(node_ranks)
        self._methods = frozenset(methods)
        self._chosen: tuple[int, ...] | None = None
        self._num_sent = [0] * self.world_size  # calls by rank
        self._lanes: dict[int, LaneClient] = {}
        self._in_order: set[int] = set()  # ranks whose lane keeps the order with calls through Ray
        self._last: dict[int, ray.ObjectRef[Any]] = {}  # the last call through Ray of each of these ranks
        self._is_owner = False  # whether this process launched the group, and has not closed it

    @staticmethod
    def attach(name: str, cluster: Cluster | None = None) -> WorkerGroup:
        """Return a group that another process of the job launched.

        Args:
            name: Name of the group.
            cluster: The job; default: the job that this process belongs to or finds (``Cluster()``).

        Raises:
            ClusterError: There is no such group, or its workers are gone (W107); it names the groups that exist.
        """
        cluster = cluster or Cluster()
        cluster.check_open()
        groups = ask_managers(cluster.managers, "get_groups")
        record = groups.get(name)
        if record is None or not record["workers"]:
            known = ", ".join(sorted(groups)) or "none"
            raise ClusterError([Finding("W107", f"there is no group {name!r} in this job", rule=f"groups: {known}")])
        node_ranks = [worker["node_rank"] for worker in record["workers"]]
        try:
            handles = [ray.get_actor(actor, namespace=cluster.namespace) for actor in record["actors"]]
        except ValueError:
            message = f"workers of the group {name!r} are gone"
            raise ClusterError([Finding("W107", message)]) from None  # Ray's error says only that a name is unknown
        return WorkerGroup(cluster, name, handles, node_ranks, record["methods"])

    # Calls ---------------------------------------------------------------------------------

    def __getattr__(self, method: str) -> Callable[..., GroupResult]:
        if method.startswith("__") or method not in self.__dict__.get("_methods", ()):
            known = ", ".join(sorted(self.__dict__.get("_methods", ()))) or "none"
            raise AttributeError(
                f"the workers of {self.__dict__.get('name')!r} have no method {method!r}; they have {known}"
            )

        def call(*args: Any, **kwargs: Any) -> GroupResult:
            return self._call(method, args, kwargs)

        return call

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self._chosen if self._chosen is not None else tuple(range(self.world_size))

    def _call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GroupResult:
        self._check_open()
        ranks, call_id = self._ranks, uuid.uuid4().hex
        differs = any(isinstance(value, PerRank) for value in (*args, *kwargs.values()))
        own_args, own_kwargs = args, dict(kwargs)
        refs = []
        for index, rank in enumerate(ranks):
            if differs:
                own_args = tuple(_for_rank(value, index, len(ranks)) for value in args)
                own_kwargs = {key: _for_rank(value, index, len(ranks)) for key, value in kwargs.items()}
            refs.append(self._handles[rank].call.remote(method, own_args, own_kwargs, call_id))
            self._num_sent[rank] += 1
            if rank in self._in_order:
                self._last[rank] = refs[-1]
        return GroupResult(self, method, ranks, refs, call_id)

    def open_lanes(self, ranks: Sequence[int], *, in_order: bool = True, timeout_s: float | None = None) -> None:
        """Connect to some workers by a socket, which :meth:`begin` then uses: a call takes about 0.1 ms instead of 1-2 ms.

        Earlier calls of these workers must have finished.

        Args:
            ranks: The workers.
            in_order: Whether a call through the lane waits for all earlier calls of its worker, as calls through Ray
                do on a worker that runs one call at a time.
            timeout_s: Seconds to wait for each worker's address; default: as long as the worker is alive.

        Raises:
            CallTimeoutError: A worker did not answer in time (W203).
            WorkerError: A worker cannot listen, or is gone.
        """
        missing = [rank for rank in ranks if rank not in self._lanes]
        if missing:
            self._check_open()
        for rank, ref in [(rank, self._handles[rank].open_lane.remote()) for rank in missing]:
            try:
                self._lanes[rank] = LaneClient(ray.get(ref, timeout=timeout_s))
            except ray.exceptions.GetTimeoutError:
                message = (
                    f"{self.name}[{rank}] on node {self.node_rank_of(rank)} did not open a lane within {timeout_s:g} s"
                )
                raise CallTimeoutError([Finding("W203", message)]) from None
            except ray.exceptions.RayError as error:
                raise failure_of(self, rank, error, "opening a lane") from error
            if in_order:
                self._in_order.add(rank)

    def begin(self, rank: int, method: str, *args: Any) -> GroupResult | LaneResult:
        """Call a method of one worker: through its lane if it has one, else through Ray."""
        return self.begin_in_lane(rank, method, *args) or self.execute_on(rank)._call(method, args, {})

    def begin_in_lane(self, rank: int, method: str, *args: Any) -> LaneResult | None:
        """Call a method of one worker through its lane; return ``None`` if no lane of it can be used now."""
        lane = self._lanes.get(rank)
        if lane is not None and self._last_call_has_ended(rank):
            try:
                after = self._num_sent[rank] if rank in self._in_order else -1
                call = lane.begin("call_in_lane", method, args, after)
            except OSError:
                self._lanes.pop(rank, None)  # else every further call would try to connect, and wait for it
            else:
                self._num_sent[rank] += 1
                return LaneResult(self, method, rank, call)
        return None

    def _last_call_has_ended(self, rank: int) -> bool:
        """Return whether the rank's last call through Ray has ended.

        A call through the lane would overtake a call through Ray whose arguments are still being loaded.
        """
        ref = self._last.get(rank)
        if ref is not None:
            self._check_open()
        if ref is not None and not ray.wait([ref], timeout=0, fetch_local=False)[0]:
            return False
        self._last.pop(rank, None)
        return True

    def execute_on(self, *ranks: int) -> WorkerGroup:
        """Return the same group with some ranks chosen: ``group.execute_on(0, 3).save()`` calls ranks 0 and 3.

        Raises:
            PlacementError: There is no such rank, or none was given (P206).
        """
        wrong = [rank for rank in ranks if not isinstance(rank, int) or not 0 <= rank < self.world_size]
        if wrong or not ranks:
            message = f"{self.name} has ranks 0-{self.world_size - 1}, and no {wrong or 'ranks were given'}"
            raise PlacementError([Finding("P206", message)])
        part = WorkerGroup(self.cluster, self.name, self._handles, self._node_ranks, tuple(self._methods), self.binding)
        part._chosen = tuple(ranks)
        part._num_sent, part._lanes = self._num_sent, self._lanes
        part._in_order, part._last = self._in_order, self._last
        return part

    def call_beside(self, method: str, *args: Any) -> list[ray.ObjectRef[Any]]:
        """Call a method of all workers at once, also while they are busy; only methods that do not wait.

        Returns:
            One reference per rank.

        Raises:
            ClusterError: The cluster was closed, or its connection to Ray has ended (R115), or Ray's head is lost (R116).
        """
        self._check_open()
        return [handle.call_beside.remote(method, args) for handle in self._handles]

    # Watching ------------------------------------------------------------------------------

    def states(self, ranks: Sequence[int] | None = None, *, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """Return the state of each worker; busy workers answer too.

        Args:
            ranks: The ranks to ask; default all.
            timeout_s: Seconds to wait for answers.

        Returns:
            A mapping per rank, with ``rank`` and ``state``: ``starting``, ``ready``, ``busy``, ``dead``, or ``silent``
            if the worker did not answer in time.
        """
        return self.read_states(self.ask_states(range(self.world_size) if ranks is None else ranks), timeout_s)

    def ask_states(self, ranks: Iterable[int]) -> dict[int, ray.ObjectRef[Any]]:
        """Ask workers for their states, for :meth:`read_states`; return at once."""
        self._check_open()
        return {rank: self._handles[rank].state.remote() for rank in ranks}

    def read_states(self, asked: Mapping[int, ray.ObjectRef[Any]], timeout_s: float) -> list[dict[str, Any]]:
        """Return the states that :meth:`ask_states` asked for; wait at most ``timeout_s`` for them."""
        self._check_open()
        refs = list(asked.values())
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()
        states = []
        for rank, ref in asked.items():
            try:
                states.append(ray.get(ref) if ref in ready else {"rank": rank, "state": "silent"})
            except ray.exceptions.RayError as error:
                states.append({"rank": rank, "state": "dead", "error": str(error).splitlines()[0]})
        return states

    def stacks(self, rank: int = 0, *, timeout_s: float = 10.0) -> str:
        """Return the Python stack of every thread of a worker; a busy worker answers too.

        Raises:
            GetTimeoutError: Ray's error: the worker did not answer in time.
        """
        self._check_open()
        return str(ray.get(self._handles[rank].stacks.remote(), timeout=timeout_s))

    @property
    def methods(self) -> list[str]:
        """Names of the workers' methods that can be called."""
        return sorted(self._methods)

    def node_rank_of(self, rank: int) -> int:
        """Return the rank of the node on which a worker runs."""
        return self._node_ranks[rank]

    def actor_id(self, rank: int) -> str:
        """Return Ray's id of the actor of a rank."""
        return id_of_actor(self._handles[rank])

    def _check_open(self) -> None:
        self.cluster.check_open()

    def _lost_nodes(self, node_ranks: Sequence[int]) -> list[LostNode]:
        """Return which of some nodes are lost; none if Ray does not answer."""
        try:
            return self.cluster.lost_nodes(node_ranks)
        except ray.exceptions.RayError as error:
            logger.debug("Ray does not say whether nodes are lost: %s", error)
            return []

    def _durations_of(self, ranks: Sequence[int], call_id: str) -> list[float]:
        """Return the seconds that a finished call took on each rank; ``nan`` where the worker has forgotten it."""
        refs = [self._handles[rank].duration_of.remote(call_id) for rank in ranks]
        durations = []
        for rank, ref in zip(ranks, refs, strict=True):
            try:
                found = ray.get(ref, timeout=DURATIONS_S)
            except ray.exceptions.RayError as error:
                raise failure_of(self, rank, error, "telling the duration of a call") from error
            durations.append(math.nan if found is None else float(found))
        return durations

    # Ending --------------------------------------------------------------------------------

    def kill_workers(self, ranks: Iterable[int] | None = None) -> None:
        """Kill the processes of some ranks, by default of all, and wait until their names are free again."""
        kill_workers_of({self: range(self.world_size) if ranks is None else ranks})

    def close(self) -> None:
        """Kill every worker and its child processes, and release the group's reservation. Safe to call twice.

        Only the process that launched a group can close it: for an attached group, and for a group with chosen ranks
        (:meth:`execute_on`), this does nothing.
        """
        if not self._is_owner:
            return
        self._is_owner = False
        try:
            if self.cluster.is_open:  # else Ray has ended the workers
                self.kill_workers()
                self._unregister()
                if self.binding is not None and self.binding.reservation:
                    self.cluster.release(self.binding.reservation)
        finally:
            self.cluster.remove_group(self)

    def _unregister(self) -> None:
        try:
            ask_managers(self.cluster.managers, "remove_group", self.name)
        except ClusterError as error:  # its name stays taken until the job ends
            logger.warning("the group %s could not be unregistered: %s", self.name, error.findings[0].message)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"WorkerGroup({self.name!r}, {self.world_size} workers)"


class PerRank:
    """An argument of a group call that has one value per called rank: ``group.train(PerRank(batches))``."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)


def _for_rank(value: Any, index: int, count: int) -> Any:
    if not isinstance(value, PerRank):
        return value
    if len(value.values) != count:
        message = f"PerRank has {len(value.values)} values for {count} ranks"
        raise WorkerError([Finding("W204", message)])
    return value.values[index]


def kill_workers_of(groups: Mapping[WorkerGroup, Iterable[int]]) -> None:
    """Kill the processes of ranks of several groups at once, so that the waits for hung processes overlap."""
    workers = []
    for group, ranks in groups.items():
        found = group.binding.attestations if group.binding is not None else ()
        workers += [(group._handles[rank], found[rank] if found else None) for rank in ranks]
    end_workers(workers)


def end_workers(workers: Sequence[tuple[ray.actor.ActorHandle[Any], Attestation | None]]) -> None:
    """Kill actors, and wait up to :data:`KILLED_S` until their names are free again.

    An actor with an attestation that does not answer within :data:`ANSWER_S` is killed by SIGKILL: Ray asks a process
    to end by itself, which a stopped process cannot do (Ray 2.47 leaves it for ever, Ray 2.60 for five seconds).

    Args:
        workers: The actors, each with its attestation if it has made one.
    """
    if not ray.is_initialized():  # the actors ended with the connection
        return
    asked = {handle.state.remote(): found for handle, found in workers if found is not None}
    answered = set(ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)[0]) if asked else set()
    hung = [found for ref, found in asked.items() if ref not in answered]
    for handle, _ in workers:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has ended already
            ray.kill(handle)
    killing = _kill_processes(hung)
    deadline = time.monotonic() + KILLED_S
    pending = [handle.state.remote() for handle, _ in workers] + killing
    while pending and time.monotonic() < deadline:
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=0.2)


def _kill_processes(attestations: Sequence[Attestation]) -> list[ray.ObjectRef[Any]]:
    """Start a task on each node that kills processes there by SIGKILL; return the references of these tasks."""
    of_node: dict[str, list[tuple[int, float]]] = {}
    for found in attestations:
        of_node.setdefault(found.ray_node_id, []).append((found.pid, found.started))
    task = ray.remote(num_cpus=0, max_retries=0)(kill_if_same)
    return [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(processes)
        for node, processes in of_node.items()
    ]

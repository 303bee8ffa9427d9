"""``WorkerGroup``: workers that are commanded as one."""

from __future__ import annotations

import contextlib
import time
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

ANSWER_S = 1.0
"""Seconds that a worker has to answer before it is ended; the process of one that does not is killed directly."""


class WorkerGroup:
    """Workers that are commanded as one: ``group.method(args)`` calls it on all of them.

    Attributes:
        name: Its name in the job.
        world_size: Number of workers.
        cluster: The cluster that they run on.
        binding: Where they really are; ``None`` where this process attached to the group.
    """

    name: str
    world_size: int
    binding: Binding | None

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        handles: Sequence[ray.actor.ActorHandle],
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
        self._sent = [0] * self.world_size
        self._lanes: dict[int, LaneClient] = {}
        self._in_order: set[int] = set()
        self._last: dict[int, ray.ObjectRef] = {}
        self._is_open = True

    @staticmethod
    def attach(name: str, cluster: Cluster | None = None) -> WorkerGroup:
        """A group of the running job, from another process of it.

        Raises:
            ClusterError: Where there is no such group; it names those that there are.
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
            raise ClusterError([Finding("W107", message)]) from None
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

    def value_refs(self, method: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Calls a method on all workers; returns a reference per rank, for code that uses ``ray.get``."""
        return self._send("call_value", method, args, kwargs)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GroupResult:
        return GroupResult(self, method, self._ranks, self._send("call", method, args, kwargs))

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self._chosen if self._chosen is not None else tuple(range(self.world_size))

    def _send(self, how: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[ray.ObjectRef]:
        self._check_open()
        ranks = self._ranks
        differs = any(isinstance(value, PerRank) for value in (*args, *kwargs.values()))
        own_args, own_kwargs = args, dict(kwargs)
        refs = []
        for index, rank in enumerate(ranks):
            if differs:
                own_args = tuple(_for_rank(value, index, len(ranks)) for value in args)
                own_kwargs = {key: _for_rank(value, index, len(ranks)) for key, value in kwargs.items()}
            refs.append(getattr(self._handles[rank], how).remote(method, own_args, own_kwargs))
            self._sent[rank] += 1
            if rank in self._in_order:
                self._last[rank] = refs[-1]
        return refs

    def open_lanes(self, ranks: Sequence[int], in_order: bool = True, timeout_s: float | None = None) -> None:
        """Makes a shorter way for :meth:`begin` to some workers, whose calls until now have ended.

        Args:
            ranks: The workers.
            in_order: Whether calls by it wait for all that were made before them, as calls through Ray do on
                workers that take one at a time.
            timeout_s: Seconds to wait for each worker's address; ``None``: as long as it is alive.

        Raises:
            CallTimeoutError: One did not answer in time.
            WorkerError: Where one has none, or is gone.
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
        """Calls a method of one worker by the shortest way that there is."""
        return self.begin_in_lane(rank, method, *args) or self.execute_on(rank)._call(method, args, {})

    def begin_in_lane(self, rank: int, method: str, *args: Any) -> LaneResult | None:
        """Call a method of one worker through its lane; return ``None`` if it has none that can be used now."""
        lane = self._lanes.get(rank)
        if lane is not None and self._has_ended(rank):
            try:
                after = self._sent[rank] if rank in self._in_order else -1
                call = lane.begin("call_in_lane", method, args, after)
            except OSError:
                self._lanes.pop(rank, None)  # it would be tried, and waited for, at every call
            else:
                self._sent[rank] += 1
                return LaneResult(self, method, rank, call)
        return None

    def _has_ended(self, rank: int) -> bool:
        """Whether the last call through Ray has; the next one would overtake it in a lane while its arguments load."""
        ref = self._last.get(rank)
        if ref is not None:
            self._check_open()
        if ref is not None and not ray.wait([ref], timeout=0, fetch_local=False)[0]:
            return False
        self._last.pop(rank, None)
        return True

    def execute_on(self, *ranks: int) -> WorkerGroup:
        """The same group, of which only these ranks are called: ``group.execute_on(0, 3).save()``."""
        wrong = [rank for rank in ranks if not isinstance(rank, int) or not 0 <= rank < self.world_size]
        if wrong or not ranks:
            message = f"{self.name} has ranks 0-{self.world_size - 1}, and no {wrong or 'ranks were given'}"
            raise PlacementError([Finding("P206", message)])
        part = WorkerGroup(self.cluster, self.name, self._handles, self._node_ranks, tuple(self._methods), self.binding)
        part._chosen = tuple(ranks)
        part._sent, part._lanes = self._sent, self._lanes
        part._in_order, part._last = self._in_order, self._last
        return part

    def call_beside(self, method: str, *args: Any) -> list[ray.ObjectRef]:
        """Call a method of all workers at once, also while they are busy; only methods that do not wait.

        Returns:
            One reference per rank.

        Raises:
            ClusterError: The cluster was closed, or its connection to Ray has ended (R115), or Ray's head is lost (R116).
        """
        self._check_open()
        return [handle.call_beside.remote(method, args) for handle in self._handles]

    # Watching ------------------------------------------------------------------------------

    def states(self, ranks: Sequence[int] | None = None, timeout: float = 5.0) -> list[dict[str, Any]]:
        """What each worker is doing; answers while they are busy."""
        return self.read_states(self.ask_states(range(self.world_size) if ranks is None else ranks), timeout)

    def ask_states(self, ranks: Iterable[int]) -> dict[int, ray.ObjectRef]:
        """Ask workers what they are doing, for :meth:`read_states`; returns at once."""
        self._check_open()
        return {rank: self._handles[rank].state.remote() for rank in ranks}

    def read_states(self, asked: Mapping[int, ray.ObjectRef], timeout: float) -> list[dict[str, Any]]:
        """What workers answered within a timeout; those that have not answered are ``silent``."""
        self._check_open()
        refs = list(asked.values())
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=timeout)[0]) if refs else set()
        states = []
        for rank, ref in asked.items():
            try:
                states.append(ray.get(ref) if ref in ready else {"rank": rank, "state": "silent"})
            except ray.exceptions.RayError as error:
                states.append({"rank": rank, "state": "dead", "error": str(error).splitlines()[0]})
        return states

    def stacks(self, rank: int = 0, timeout: float = 10.0) -> str:
        """The stack of every thread of a worker, also while it is busy."""
        self._check_open()
        return str(ray.get(self._handles[rank].stacks.remote(), timeout=timeout))

    @property
    def methods(self) -> list[str]:
        """The methods of the workers that can be called."""
        return sorted(self._methods)

    def node_rank_of(self, rank: int) -> int:
        """The node that a rank is on."""
        return self._node_ranks[rank]

    def actor_id(self, rank: int) -> str:
        """Return Ray's id of the actor of a rank."""
        return id_of_actor(self._handles[rank])

    def _check_open(self) -> None:
        self.cluster.check_open()

    def _lost_nodes(self, node_ranks: Sequence[int]) -> list[LostNode]:
        """Those of some nodes that are gone; none if Ray cannot say."""
        try:
            return self.cluster.lost_nodes(node_ranks)
        except ray.exceptions.RayError:
            return []

    # Ending --------------------------------------------------------------------------------

    def kill_workers(self, ranks: Iterable[int] | None = None) -> None:
        """Kill the processes of some ranks, by default of all, and wait until their names are free again."""
        kill_workers_of({self: range(self.world_size) if ranks is None else ranks})

    def close(self) -> None:
        """Ends every worker and its children, and gives back what the group held.

        A group that this process attached to, or chose ranks of, is left alone: it is another's.
        """
        if not self._is_open or self not in self.cluster.groups:
            return
        self._is_open = False
        if not self.cluster.is_open:  # Ray has ended the workers
            self.cluster.groups.remove(self)
            return
        self.kill_workers()
        with contextlib.suppress(ClusterError):
            ask_managers(self.cluster.managers, "remove_group", self.name)
        if self.binding is not None and self.binding.reservation:
            self.cluster.release(self.binding.reservation)
        self.cluster.groups.remove(self)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"WorkerGroup({self.name!r}, {self.world_size} workers)"


class PerRank:
    """One value per rank, as an argument of a group call: ``group.train(PerRank(batches))``."""

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
    """Kill the processes of ranks of several groups at once: those that hang are waited for together."""
    workers = []
    for group, ranks in groups.items():
        found = group.binding.attestations if group.binding is not None else ()
        workers += [(group._handles[rank], found[rank] if found else None) for rank in ranks]
    end_workers(workers)


def end_workers(workers: Sequence[tuple[ray.actor.ActorHandle, Attestation | None]]) -> None:
    """Kill actors, and wait until their names are free again.

    Args:
        workers: The actors, and what they attested at their start. An actor that does not answer within a second is
            killed through its process id: Ray asks a process to end by itself, which a stopped process cannot do
            (Ray 2.47 leaves it for ever, Ray 2.60 for five seconds).
    """
    if not ray.is_initialized():  # they ended with the connection
        return
    asked = {handle.state.remote(): found for handle, found in workers if found is not None}
    answered = set(ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)[0]) if asked else set()
    hung = [found for ref, found in asked.items() if ref not in answered]
    for handle, _ in workers:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(handle)
    killing = _kill_processes(hung)
    deadline = time.monotonic() + 10.0
    pending = [handle.state.remote() for handle, _ in workers] + killing
    while pending and time.monotonic() < deadline:
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=0.2)


def _kill_processes(found: Sequence[Attestation]) -> list[ray.ObjectRef]:
    """Kill processes by SIGKILL, through a task on each of their nodes; returns what these tasks give."""
    of_node: dict[str, list[tuple[int, int]]] = {}
    for one in found:
        of_node.setdefault(one.ray_node_id, []).append((one.pid, one.started))
    task = ray.remote(num_cpus=0, max_retries=0)(kill_if_same)
    return [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(processes)
        for node, processes in of_node.items()
    ]

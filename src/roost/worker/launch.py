"""Launching a worker group: all workers of a component start, or none is left running."""

from __future__ import annotations

import getpass
import inspect
import logging
import os
import platform
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.cluster import Cluster, CollectiveManager
from roost.cluster.manager_calls import ask_managers
from roost.cluster.plans import pack_plan
from roost.cluster.ray_typed import actor_class, pickled
from roost.cluster.request import seconds_from
from roost.errors import ClusterError, Finding, Fix, LaunchError
from roost.hardware import values_for_worker
from roost.placement import NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy
from roost.plan import ComponentPlan, Plan, Process
from roost.worker.binding import Attestation, Binding, asks_driver, check_faults, check_foreign_processes, compare
from roost.worker.context import WorkerContext
from roost.worker.foreign_processes import foreign_processes_are_allowed
from roost.worker.group import WorkerGroup, end_workers
from roost.worker.host import AsyncHost, Host
from roost.worker.interpreters import interpreter_fault, runtime_env_of
from roost.worker.options import check_options
from roost.worker.results import failure_of
from roost.worker.worker import Worker

__all__ = ["GroupRequest"]

logger = logging.getLogger("roost")

LAUNCH_TIMEOUT_S = 600.0
INTERPRETER_S = 120.0
"""Seconds to wait for the check of an interpreter on a node."""
TRACE_LINES = 30
"""How many of the last lines of a remote traceback a launch error shows."""


class GroupRequest:
    """A worker group that is not launched yet: a class, and the arguments of its constructor."""

    def __init__(self, cls: type, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        clashes = _clashes(cls)
        if clashes:
            message = f"{cls.__name__} has methods with names that a worker group uses itself: {', '.join(clashes)}"
            rule = "group.method() calls the workers, so their names must differ from the group's own"
            raise LaunchError([Finding("W105", message, rule=rule, fixes=(Fix("rename them"),))])
        self.cls = cls
        self.args = args
        self.kwargs = dict(kwargs or {})

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: PlacementStrategy | None = None,
        name: str | None = None,
        *,
        isolate_accelerator: bool = True,
        max_concurrency: int | None = None,
        plan: Plan | None = None,
        component: str | None = None,
        timeout_s: float | None = None,
    ) -> WorkerGroup:
        """Start all workers at once, and return when every constructor has returned.

        The group is launched with a placement strategy, or with a plan and a component of it.

        Args:
            cluster: The cluster to launch on.
            placement_strategy: Decides the nodes and accelerators of the workers; default: one worker per accelerator,
                or one worker on node 0 if the cluster has no accelerators.
            name: Name of the group; default: the name of the component or of the class, with a number if it is taken.
            isolate_accelerator: Whether a worker sees only its own accelerators.
            max_concurrency: How many calls of a worker may run at once, ordinary methods in threads; default one, or
                for a class with ``async def`` methods as many as Ray allows, interleaved on one event loop.
            plan: The plan.
            component: Name of the component.
            timeout_s: Seconds in which all workers must have started; default ``ROOST_LAUNCH_TIMEOUT_S``, else 600.

        Raises:
            LaunchError: The workers cannot be started (W102-W114); it has the first cause. No worker and no
                reservation is left behind.
        """
        if (plan is None) != (component is None) or (plan is not None and placement_strategy is not None):
            message = "launch takes a placement_strategy, or a plan and a component of it"
            raise LaunchError([Finding("W106", message)])
        check_options(placement_strategy, name, isolate_accelerator, max_concurrency)
        cluster.check_open()
        chosen = name or component or self.cls.__name__
        if plan is None or component is None:
            component = chosen
            plan = _plan_of_one(cluster, placement_strategy, chosen, isolate_accelerator)
        if plan.component(component).placeholder:
            message = f"{component} is a placeholder: its accelerators are reserved, and nothing is started there"
            raise LaunchError([Finding("W106", message)])
        limit = timeout_s if timeout_s is not None else seconds_from("ROOST_LAUNCH_TIMEOUT_S", LAUNCH_TIMEOUT_S)
        return _Launch(self, cluster, plan, component, chosen, name is None, max_concurrency, limit).run()


class _Launch:
    """One launch, from the plan to the running group. If it fails, it ends and releases what it has started."""

    def __init__(
        self,
        request: GroupRequest,
        cluster: Cluster,
        plan: Plan,
        component: str,
        name: str,
        may_rename: bool,
        max_concurrency: int | None,
        timeout_s: float,
    ) -> None:
        self.request = request
        self.cluster = cluster
        self.plan = plan
        self.component: ComponentPlan = plan.component(component)
        self.name = name
        self.may_rename = may_rename
        self.max_concurrency = max_concurrency
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.nodes = [cluster.get_node_info(rank) for rank in range(cluster.num_nodes)]
        self.processes: list[Process] = [plan.process(component, rank) for rank in range(self.component.world_size)]
        self.handles: list[ray.actor.ActorHandle[Any]] = []
        self.token = 0

    def run(self) -> WorkerGroup:
        self._check_plan()
        check_faults(self.nodes, self.processes)
        self._take_name()
        try:
            self._reserve()
            self._check_interpreters()
            self._start_hosts()
            group = self._unready_group()
            attestations, port = self._attest(group)
            compare(self.name, self.processes, self.nodes, attestations)
            check_foreign_processes(self.component, self.nodes, self.processes, attestations)
            master = attestations[0].address
            self._construct(group, master, port)
            group.binding = self._bind(attestations, master, port)
            self._register(group)
        except BaseException:
            self._undo()
            raise
        group._is_owner = True
        self.cluster.add_group(group)
        return group

    def _check_plan(self) -> None:
        """Check that the cluster has the nodes and accelerators of the plan."""
        real_nodes = self.cluster.topology.nodes
        for node in self.plan.topology.nodes:
            real = real_nodes[node.rank] if node.rank < len(real_nodes) else None
            if real is None or real.num_accelerators < node.num_accelerators:
                found = f"has {real.num_accelerators}" if real else "does not exist"
                message = f"the plan needs {node.num_accelerators} accelerators on node {node.rank}, which {found}"
                context = (f"plan: {self.plan.topology.describe()}", f"cluster: {self.cluster.topology.describe()}")
                raise LaunchError([Finding("W108", message, context=context)])

    def _take_name(self) -> None:
        """Register the name of the group with the job's managers."""
        record = {
            "driver": f"{getpass.getuser()} on {platform.node()} (process {os.getpid()})",
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "job_id": ray.get_runtime_context().get_job_id(),
            "id": uuid.uuid4().hex,
            "actors": [],
            "workers": [],
            "starting": [_whereabouts(process) for process in self.processes],
            "methods": sorted(_methods(self.request.cls)),
            "class": self.request.cls.__name__,
        }
        self.record = record
        base, number = self.name, 1
        while True:
            holder = ask_managers(self.cluster.managers, "register_group", self.name, record)
            if holder is None:
                return
            if not self.may_rename:
                message = f"the group name {self.name!r} is taken by {holder}"
                fixes = (
                    Fix("choose another", f'launch(…, name="{self.name}-2")'),
                    Fix("or use that group", f'WorkerGroup.attach("{self.name}")'),
                )
                raise LaunchError([Finding("W109", message, fixes=fixes)])
            number += 1
            self.name = f"{base}-{number}"

    def _reserve(self) -> None:
        cpus: dict[int, float] = {}
        for process in self.processes:
            node = process.placement.cluster_node_rank
            if self.component.cpus:
                cpus[node] = cpus.get(node, 0.0) + self.component.cpus
        wanted = self.component.accelerators
        if wanted or cpus:
            self.token = self.cluster.reserve(wanted, cpus)

    def _check_interpreters(self) -> None:
        """Check the interpreters of the plan: with one that does not work, Ray would retry the start for ever."""
        wanted = {(p.placement.cluster_node_rank, p.interpreter) for p in self.processes if p.interpreter}
        probe = ray.remote(num_cpus=0)(interpreter_fault)
        tasks = [
            (node, path, probe.options(scheduling_strategy=self._strategy(node)).remote(path))
            for node, path in sorted(wanted)
        ]
        findings = []
        rule = "python_interpreter_path must exist on each node of its group, with the cluster's version of Ray"
        for node, path, task in tasks:
            try:
                fault = ray.get(task, timeout=INTERPRETER_S)
            except ray.exceptions.RayError as error:
                fault = f"could not be checked: {error}".splitlines()[0]
            if fault:
                findings.append(Finding("W110", f"node {node}: the interpreter {path} {fault}", rule=rule))
        if findings:
            raise LaunchError(findings)

    def _strategy(self, node_rank: int) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self.nodes[node_rank].ray_id, soft=False)

    def _start_hosts(self) -> None:
        interleaves = self.max_concurrency is None and _has_coroutines(self.request.cls)
        host = AsyncHost if interleaves else Host
        actor = actor_class(host, num_cpus=0, max_restarts=0, concurrency_groups={"control": 1})
        for process in self.processes:
            rank = process.placement.rank
            environment = {
                **process.environment,
                "GROUP_NAME": self.name,
                "ROOST_NAMESPACE": self.cluster.namespace,
            }
            options: dict[str, Any] = {
                "name": f"{self.name}:{rank}",
                "namespace": self.cluster.namespace,
                "scheduling_strategy": self._strategy(process.placement.cluster_node_rank),
            }
            if self.max_concurrency is not None:
                options["max_concurrency"] = self.max_concurrency
            runtime_env = runtime_env_of(process)
            if runtime_env:
                options["runtime_env"] = runtime_env
            self.handles.append(
                actor.options(**options).remote(rank, environment, process.placement.accelerator_type.name, rank == 0)
            )

    def _unready_group(self) -> WorkerGroup:
        """Return the group before its workers are ready; errors take ranks and nodes from it."""
        node_ranks = [process.placement.cluster_node_rank for process in self.processes]
        return WorkerGroup(self.cluster, self.name, self.handles, node_ranks, _methods(self.request.cls))

    def _attest(self, group: WorkerGroup) -> tuple[list[Attestation], int]:
        here = ray.get_runtime_context().get_node_id()
        asked = []
        for handle, process, finds in zip(self.handles, self.processes, self._finds_foreign(), strict=True):
            node = self.nodes[process.placement.cluster_node_rank]
            own = (os.getpid(),) if node.ray_id == here else ()
            asked.append(handle.attest.remote(asks_driver(process, node), finds, own))
        found = self._all(group, asked, "starting")
        return [attestation for attestation, _ in found], found[0][1]

    def _finds_foreign(self) -> list[bool]:
        """Return which workers look for foreign processes: the first one on each node with real accelerators."""
        seen: set[int] = set()
        finds = []
        for placement in (process.placement for process in self.processes):
            rank = placement.cluster_node_rank
            is_real = bool(placement.accelerators) and self.nodes[rank].accelerators_are_real
            finds.append(is_real and rank not in seen and not foreign_processes_are_allowed())
            seen.update({rank} if finds[-1] else ())
        return finds

    def _construct(self, group: WorkerGroup, master: str, port: int) -> None:
        pickled_class = ray.put(pickled((self.request.cls, self.request.args, self.request.kwargs)))
        late = {"MASTER_ADDR": master, "MASTER_PORT": str(port)}
        paths = [os.path.abspath(path) for path in sys.path]
        refs = []
        for handle, process in zip(self.handles, self.processes, strict=True):
            placement = process.placement
            devices = self.plan.topology.group(placement.node_group_label).hardware_by_node.get(
                placement.cluster_node_rank, ()
            )
            own = () if placement.accelerators else tuple(devices[i] for i in placement.local_hardware_ranks)
            node_rank = placement.cluster_node_rank
            given = tuple(values_for_worker(device.type, device.fields, node_rank) for device in own)
            context = WorkerContext(
                self.name, placement, len(self.processes), self.cluster.namespace, master, port, given
            )
            refs.append(handle.construct.remote(pickled_class, context, late, paths))
        self._all(group, refs, "its constructor")

    def _all(self, group: WorkerGroup, refs: Sequence[ray.ObjectRef[Any]], what: str) -> list[Any]:
        """Wait for all ranks and return their values; raise ``LaunchError`` with the first failure, or at the timeout."""
        left = list(refs)
        while left:
            self.cluster.check_open()
            left_s = self.deadline - time.monotonic()
            ready, left = ray.wait(left, num_returns=len(left), timeout=min(1.0, max(0.0, left_s)))
            for ref in ready:
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as error:
                    failure = failure_of(group, refs.index(ref), error, what)
                    message = f"{self.name} was not launched: {failure.findings[0].message}"
                    trace = tuple(failure.remote_traceback.splitlines()[-TRACE_LINES:])
                    raise LaunchError([Finding("W102", message, context=trace)]) from failure
            if left and left_s <= 0:
                ranks = [refs.index(ref) for ref in left]
                nodes = sorted({group.node_rank_of(rank) for rank in ranks})
                message = (
                    f"{self.name}: {len(left)} of {len(refs)} workers were still {what} after {self.timeout_s:g} s "
                    f"(ranks {ranks[:16]}, nodes {nodes[:16]})"
                )
                fixes = (Fix("allow more time", "ROOST_LAUNCH_TIMEOUT_S=1800"),)
                raise LaunchError([Finding("W103", message, fixes=fixes)])
        values: list[Any] = ray.get(list(refs))
        return values

    def _bind(self, attestations: Sequence[Attestation], master: str, port: int) -> Binding:
        uuids = []
        for process in self.processes:
            devices = self.nodes[process.placement.cluster_node_rank].accelerators
            uuids.append(tuple(devices[i].uuid for i in process.placement.accelerators if devices[i].uuid))
        node_ids = tuple(attestation.ray_node_id for attestation in attestations)
        return Binding(
            self.plan, self.component.name, 1, node_ids, tuple(uuids), tuple(attestations), master, port, self.token
        )

    def _register(self, group: WorkerGroup) -> None:
        binding = group.binding
        if binding is None:
            return
        workers = [
            {
                **_whereabouts(process),
                "address": attestation.address,
                "pid": attestation.pid,
                "visible": attestation.visible,
            }
            for process, attestation in zip(self.processes, binding.attestations, strict=True)
        ]
        actors = [f"{self.name}:{rank}" for rank in range(len(workers))]
        record = {**self.record, "actors": actors, "workers": workers, "starting": [], "component": self.component.name}
        packed = pack_plan(self.plan, self.component.name)
        ask_managers(self.cluster.managers, "update_group", self.name, record)
        ask_managers(self.cluster.managers, "keep_plan", self.name, packed)
        collectives = CollectiveManager(self.cluster.managers)
        collectives.register(self.name, binding.master_address, binding.master_port, len(workers))

    def _undo(self) -> None:
        if not self.cluster.is_open:  # the workers and the reservation ended with the connection
            return
        end_workers([(handle, None) for handle in self.handles])
        try:
            ask_managers(self.cluster.managers, "remove_group", self.name)
        except ClusterError as error:  # the launch has another error, which is raised
            logger.warning("the group %s could not be unregistered: %s", self.name, error.findings[0].message)
        if self.token:
            self.cluster.release(self.token)


def _whereabouts(process: Process) -> dict[str, Any]:
    placement = process.placement
    return {
        "rank": placement.rank,
        "node_rank": placement.cluster_node_rank,
        "accelerators": list(placement.accelerators),
    }


def _plan_of_one(cluster: Cluster, strategy: PlacementStrategy | None, name: str, isolate: bool) -> Plan:
    """Return a plan of one component: every launch goes through a plan."""
    if strategy is None:
        total = cluster.num_accelerators
        strategy = PackedPlacementStrategy(0, total - 1) if total else NodePlacementStrategy([0])
    topology = cluster.topology.adding(strategy.node_groups)
    placements = tuple(strategy.get_placement(cluster, isolate))
    if not placements:
        raise LaunchError([Finding("W106", f"{strategy!r} places no process")])
    return Plan(topology, (ComponentPlan(name, name, placements),))


def _methods(cls: type) -> list[str]:
    """Return the public methods of a worker class, which a group can call."""
    names = []
    for name, value in inspect.getmembers(cls, callable):
        if not name.startswith("_") and getattr(Worker, name, None) is not value and not hasattr(Worker, name):
            names.append(name)
    return names


def _has_coroutines(cls: type) -> bool:
    """Return whether a public method of a worker class is ``async def``."""
    return any(inspect.iscoroutinefunction(getattr(cls, name)) for name in _methods(cls))


def _clashes(cls: type) -> list[str]:
    """Return the methods of a worker class that have the name of a method or attribute of ``WorkerGroup``."""
    own = {name for name in (*dir(WorkerGroup), *WorkerGroup.__annotations__) if not name.startswith("_")}
    defined = {name for base in cls.__mro__ if base not in (Worker, object) for name in vars(base)}
    return sorted(name for name in own & defined if callable(getattr(cls, name)))

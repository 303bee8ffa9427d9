"""Start the engines of a plan's components, and wait until they are healthy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from roost.cluster import Cluster
from roost.engines.engine import Engine, EnginePlace
from roost.engines.engine_worker import EngineWorker, MemberPorts
from roost.engines.handles import EngineHandle, ExternalEngine
from roost.engines.keys import make_key
from roost.errors import CallTimeoutError, Finding, Fix, RolloutError, RoostError, WorkerDiedError, WorkerError
from roost.plan import ComponentPlan, Plan
from roost.worker import GroupRequest, PerRank, WorkerGroup

__all__ = ["EngineStarter"]

logger = logging.getLogger(__name__)

CONCURRENCY = 16
"""Number of calls that an engine's worker runs at once."""
LOG_LINES = 30
"""Number of lines of a log or traceback that an error shows."""


class EngineStarter:
    """Starts engines of a plan, and waits until they are healthy.

    Args:
        cluster: The cluster.
        plan: The plan of the job.
        factories: A function that creates an engine; or a mapping from component name to such a function.
        dp_size: Number of data-parallel ranks inside an engine.
        dp_attention: Whether these ranks use data-parallel attention.
        timeout_s: Seconds that engines may take to become healthy.
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        factories: Callable[[], Engine] | Mapping[str, Callable[[], Engine]],
        dp_size: int,
        dp_attention: bool,
        timeout_s: float,
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._factories = factories
        self._ports = (dp_size, dp_attention)
        self._timeout_s = timeout_s

    def check(self, components: Sequence[ComponentPlan]) -> None:
        """Check that there is a factory for each component.

        Raises:
            RolloutError: A component has no factory (E201).
        """
        if not isinstance(self._factories, Mapping):
            return
        missing = [c.name for c in components if not c.placeholder and c.name not in self._factories]
        if missing:
            message = f"no engine is given for {', '.join(missing)}"
            raise RolloutError([Finding("E201", message, fixes=(Fix("add it", f'engine={{"{missing[0]}": …}}'),))])

    def launch(self, component: ComponentPlan, plan: Plan | None = None, factory_of: str = "") -> WorkerGroup:
        """Start the worker processes of all engines of a component.

        Args:
            component: The component.
            plan: The plan; by default that of the job.
            factory_of: Name of the component whose factory creates the engines; by default that of ``component``.
        """
        given = self._factories
        factory = given[factory_of or component.name] if isinstance(given, Mapping) else given
        return GroupRequest(EngineWorker, (factory,)).launch(
            self._cluster, plan=plan or self._plan, component=component.name, max_concurrency=CONCURRENCY
        )

    def start_all(self, component: ComponentPlan, group: WorkerGroup) -> list[EngineHandle]:
        """Start all engines of a component in the workers of ``group``, and wait until they are healthy."""
        size = component.processes_per_engine
        handles = [
            EngineHandle(f"{component.name}/{number}", component, tuple(range(first, first + size)), group, first)
            for number, first in enumerate(range(0, component.world_size, size))
        ]
        self._start(handles)
        return handles

    def restart(self, engine: EngineHandle) -> WorkerGroup:
        """Restart a dead engine in new processes on the same accelerators, and return their worker group."""
        engine.incarnation += 1
        name = f"{engine.component.name}-{engine.name.rpartition('/')[2]}.{engine.incarnation}"
        part = _subset_of(engine.component, engine.ranks, name)
        group = self.launch(part, replace(self._plan, components=(part,)), engine.component.name)
        engine.group, engine.first, engine.version = group, 0, 0
        try:
            self._start([engine])
        except BaseException:
            group.close()
            raise
        engine.is_alive = True
        return group

    def find_external(self, address: str, key: str = "") -> ExternalEngine:
        """Wait until an external engine is healthy and return it.

        Args:
            address: Base URL of the engine's server.
            key: Key of the server.

        Raises:
            RolloutError: It did not become healthy in time (E202), or it refuses the key (E113).
        """
        engine = ExternalEngine(address.rstrip("/"), key=key)
        deadline = time.monotonic() + self._timeout_s
        while (reason := engine.health()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if reason:
            message = f"the external engine {address} did not get healthy within {self._timeout_s:g} s: {reason}"
            raise RolloutError([Finding("E202", message)])
        engine.version = engine.ask_version()
        return engine

    # ---------------------------------------------------------------------------------------

    def _start(self, handles: Sequence[EngineHandle]) -> None:
        """Lease ports, start all members of all engines at once, and wait until they are healthy."""
        deadline = time.monotonic() + self._timeout_s
        leases = [handle.call_all("lease", *self._ports) for handle in handles]
        starting = []
        for handle, lease in zip(handles, leases, strict=True):
            handle.key = make_key()
            handle.places = _places(handle, lease.wait())
            starting.append(handle.call_all("start_engine", PerRank(handle.places)))
        for handle, result in zip(handles, starting, strict=True):
            try:
                handle.url = result.wait(_left(deadline))[0]
            except WorkerDiedError:
                raise
            except WorkerError as error:
                raise _failed(handle, error) from error
            except RoostError as error:
                raise RolloutError([self._unhealthy(handle, error.findings[0].message)]) from error
        waiting = list(handles)
        while waiting:
            asked = [(handle, handle.call_all("health")) for handle in waiting]
            reasons: dict[str, str] = {}
            for handle, result in asked:
                try:
                    reasons[handle.name] = "; ".join(reason for reason in result.wait(_left(deadline)) if reason)
                except CallTimeoutError as error:
                    reasons[handle.name] = error.findings[0].message
                except WorkerDiedError:
                    raise
                except WorkerError as error:
                    raise _failed(handle, error) from error
            waiting = [handle for handle in waiting if reasons[handle.name]]
            if waiting and time.monotonic() > deadline:
                raise RolloutError([self._unhealthy(handle, reasons[handle.name]) for handle in waiting])
            if waiting:
                time.sleep(0.1)

    def _unhealthy(self, handle: EngineHandle, reason: str) -> Finding:
        message = f"{handle.name} did not get healthy within {self._timeout_s:g} s: {reason}"
        fixes = (Fix("give it longer", "RolloutManager(…, start_timeout_s=900)"),)
        return Finding("E202", message, context=_logs(handle), fixes=fixes)


def _failed(handle: EngineHandle, error: WorkerError) -> RolloutError:
    """Return the error of an engine that failed to start; with a traceback unless the engine raised a RolloutError."""
    if isinstance(error.__cause__, RolloutError):
        found = error.__cause__.findings
        return RolloutError(replace(one, message=f"{handle.name} did not start: {one.message}") for one in found)
    trace = tuple(error.remote_traceback.splitlines()[-LOG_LINES:])
    message = f"{handle.name} did not start: {error.findings[0].message}"
    return RolloutError([Finding("E202", message, context=_logs(handle) + trace)])


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


def _logs(handle: EngineHandle) -> tuple[str, ...]:
    """Return the last log lines of an engine; none if it does not answer within 5 s."""
    try:
        return tuple(handle.call(0, "logs")[0].wait(5)[0].splitlines()[-LOG_LINES:])
    except RoostError as error:  # the lines would only add to another error
        logger.info("the log of %s cannot be read: %s", handle.name, error.findings[0].message)
        return ()


def _places(handle: EngineHandle, ports: Sequence[MemberPorts]) -> list[EnginePlace]:
    """Return the place of each member; their rendezvous is on the node of member 0."""
    host = ports[0].host
    meeting = f"[{host}]:{ports[0].first_port}" if ":" in host else f"{host}:{ports[0].first_port}"
    return [
        EnginePlace(
            name=handle.component.name,
            engine=int(handle.name.rpartition("/")[2]),
            member=member,
            num_members=handle.num_members,
            host=leased.host,
            server_port=leased.server_port,
            nccl_port=leased.nccl_port,
            dist_init_addr=meeting,
            ports=range(leased.first_port, leased.first_port + leased.num_ports),
            accelerators=tuple(handle.component.placements[handle.ranks[member]].visible_accelerators),
            gpu_share=1.0 if handle.component.gpu_share is None else handle.component.gpu_share,
            transport=handle.transport(member).value,
            key=handle.key,
        )
        for member, leased in enumerate(ports)
    ]


def _subset_of(component: ComponentPlan, ranks: Sequence[int], name: str) -> ComponentPlan:
    """Return a component with only some ranks of another, renumbered from 0."""
    placements = tuple(
        replace(component.placements[rank], rank=index, placement_node_rank=index, local_rank=0, local_world_size=1)
        for index, rank in enumerate(ranks)
    )
    transports = tuple(component.transports[rank] for rank in ranks) if component.transports else ()
    return replace(component, name=name, placements=placements, transports=transports)

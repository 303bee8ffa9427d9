"""The managers of a job: nodes, workers, collective groups and reservations, and clients for them.

All managers share one actor on node 0: each extra process would add about a second to the start of a job.
"""

from __future__ import annotations

import getpass
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.cluster.guards import guard_actor
from roost.cluster.manager_calls import ask_managers, note_node
from roost.cluster.nodes import NodeInfo
from roost.cluster.ports import lease_ports
from roost.cluster.ray_private import dead_drivers
from roost.cluster.ray_typed import actor_class
from roost.cluster.reserve import Ledger, asking_ray
from roost.errors import ClusterError, Finding, Fix, RoostError
from roost.topology import NodeGroup, Topology

__all__ = [
    "MANAGERS",
    "CollectiveManager",
    "NodeManager",
    "WorkerManager",
    "find_managers",
    "join_namespace",
    "start_managers",
    "wait_until_gone",
]

logger = logging.getLogger("roost")

MANAGERS = "roost.managers"
"""Name of the managers' actor in the namespace of the job."""
FORGET_EVERY_S = 5.0
"""Seconds between two searches for ended drivers while a job is watched."""
HOLDER_S = 5.0
"""Seconds to wait for the owner of a job that has the wanted namespace."""
NAMESPACE_VARIABLE = "ROOST_NAMESPACE"

_P = TypeVar("_P", bound="_Proxy")


class _Managers:
    """The actor of the managers: nodes, worker groups, collective groups and reservations of a job."""

    def __init__(self, nodes: Sequence[NodeInfo], topology: Topology, owner: Mapping[str, Any]) -> None:
        self._warden = guard_actor()
        self._nodes = list(nodes)
        self._topology = topology
        self._owner = dict(owner)
        self._master_port = lease_ports()
        self._groups: dict[str, Any] = {}
        self._changes = 1
        self._forgot_at = 0.0
        self._plans: dict[str, bytes] = {}  # packed, by group; not in the records, which are fetched often
        self._collectives: dict[str, Any] = {}
        self._ledger = Ledger(nodes, ray.get_runtime_context().get_actor_id() or "")
        self._reservations: dict[int, str] = {}  # token → Ray's id of the job that asked

    def owner(self) -> dict[str, Any]:
        self._warden.poll()  # the child that made the warden independent has ended, and is a zombie until polled
        return self._owner

    # Nodes ---------------------------------------------------------------------------------

    def get_nodes(self) -> list[NodeInfo]:
        return self._nodes

    def get_topology(self) -> Topology:
        return self._topology

    def get_master_ip(self) -> str:
        return self._nodes[0].address

    def get_master_port(self) -> int:
        return self._master_port.port

    # Workers -------------------------------------------------------------------------------

    def register_group(self, name: str, record: Any) -> str | None:
        """Register a group; if its name is taken, return who has it instead."""
        self._forget_the_dead()
        if name in self._groups:
            holder = self._groups[name]
            return f"{holder['driver']}, since {holder['since']}"
        self._groups[name] = record
        self._changes += 1
        return None

    def update_group(self, name: str, record: Any) -> None:
        if name in self._groups:
            self._groups[name] = record
            self._changes += 1

    def keep_plan(self, name: str, plan: bytes) -> None:
        """Keep the packed plan of a group until the group is removed."""
        if name in self._groups:
            self._plans[name] = plan

    def get_plans(self) -> dict[str, bytes]:
        self._forget_the_dead()
        return dict(self._plans)

    def remove_group(self, name: str) -> None:
        self._groups.pop(name, None)
        self._plans.pop(name, None)
        self._changes += 1
        self._collectives.pop(name, None)

    def get_group(self, name: str) -> Any:
        self._forget_the_dead()
        return self._groups.get(name)

    def get_groups(self) -> dict[str, Any]:
        self._forget_the_dead()
        return dict(self._groups)

    def get_groups_since(self, change: int) -> tuple[int, dict[str, Any] | None]:
        """Return the number of the last change of groups, and the groups; ``None`` if ``change`` is that number.

        Watching calls this every second, so it looks for ended drivers only every :data:`FORGET_EVERY_S`.
        """
        if time.monotonic() - self._forgot_at >= FORGET_EVERY_S:
            self._forget_the_dead()
        return self._changes, None if change == self._changes else dict(self._groups)

    def _forget_the_dead(self) -> None:
        """Remove the groups of drivers that attached to this job and have ended: Ray has ended their workers."""
        self._forgot_at = time.monotonic()
        dead = _dead_jobs()
        for name, record in list(self._groups.items()):
            if record["job_id"] in dead:
                self.remove_group(name)

    # Collective groups ---------------------------------------------------------------------

    def register_collective(self, name: str, record: Mapping[str, Any]) -> None:
        self._collectives[name] = dict(record)

    def remove_collective(self, name: str) -> None:
        self._collectives.pop(name, None)

    def get_collective(self, name: str) -> Any:
        return self._collectives.get(name)

    def get_collectives(self) -> dict[str, Any]:
        return dict(self._collectives)

    # Reservations: a concurrency group of their own, since waiting for accelerators blocks ----

    @ray.method(concurrency_group="ledger")
    def reserve(self, accelerators: Any, cpus: Any, timeout_s: float, job_id: str) -> int | RoostError:
        dead = _dead_jobs()
        for token in [token for token, owner in self._reservations.items() if owner in dead]:
            self._ledger.release(token)
            del self._reservations[token]
        try:
            token = self._ledger.reserve(accelerators, cpus, timeout_s)
            self._reservations[token] = job_id
            return token
        except RoostError as error:  # returned as a value, since Ray would wrap an exception
            return error

    @ray.method(concurrency_group="ledger")
    def release(self, token: int) -> None:
        self._reservations.pop(token, None)
        self._ledger.release(token)

    @ray.method(concurrency_group="ledger")
    def held(self) -> dict[tuple[int, int], int]:
        return self._ledger.held()


def _dead_jobs() -> set[str]:
    """Return Ray's ids of the drivers that have ended."""
    with asking_ray:
        return dead_drivers()


def start_managers(
    nodes: Sequence[NodeInfo], topology: Topology, namespace: str, timeout_s: float
) -> ray.actor.ActorHandle[Any]:
    """Start the managers on node 0, and wait until they answer.

    Raises:
        ClusterError: Another job has the namespace (R103), or the managers died (R150) or do not answer in time (R107).
    """
    owner = {
        "user": getpass.getuser(),
        "host": platform.node(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "namespace": namespace,
    }
    actor = actor_class(_Managers, num_cpus=0, concurrency_groups={"ledger": 1}, max_restarts=0)
    strategy = NodeAffinitySchedulingStrategy(nodes[0].ray_id, soft=False)
    try:
        handle: ray.actor.ActorHandle[Any] = actor.options(
            name=MANAGERS, namespace=namespace, scheduling_strategy=strategy
        ).remote(list(nodes), topology, owner)
        note_node(handle, nodes[0].address)
    except ValueError:
        raise ClusterError([_taken(namespace)]) from None
    try:
        ask_managers(handle, "owner", timeout_s=timeout_s)
    except ClusterError:
        ray.kill(handle)
        raise
    return handle


def _taken(namespace: str) -> Finding:
    holder = "another job"
    handle = find_managers(namespace)
    if handle is not None:
        try:
            owner = ray.get(handle.owner.remote(), timeout=HOLDER_S)
            holder = f"{owner['user']} on {owner['host']} (process {owner['pid']}) since {owner['since']}"
        except ray.exceptions.RayError as error:
            logger.debug("the job in the namespace %r does not say whose it is: %s", namespace, error)
    return Finding(
        "R103",
        f"the namespace {namespace!r} on this Ray is held by {holder}",
        rule="a namespace belongs to one job at a time",
        fixes=(
            Fix("choose another one for this job", 'Cluster(…, namespace="mine")  or  ROOST_NAMESPACE=mine'),
            Fix("or attach to the running job", "Cluster()"),
        ),
    )


_joined = ""


def join_namespace(namespace: str) -> None:
    """Remember the namespace of this process's job, for :meth:`_Proxy.get_proxy`; empty: it has no job."""
    global _joined
    _joined = namespace


def find_managers(namespace: str) -> ray.actor.ActorHandle[Any] | None:
    """Return the managers of the job in a namespace; ``None`` if no job runs there."""
    try:
        return ray.get_actor(MANAGERS, namespace=namespace)
    except ValueError:
        return None


def wait_until_gone(namespace: str, timeout_s: float = 10.0) -> None:
    """Wait until the name of the managers is free again, so that a next job can start at once."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        names = {(entry["namespace"], entry["name"]) for entry in ray.util.list_named_actors(all_namespaces=True)}
        if (namespace, MANAGERS) not in names:
            return
        time.sleep(0.02)


class _Proxy:
    """Client of the managers' actor."""

    def __init__(self, handle: ray.actor.ActorHandle[Any]) -> None:
        self._handle = handle

    @classmethod
    def get_proxy(cls: type[_P], namespace: str | None = None) -> _P:
        """Return the manager of the running job; works in every process of the job.

        Args:
            namespace: Namespace of the job; default: the job of this process.

        Raises:
            ClusterError: No job runs there (R102).
        """
        chosen = namespace or _joined or os.environ.get(NAMESPACE_VARIABLE) or "roost"
        handle = find_managers(chosen) if ray.is_initialized() else None
        if handle is None:
            message = f"no Roost job runs in the namespace {chosen!r}, or its managers have died"
            raise ClusterError([Finding("R102", message, fixes=(Fix("start one", "Cluster(num_nodes=…)"),))])
        return cls(handle)

    def _call(self, method: str, *arguments: Any) -> Any:
        return ask_managers(self._handle, method, *arguments)


class NodeManager(_Proxy):
    """Nodes and node groups of a job, and the address and port of its master."""

    def get_nodes(self) -> list[NodeInfo]:
        """Return all nodes, in cluster order."""
        nodes: list[NodeInfo] = self._call("get_nodes")
        return nodes

    def get_topology(self) -> Topology:
        """Return the nodes as a topology."""
        topology: Topology = self._call("get_topology")
        return topology

    def get_node_group(self, label: str | None) -> NodeGroup:
        """Return the node group with a label; ``None`` stands for all nodes."""
        return self.get_topology().group(label)

    def get_master_ip(self) -> str:
        """Return the address of node 0."""
        return str(self._call("get_master_ip"))

    def get_master_port(self) -> int:
        """Return a port on node 0 that is leased for the job."""
        return int(self._call("get_master_port"))

    def get_num_gpus_per_node(self) -> int:
        """Return the number of accelerators of node 0; nodes may differ, see :meth:`get_nodes`."""
        return self.get_nodes()[0].num_accelerators


class WorkerManager(_Proxy):
    """The worker groups of a job and their workers."""

    def get_groups(self) -> dict[str, Any]:
        """Return the record of each group, by name."""
        groups: dict[str, Any] = self._call("get_groups")
        return groups

    def get_group(self, name: str) -> Any:
        """Return the record of a group; ``None`` if there is no such group."""
        return self._call("get_group", name)

    def get_worker(self, name: str, rank: int) -> dict[str, Any] | None:
        """Return node, address, process id and accelerators of a worker; ``None`` if there is no such worker."""
        record = self.get_group(name)
        workers = record["workers"] if record else []
        return workers[rank] if 0 <= rank < len(workers) else None


class CollectiveManager(_Proxy):
    """Collective groups of a job: process groups that meet at an address and port."""

    def register(self, name: str, address: str, port: int, world_size: int) -> None:
        """Register a collective group."""
        record = {"address": address, "port": port, "world_size": world_size}
        self._call("register_collective", name, record)

    def remove(self, name: str) -> None:
        """Remove a collective group."""
        self._call("remove_collective", name)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return ``address``, ``port`` and ``world_size`` of a group; ``None`` if there is no such group."""
        found: dict[str, Any] | None = self._call("get_collective", name)
        return found

    def get_all(self) -> dict[str, Any]:
        """Return all collective groups, by name."""
        found: dict[str, Any] = self._call("get_collectives")
        return found

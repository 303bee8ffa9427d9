"""``Cluster``: the nodes of a job, on Ray."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.cluster.bundles import Bundles, reserve_bundles
from roost.cluster.connect import alive_nodes, connect, forget_job, remember_job, wait_for_nodes
from roost.cluster.losses import HeadWatch, LostNode, find_lost
from roost.cluster.manager_calls import answer_of, ask_managers, note_node
from roost.cluster.managers import (
    MANAGERS,
    NAMESPACE_VARIABLE,
    find_managers,
    join_namespace,
    start_managers,
    wait_until_gone,
)
from roost.cluster.nodes import NodeInfo, measure_nodes, order_nodes
from roost.cluster.ray_private import connected_worker_id, id_of_actor
from roost.cluster.request import NAMESPACE, Request, seconds_from
from roost.cluster.reserve import remove_holds
from roost.errors import ClusterError, Finding, Fix, RoostError
from roost.topology import CLUSTER, NodeGroup, Topology

__all__ = ["Cluster"]

logger = logging.getLogger("roost")

NODE_TIMEOUT_S = 300.0
RESERVE_TIMEOUT_S = 60.0
RESERVE_SLACK_S = 240.0
"""Seconds that a reservation may take beyond its timeout: its last attempt is not interrupted."""


class RunningGroup(Protocol):
    """What a cluster needs of a worker group."""

    name: str

    def close(self) -> None:
        """End the workers."""


class Cluster:
    """The nodes of a job: found, measured and put in order.

    ``Cluster(num_nodes=2)`` waits for two nodes; ``num_nodes=0`` uses all nodes that Ray has now;
    ``Cluster(cluster_cfg=cfg.cluster)`` reads the number, the node groups and the order from a job file. These three
    join a Ray (``address``, ``RAY_ADDRESS``), or start one on this machine, and found a job on it.
    ``Cluster()`` attaches to the running job from any process; closing it does not end the job.

    A process has at most one cluster: a second call with equal arguments returns the same object. A cluster is a
    context manager; :meth:`close` is idempotent.

    Args:
        num_nodes: Number of nodes of the job; 0 for all.
        cluster_cfg: The ``cluster`` section of a job.
        address: Address of the Ray to join.
        namespace: Name of the job on that Ray; default ``ROOST_NAMESPACE``, else :attr:`NAMESPACE`.
        timeout_s: Seconds to wait for nodes; default ``ROOST_NODE_TIMEOUT_S``, else 300.
        node_order: Order of the nodes after the head: ``address`` (default), ``name`` or ``label:KEY``.

    Raises:
        ClusterError: Ray or nodes are missing, or this process has another cluster; it says what was found.
    """

    NAMESPACE: ClassVar[str] = NAMESPACE
    _live: ClassVar[Cluster | None] = None
    _nodes: list[NodeInfo]
    _topology: Topology
    _master_port: int
    managers: ray.actor.ActorHandle[Any]

    def __new__(  # noqa: D102
        cls,
        num_nodes: int | None = None,
        cluster_cfg: Any = None,
        *,
        address: str | None = None,
        namespace: str | None = None,
        timeout_s: float | None = None,
        node_order: str | None = None,
    ) -> Cluster:
        request = Request.of(num_nodes, cluster_cfg, address, namespace, node_order)
        live = Cluster._live
        if live is not None and not live._is_connected():  # Ray was shut down, and the job with it
            live.close()
            live = None
        if live is not None:
            is_named_otherwise = namespace is not None and namespace != live.namespace
            if request == live._request or (request.is_attach and not is_named_otherwise):
                return live
            message = f"this process has a cluster already ({live._request}), and asks for another one ({request})"
            fix = Fix("close the first one before", "cluster.close()")
            raise ClusterError([Finding("R111", message, rule="one cluster per process", fixes=(fix,))])
        cluster = super().__new__(cls)
        cluster._open(request, cluster_cfg, timeout_s)
        Cluster._live = cluster
        join_namespace(cluster._namespace)
        return cluster

    def _open(self, request: Request, cluster_cfg: Any, timeout_s: float | None) -> None:
        self._request = request
        self._namespace = request.namespace
        self._groups: list[RunningGroup] = []
        self._bundles: list[Bundles] = []
        self._allocated: list[str] = []
        self._closers: list[Callable[[], None]] = []
        self._is_closed = False
        limit = timeout_s if timeout_s is not None else seconds_from("ROOST_NODE_TIMEOUT_S", NODE_TIMEOUT_S)
        self._owns_ray = connect(request.address, request.namespace, request.is_attach)
        self._connection = ray.get_runtime_context().get_worker_id()
        try:
            if request.is_attach:
                self._attach()
            else:
                self._found(request, cluster_cfg, limit)
            head = next(
                (f"node {node.rank} ({node.address})" for node in self._nodes if node.is_head),
                "which this job does not use",
            )
            gcs_address = ray.get_runtime_context().gcs_address
            self._head = HeadWatch(gcs_address, head, self._is_connected)
        except BaseException:
            if self._owns_ray:
                ray.shutdown()
            raise

    def _attach(self) -> None:
        handle = find_managers(self._namespace)
        if handle is None:
            message = f"no Roost job runs in the namespace {self._namespace!r}"
            fixes = (Fix("start one", "Cluster(num_nodes=1)"), Fix("or name the namespace", "ROOST_NAMESPACE=…"))
            raise ClusterError([Finding("R102", message, fixes=fixes)])
        self.managers = handle
        methods = ("get_nodes", "get_topology", "get_master_port")
        self._nodes, self._topology, self._master_port = (ask_managers(handle, method) for method in methods)
        note_node(handle, self._nodes[0].address)

    def _found(self, request: Request, cluster_cfg: Any, timeout_s: float) -> None:
        """Find the nodes, measure them, and start the managers."""
        started = time.monotonic()
        there = wait_for_nodes(request.num_nodes, timeout_s) if request.num_nodes else alive_nodes()
        left = max(10.0, timeout_s - (time.monotonic() - started))
        nodes = order_nodes(measure_nodes(there, left), request.node_order)
        if request.num_nodes:
            nodes = nodes[: request.num_nodes]
        topology = Topology(tuple(node.as_node() for node in nodes))
        if cluster_cfg is not None:
            topology = topology.with_groups(cluster_cfg)
        self._nodes = nodes
        self._topology = topology
        self.managers = start_managers(nodes, topology, self._namespace, left)
        self._master_port = ask_managers(self.managers, "get_master_port")
        remember_job(self._namespace, ray.get_runtime_context().gcs_address)

    # Nodes ---------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The topology of the nodes; plans are made on it."""
        return self._topology

    @property
    def namespace(self) -> str:
        """The name of the job on its Ray."""
        return self._namespace

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self._nodes)

    @property
    def num_accelerators(self) -> int:
        """Number of accelerators on all nodes together."""
        return self._topology.num_accelerators

    @property
    def master_ip(self) -> str:
        """Address of node 0."""
        return self._nodes[0].address

    @property
    def master_port(self) -> int:
        """A port on node 0 that is leased for the job."""
        return self._master_port

    @property
    def is_attached(self) -> bool:
        """Whether another process owns the job."""
        return self._request.is_attach

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """Return the measured facts of a node.

        Raises:
            ClusterError: There is no such node (R112).
        """
        self._check_node(node_rank)
        return self._nodes[node_rank]

    def get_node_ip(self, node_rank: int) -> str:
        """Return the address of a node."""
        return self.get_node_info(node_rank).address

    def lost_nodes(self, node_ranks: Iterable[int] | None = None) -> list[LostNode]:
        """Return which nodes are lost, of all nodes or of some. Blocks for up to 2 s if a node is lost."""
        chosen = self._nodes if node_ranks is None else [self._nodes[rank] for rank in sorted(set(node_ranks))]
        return find_lost(chosen) if self.is_open and self._head.answers() else []

    def get_node_group(self, label: str | None = CLUSTER) -> NodeGroup:
        """Return the node group with a label; ``None`` stands for all nodes."""
        return self._topology.group(label)

    # Reservations and groups ---------------------------------------------------------------

    def reserve(
        self,
        accelerators: Mapping[int, Sequence[int]],
        cpus: Mapping[int, float] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Reserve accelerators and CPUs, so that no other Ray job gets them.

        Args:
            accelerators: Local ranks of the accelerators, by node rank.
            cpus: Number of CPUs, by node rank.
            timeout_s: Seconds to wait for other jobs; default ``ROOST_RESERVE_TIMEOUT_S``, else 60.

        Returns:
            A token for :meth:`release`.

        Raises:
            ReservationError: They are not available in time; it names every shortage (R201-R206).
            ClusterError: There is no such node or accelerator (R112).
        """
        self.check_open()
        limit = timeout_s if timeout_s is not None else seconds_from("ROOST_RESERVE_TIMEOUT_S", RESERVE_TIMEOUT_S)
        for rank in (*accelerators, *(cpus or ())):
            self._check_node(rank)
            for local in accelerators.get(rank, ()):
                self._check_accelerator(rank, local)
        job_id = ray.get_runtime_context().get_job_id()
        asked = self.managers.reserve.remote(dict(accelerators), dict(cpus or {}), limit, job_id)
        try:
            found = answer_of(self.managers, "reserve", asked, limit + RESERVE_SLACK_S)
        except (KeyboardInterrupt, ClusterError):
            self.managers.release.remote(asked)  # Ray runs it once the reservation has its token
            raise
        if isinstance(found, RoostError):
            raise found
        return int(found)

    def release(self, token: int) -> None:
        """Release a reservation; :meth:`close` releases all. Without a connection to Ray there is nothing to release."""
        if not self.is_open:
            return
        try:
            ask_managers(self.managers, "release", token)
        except ClusterError as error:  # a reservation ends with the managers of its job at the latest
            logger.warning("the reservation %d could not be released: %s", token, error.findings[0].message)

    def reserve_bundles(self, count: int, cpus: float = 1.0, timeout_s: float | None = None) -> Bundles:
        """Reserve accelerators as a placement group with one accelerator per bundle, in cluster order.

        For code that uses Ray's placement groups directly. The launch of a worker group makes its own reservation.

        Args:
            count: Number of accelerators.
            cpus: CPUs in each bundle.
            timeout_s: Seconds to wait for other jobs; default ``ROOST_RESERVE_TIMEOUT_S``, else 60.

        Raises:
            ReservationError: There are not enough (R205); it has the free and registered accelerators of each node.
        """
        self.check_open()
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ClusterError([Finding("R113", f"the number of bundles must be at least 1, not {count!r}")])
        limit = timeout_s if timeout_s is not None else seconds_from("ROOST_RESERVE_TIMEOUT_S", RESERVE_TIMEOUT_S)
        bundles = reserve_bundles(self._nodes, count, cpus, limit)
        self._bundles.append(bundles)
        return bundles

    def add_group(self, group: RunningGroup) -> None:
        """Have :meth:`close` close a worker group that this process has launched; called by its launch."""
        self._groups.append(group)

    def remove_group(self, group: RunningGroup) -> None:
        """Take back :meth:`add_group`; called by the group's own ``close``."""
        with contextlib.suppress(ValueError):
            self._groups.remove(group)

    def get_group(self, name: str) -> Any:
        """Return the worker group of a name that this process launched; ``None`` if there is none."""
        return next((group for group in self._groups if group.name == name), None)

    def allocate(
        self,
        cls: type,
        worker_name: str,
        node_id: int,
        gpu_id: int,
        env_vars: Mapping[str, str],
        cls_args: Sequence[Any] = (),
        cls_kwargs: Mapping[str, Any] | None = None,
    ) -> ray.actor.ActorHandle[Any]:
        """Start one actor on a node, with its own environment; return its handle at once.

        The actor reserves nothing and is not isolated: ``env_vars`` decide which accelerators it sees. It ends with
        this cluster.

        Args:
            cls: The class, without ``ray.remote``.
            worker_name: Name of the actor, unique in the job.
            node_id: Rank of the node.
            gpu_id: Local rank of the accelerator that the actor is meant for.
            env_vars: Environment variables of its process.
            cls_args: Positional arguments of its constructor.
            cls_kwargs: Keyword arguments of its constructor.

        Raises:
            ClusterError: There is no such node or accelerator (R112).
        """
        self.check_open()
        node = self.get_node_info(node_id)
        if node.accelerators or gpu_id != 0:
            self._check_accelerator(node_id, gpu_id)
        noset = dict.fromkeys(node.accelerator_type.noset_variables, "1")
        variables = {**noset, NAMESPACE_VARIABLE: self._namespace}
        actor: Any = ray.remote(cls).options(
            name=worker_name,
            namespace=self._namespace,
            num_cpus=0,
            runtime_env={"env_vars": {**variables, **{key: str(value) for key, value in env_vars.items()}}},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.ray_id, soft=False),
        )
        handle: ray.actor.ActorHandle[Any] = actor.remote(*cls_args, **(cls_kwargs or {}))
        self._allocated.append(worker_name)
        return handle

    @property
    def is_open(self) -> bool:
        """Whether this cluster was not closed, its connection to Ray has not ended, and Ray's head is not lost."""
        return not self._is_closed and self._is_connected() and not self._head.is_lost

    def check_open(self) -> None:
        """Raise an error if this cluster cannot be used any more.

        Call it before each use of Ray: in a process without a connection, Ray would connect to any Ray on the machine.

        Raises:
            ClusterError: The cluster was closed, or its connection to Ray has ended (R115); or Ray's head is lost
                (R116).
        """
        self._head.check()
        if not self.is_open:
            message = "the cluster was closed" if self._is_closed else "the connection of the cluster to Ray has ended"
            raise ClusterError([Finding("R115", message, fixes=(Fix("make a new one", "Cluster(num_nodes=…)"),))])

    def on_close(self, action: Callable[[], None]) -> Callable[[], None]:
        """Register a function that :meth:`close` calls first, in reverse order, also if Ray was shut down by then.

        Returns:
            A function that removes the registration.
        """
        self._closers.append(action)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._closers.remove(action)

        return forget

    def close(self) -> None:
        """Close all groups and threads of this process, and the job if this process owns it. Safe to call twice.

        Roost makes no calls of Ray in this process afterwards.
        """
        if Cluster._live is not self:
            return
        Cluster._live = None
        join_namespace("")
        self._head.close()
        is_there = self._head.answers() or self._head.give_up()
        try:
            for action in reversed(self._closers):
                try:
                    action()
                except (RoostError, ray.exceptions.RayError) as error:  # the rest is closed in any case
                    logger.warning("a step of closing the cluster failed: %s", error)
            if is_there and self._is_connected():  # else Ray ends, or has ended, all processes of the job
                self._end_job()
        finally:
            self._is_closed = True
            if self._owns_ray and self._is_connected():
                ray.shutdown()

    def _end_job(self) -> None:
        for group in list(self._groups):
            group.close()
        for bundles in self._bundles:
            bundles.release()
        for name in self._allocated:
            self._kill(name)
        if not self.is_attached:
            self._kill(MANAGERS)
            wait_until_gone(self._namespace)
            remove_holds(id_of_actor(self.managers))
            forget_job(self._namespace)

    def _kill(self, actor: str) -> None:
        """Kill an actor of the job; one that has ended is passed over."""
        try:
            ray.kill(ray.get_actor(actor, namespace=self._namespace))
        except (ray.exceptions.RayError, ValueError) as error:
            logger.debug("the actor %s was not killed: %s", actor, error)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Cluster({self._topology.describe()}, namespace={self._namespace!r})"

    def _is_connected(self) -> bool:
        return bool(self._connection) and connected_worker_id() == self._connection

    def _check_accelerator(self, node_rank: int, local_rank: int) -> None:
        node = self._nodes[node_rank]
        if not isinstance(local_rank, int) or not 0 <= local_rank < node.num_accelerators:
            message = f"node {node_rank} has {node.num_accelerators} {node.accelerator_type.noun}s, and no {local_rank}"
            raise ClusterError([Finding("R112", message)])

    def _check_node(self, node_rank: int) -> None:
        if not isinstance(node_rank, int) or not 0 <= node_rank < len(self._nodes):
            message = f"there is no node {node_rank}: nodes are 0-{len(self._nodes) - 1}"
            raise ClusterError([Finding("R112", message)])

"""A Ray of several nodes on one computer, with made-up accelerators and addresses of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from roost.errors import ClusterError, Finding
from roost.topology import Node, Topology

__all__ = ["LocalRay", "local_ray"]

OBJECT_STORE_BYTES = 80 * 2**20
"""Size of the object store of each node; Ray refuses less than 75 MiB."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # torch looks up the names of addresses; these have none, and the lookup should fail fast.
    "RES_OPTIONS": "timeout:1 attempts:1",
    # Ray then notices a killed node within seconds; with its defaults it takes about 15 s.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}


class LocalRay:
    """A running many-node Ray; made by :func:`local_ray`.

    Attributes:
        address: Address for drivers; also in ``RAY_ADDRESS`` while this Ray runs.
        topology: The nodes that it simulates.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        cpus: int = 2,
        shuffle: int | None = None,
        env_vars: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self.topology = topology
        self.address = ""
        self._cpus = cpus
        self._shuffle = shuffle
        self._env_vars = dict(env_vars or {})
        self._nodes: dict[int, Any] = {}
        self._next_address = 2
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> LocalRay:
        try:
            self._start()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _start(self) -> None:
        # Unix socket names are limited to about 100 characters: keep the folder's short.
        folder = tempfile.mkdtemp(prefix="roost-", dir="/tmp")
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        os.makedirs(f"{folder}/ray")
        self._undo.callback(_read_authentication)  # runs after the variables are restored
        self._undo.enter_context(_environment({**_ENVIRONMENT, **_authentication(), "RAY_TMPDIR": folder}))
        _read_authentication()
        from ray.cluster_utils import Cluster as RayCluster

        from roost.cluster.guards import guard_embedded_ray

        self._cluster = RayCluster(initialize_head=False, shutdown_at_exit=True)
        self._undo.callback(self._cluster.shutdown)
        self._undo.callback(_disconnect)
        order = list(range(1, self.topology.num_nodes))
        if self._shuffle is not None:
            random.Random(self._shuffle).shuffle(order)  # noqa: S311
        guard_embedded_ray(folder, removes_folder=True)
        for rank in [0, *order]:
            self._add(rank, self.topology.nodes[rank])
        self.address = self._cluster.address
        self._undo.enter_context(_environment({"RAY_ADDRESS": self.address}))

    def _add(self, rank: int, node: Node) -> None:
        """Start a raylet. Ray loses track of nodes that start at the same time, so they start one after another."""
        from roost.cluster.accelerators import MADE_UP_VARIABLE
        from roost.cluster.signals import keep_signal_handlers

        count, resource = node.num_accelerators, node.accelerator_type.ray_resource
        arguments: dict[str, Any] = {"num_gpus": count} if resource == "GPU" else {"resources": {resource: count}}
        with keep_signal_handlers(starts_processes=True):
            self._nodes[rank] = self._cluster.add_node(
                node_ip_address=f"127.0.0.{2 + rank}",
                num_cpus=int(node.cpus) if node.cpus else self._cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                env_vars={MADE_UP_VARIABLE: node.accelerator_type.name, **self._env_vars.get(rank, {})},
                **arguments,
            )
        # Older Rays connect a driver to the node that was started last; it should be on the head.
        noted = os.path.join(self._nodes[0].get_session_dir_path(), "node_ip_address.json")
        with contextlib.suppress(OSError), open(noted, "r+", encoding="utf-8") as file:
            file.truncate()
            json.dump({"node_ip_address": self.node_address(0)}, file)

    def node_address(self, rank: int) -> str:
        """Return the address of a node."""
        return f"127.0.0.{2 + rank}"

    def kill_node(self, rank: int) -> None:
        """Kill a node without warning, as a power cut would.

        Raises:
            ClusterError: There is no such node, or it is the head (R110).
        """
        if rank not in self._nodes or rank == 0:
            raise ClusterError([Finding("R110", f"there is no node {rank} to kill here, or it is the head")])
        self._cluster.remove_node(self._nodes.pop(rank), allow_graceful=False)

    def add_node(self, accelerators: int | None = None, cpus: float | None = None) -> int:
        """Add a node and return its rank.

        Args:
            accelerators: Number of its accelerators; default as on the last node.
            cpus: Number of its CPUs; default as on the last node.
        """
        like = self.topology.nodes[-1]
        rank = self.topology.num_nodes
        count = like.num_accelerators if accelerators is None else accelerators
        node = Node(
            rank,
            cpus=cpus if cpus is not None else like.cpus,
            accelerator_ids=tuple(str(i) for i in range(count)),
            accelerator_type=like.accelerator_type,
        )
        self.topology = Topology((*self.topology.nodes, node))
        self._add(rank, node)
        return rank


def local_ray(
    machines: str | Topology = "1x8",
    *,
    cpus: int = 2,
    shuffle: int | None = None,
    env_vars: Mapping[int, Mapping[str, str]] | None = None,
) -> LocalRay:
    """Return a Ray of several nodes on one computer, for tests and experiments; start it by ``with``::

        with local_ray("4x8") as ray_cluster:
            cluster = roost.Cluster(num_nodes=4)

    Every node has its own address (127.0.0.2, 127.0.0.3, …) and the made-up accelerators of the topology. At the end of
    the ``with`` block, or when this process is killed, all processes and files of this Ray are removed.

    Args:
        machines: A topology, or its short text such as ``4x8`` (nodes x accelerators).
        cpus: CPUs of nodes whose topology has no number. Ray starts a process for each, so keep it small.
        shuffle: Seed of a random order in which the nodes after the head join; default: in rank order.
        env_vars: Environment variables of single nodes, by rank, such as ``{1: {"ROOST_NODE_RANK": "1"}}``.
    """
    topology = Topology.parse(machines) if isinstance(machines, str) else machines
    return LocalRay(topology, cpus=cpus, shuffle=shuffle, env_vars=env_vars)


def _authentication() -> dict[str, str]:
    """Return the variable of Ray's authentication, unless the user has set it: on if there is a token, else off.

    Without the variable each process of Ray decides by itself. The decision changes when another Ray on this machine
    writes a token, and nodes with different decisions refuse each other.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    with contextlib.suppress(OSError):
        has_token = has_token or os.path.getsize(os.path.expanduser("~/.ray/auth_token")) > 0
    return {"RAY_AUTH_MODE": "token" if has_token else "disabled"}


def _read_authentication() -> None:
    """Have Ray in this process read its variables again; it read them when it was imported."""
    from roost.cluster.ray_private import read_config_again

    read_config_again()


def _disconnect() -> None:
    """Close the cluster of this process, if it has one, and its connection to Ray."""
    import ray

    from roost.cluster import Cluster

    try:
        if Cluster._live is not None:
            Cluster._live.close()
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the ``with`` block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

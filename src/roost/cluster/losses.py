"""Detection of lost nodes: single nodes of a cluster, and Ray's head."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from roost.cluster.nodes import NodeInfo
from roost.cluster.ray_typed import nodes_of_ray
from roost.cluster.reserve import asking_ray
from roost.errors import ClusterError, Finding, Fix, printable

__all__ = ["NEW_CLUSTER", "HeadWatch", "LostNode", "find_lost"]

logger = logging.getLogger("roost")

PROBE_S = 2.0
"""Seconds to wait for a connection to a node."""

NEW_CLUSTER = Fix(
    "close this cluster, and make one of the nodes that are left", "cluster.close(); Cluster(num_nodes=0)"
)


@dataclass(frozen=True)
class LostNode:
    """A node that is lost.

    Attributes:
        rank: Rank of the node in the cluster.
        address: Address of the node.
        reason: The evidence for its loss.
    """

    rank: int
    address: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.rank} ({self.address}) is gone: {self.reason}"


def find_lost(nodes: Sequence[NodeInfo]) -> list[LostNode]:
    """Return which of some nodes are lost.

    Ray marks a node dead up to 15 s after its loss, so this also tries to connect to each node's raylet, for at most
    :data:`PROBE_S`.
    """
    with asking_ray:
        known = {str(entry["NodeID"]): entry for entry in nodes_of_ray()}

    def look(node: NodeInfo) -> LostNode | None:
        entry = known.get(node.ray_id)
        if entry is None or not entry["Alive"]:
            return LostNode(node.rank, node.address, "Ray has marked it dead")
        fault = _fault(str(entry["NodeManagerAddress"]), int(entry["NodeManagerPort"]))
        return LostNode(node.rank, node.address, f"its raylet does not answer ({fault})") if fault else None

    with ThreadPoolExecutor(max(1, min(16, len(nodes)))) as pool:
        return [lost for lost in pool.map(look, nodes) if lost is not None]


class HeadWatch:
    """Watches Ray's head: a thread tries to connect to the GCS, and records since when that fails.

    Ray ends a driver without a GCS after a minute, at any point of its code. This watch reports the loss after half of
    that time, so that the driver can save something.

    Args:
        address: Address and port of the GCS.
        name: Name of the head in errors.
        is_wanted: Called before each try; the watch ends if it returns ``False``.
        ends_after_s: Seconds without a GCS after which Ray ends the driver; default: Ray's own environment variable,
            else 60.
        every_s: Seconds between two tries.
    """

    def __init__(
        self,
        address: str,
        name: str,
        is_wanted: Callable[[], bool],
        *,
        ends_after_s: float | None = None,
        every_s: float = 2.0,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._address = address
        self._name = name
        self._is_wanted = is_wanted
        self._ends_after_s = _reconnect_s() if ends_after_s is None else ends_after_s
        self._every_s = every_s
        self._answered_at = time.monotonic()
        self._fault = ""
        self._is_given_up = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="roost-head-watch", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether the GCS has not answered for half of the time after which Ray ends this process."""
        silent_s = time.monotonic() - self._answered_at
        return self._is_given_up or (bool(self._fault) and silent_s >= self._ends_after_s / 2)

    def check(self) -> None:
        """Raise an error if the head is lost.

        Raises:
            ClusterError: The head is lost (R116).
        """
        if self.is_lost:
            raise ClusterError([self._finding()])

    def answers(self) -> bool:
        """Return whether the GCS accepts a connection now. Blocks for at most :data:`PROBE_S`."""
        return not _fault(*self._target)

    def give_up(self) -> bool:
        """Treat the head as lost from now on, so that closing does not wait for it. Returns ``False``."""
        self._is_given_up = True
        return False

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()  # each try has a limit of PROBE_S

    def _watch(self) -> None:
        is_logged = False
        while not self._closed.wait(self._every_s) and self._is_wanted():
            self._fault = _fault(*self._target)
            if not self._fault:
                self._answered_at = time.monotonic()
                is_logged = False
            elif self.is_lost and not is_logged:
                is_logged = True
                finding = self._finding()
                logger.critical("%s; %s", printable(finding.message), printable(finding.rule))

    def _finding(self) -> Finding:
        silent_s = time.monotonic() - self._answered_at
        message = (
            f"Ray's head, {self._name}, is gone: its GCS at {self._address} has not answered for {silent_s:.0f} s "
            f"({self._fault or 'connection failed'})"
        )
        rule = f"Ray ends a driver {self._ends_after_s:g} s after the loss of its GCS"
        fixes = (Fix("save what only this process has, and start the job again on a new Ray"),)
        return Finding("R116", message, rule=rule, fixes=fixes)


def _reconnect_s() -> float:
    try:
        return float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", ""))  # noqa: SIM112
    except ValueError:
        return 60.0


def _fault(host: str, port: int) -> str:
    """Return why a connection to a port fails; empty if it succeeds."""
    try:
        socket.create_connection((host, port), PROBE_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""

"""``Worker``: the base class of users' workers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roost.cluster.managers import CollectiveManager, NodeManager, WorkerManager
from roost.cluster.ports import PortLease, lease_ports
from roost.hardware import AcceleratorType
from roost.worker.context import current_context

if TYPE_CHECKING:
    from roost.worker.launch import GroupRequest

__all__ = ["Worker"]

_leases: list[PortLease] = []


class Worker:
    """A process of a worker group. Derive from it, and launch a group::

        class Trainer(Worker):
            def hello(self):
                return self.rank

        group = Trainer.create_group().launch(cluster)
        group.hello().wait()

    All properties are available in the constructor of a subclass.
    """

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> GroupRequest:
        """Return a group of such workers that can be launched; the arguments are those of the constructor."""
        from roost.worker.launch import GroupRequest

        return GroupRequest(cls, args, kwargs)

    # Identity ------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this worker in the group."""
        return current_context().placement.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return current_context().world_size

    @property
    def local_rank(self) -> int:
        """Index of this worker among the group's workers on its node."""
        return current_context().placement.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of the group's workers on this node."""
        return current_context().placement.local_world_size

    @property
    def node_rank(self) -> int:
        """Index of this worker's node among the nodes that the group uses."""
        return current_context().placement.placement_node_rank

    @property
    def cluster_node_rank(self) -> int:
        """Rank of this worker's node in the cluster."""
        return current_context().placement.cluster_node_rank

    @property
    def local_accelerator_rank(self) -> int:
        """Index on the node of the first accelerator that this worker uses; -1 for none."""
        return current_context().placement.local_accelerator_rank

    @property
    def accelerator_type(self) -> AcceleratorType:
        """Type of the node's accelerators: their vendor."""
        return current_context().placement.accelerator_type

    @property
    def hardware_ranks(self) -> tuple[int, ...]:
        """Indices on the node of the hardware assigned to this worker: accelerators, or robots and the like."""
        return current_context().placement.local_hardware_ranks

    @property
    def hardware(self) -> tuple[Mapping[str, Any], ...]:
        """Fields of the robots or other hardware assigned to this worker, as the job configured them."""
        return current_context().hardware

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return current_context().group

    _rank = rank
    _world_size = world_size
    _local_rank = local_rank
    _node_rank = node_rank

    # Other processes of the job ------------------------------------------------------------

    @property
    def worker_manager(self) -> WorkerManager:
        """The manager that knows all workers of the job."""
        return WorkerManager.get_proxy(current_context().namespace)

    @property
    def node_manager(self) -> NodeManager:
        """The manager that knows the nodes of the job."""
        return NodeManager.get_proxy(current_context().namespace)

    @property
    def collective_manager(self) -> CollectiveManager:
        """The manager that knows the collective groups of the job."""
        return CollectiveManager.get_proxy(current_context().namespace)

    def address_of(self, group: str, rank: int = 0) -> str | None:
        """Return the address of another worker's node; ``None`` if there is no such worker."""
        worker = self.worker_manager.get_worker(group, rank)
        return str(worker["address"]) if worker else None

    def acquire_free_port(self, count: int = 1) -> int:
        """Lease consecutive ports on this node until this process ends; return the first.

        A server that sets ``SO_REUSEADDR``, as most do, can bind a leased port in this process.

        Args:
            count: Number of ports.

        Raises:
            ClusterError: No such run of ports is free (R120).
        """
        lease = lease_ports(count)
        _leases.append(lease)
        return lease.port

    # Status and log ------------------------------------------------------------------------

    def status_note(self) -> str:
        """Return a line about this worker for ``roost status``; override it.

        It is called in another thread, also during calls, about once a second while the job is watched: read an
        attribute, and never wait.
        """
        return ""

    def log_debug(self, message: str) -> None:
        """Log a message with the prefix ``[GROUP[RANK] node NODE]``."""
        self._log(logging.DEBUG, message)

    def log_info(self, message: str) -> None:
        """Log a message with the prefix ``[GROUP[RANK] node NODE]``."""
        self._log(logging.INFO, message)

    def log_warning(self, message: str) -> None:
        """Log a message with the prefix ``[GROUP[RANK] node NODE]``."""
        self._log(logging.WARNING, message)

    def log_error(self, message: str) -> None:
        """Log a message with the prefix ``[GROUP[RANK] node NODE]``."""
        self._log(logging.ERROR, message)

    def _log(self, level: int, message: str) -> None:
        context = current_context()
        where = f"[{context.group}[{context.placement.rank}] node {context.placement.cluster_node_rank}]"
        _logger().log(level, "%s %s", where, message)


def _logger() -> logging.Logger:
    """Return the logger of workers; it writes to stderr unless the process has configured logging."""
    logger = logging.getLogger("roost.worker")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger

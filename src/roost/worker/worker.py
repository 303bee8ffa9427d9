"""``Worker``: what users derive their workers from."""

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
    """A process of a group. Derive from it, and launch a group::

        class Trainer(Worker):
            def hello(self):
                return self.rank

        group = Trainer.create_group().launch(cluster)
        group.hello().wait()

    Everything here is known before the constructor of a subclass runs.
    """

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> GroupRequest:
        """A group of such workers, to be launched; the arguments are those of the constructor."""
        from roost.worker.launch import GroupRequest

        return GroupRequest(cls, args, kwargs)

    # Who it is -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return current_context().placement.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return current_context().world_size

    @property
    def local_rank(self) -> int:
        """Index among the group's workers on this node."""
        return current_context().placement.local_rank

    @property
    def local_world_size(self) -> int:
        """How many of those there are."""
        return current_context().placement.local_world_size

    @property
    def node_rank(self) -> int:
        """Index of the node among those that the group uses."""
        return current_context().placement.placement_node_rank

    @property
    def cluster_node_rank(self) -> int:
        """Rank of the node in the cluster."""
        return current_context().placement.cluster_node_rank

    @property
    def local_accelerator_rank(self) -> int:
        """First accelerator on the node that this worker uses; -1 for none."""
        return current_context().placement.local_accelerator_rank

    @property
    def accelerator_type(self) -> AcceleratorType:
        """Vendor of the node's accelerators."""
        return current_context().placement.accelerator_type

    @property
    def hardware_ranks(self) -> tuple[int, ...]:
        """Node-local ranks of the resources that it was given."""
        return current_context().placement.local_hardware_ranks

    @property
    def hardware(self) -> tuple[Mapping[str, Any], ...]:
        """Fields of the robots or other hardware that it was given, as the job configured them."""
        return current_context().hardware

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return current_context().group

    _rank = rank
    _world_size = world_size
    _local_rank = local_rank
    _node_rank = node_rank

    # Whom it knows -------------------------------------------------------------------------

    @property
    def worker_manager(self) -> WorkerManager:
        """The manager of all workers."""
        return WorkerManager.get_proxy(current_context().namespace)

    @property
    def node_manager(self) -> NodeManager:
        """The manager of nodes."""
        return NodeManager.get_proxy(current_context().namespace)

    @property
    def collective_manager(self) -> CollectiveManager:
        """The manager of collective groups."""
        return CollectiveManager.get_proxy(current_context().namespace)

    def address_of(self, group: str, rank: int = 0) -> str | None:
        """The address of the node that another worker is on; ``None`` where it is not known."""
        worker = self.worker_manager.get_worker(group, rank)
        return str(worker["address"]) if worker else None

    def acquire_free_port(self, count: int = 1) -> int:
        """The first of so many consecutive ports on this node, held until this process binds or ends.

        A server that binds with ``SO_REUSEADDR`` (most do) takes it as it is.
        """
        lease = lease_ports(count)
        _leases.append(lease)
        return lease.port

    # What it says --------------------------------------------------------------------------

    def status_note(self) -> str:
        """A line about this worker for ``roost status``; define it where there is something to tell.

        It is called in a thread beside the worker's calls, about once a second while somebody watches: read
        an attribute, and never wait.
        """
        return ""

    def log_debug(self, message: str) -> None:
        """Logs with the group, the rank and the node in front."""
        self._log(logging.DEBUG, message)

    def log_info(self, message: str) -> None:
        """Logs with the group, the rank and the node in front."""
        self._log(logging.INFO, message)

    def log_warning(self, message: str) -> None:
        """Logs with the group, the rank and the node in front."""
        self._log(logging.WARNING, message)

    def log_error(self, message: str) -> None:
        """Logs with the group, the rank and the node in front."""
        self._log(logging.ERROR, message)

    def _log(self, level: int, message: str) -> None:
        context = current_context()
        where = f"[{context.group}[{context.placement.rank}] node {context.placement.cluster_node_rank}]"
        _logger().log(level, "%s %s", where, message)


def _logger() -> logging.Logger:
    """The logger of workers; it writes to stderr unless somebody configured logging."""
    logger = logging.getLogger("roost.worker")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger

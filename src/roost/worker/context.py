"""The context of a worker process: its rank, group and placement. Set before the user's code is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roost.errors import Finding, Fix, LaunchError
from roost.placement import Placement

__all__ = ["WorkerContext", "current_context", "install_context"]


@dataclass(frozen=True)
class WorkerContext:
    """The place of a worker in its group.

    Attributes:
        group: Name of the group.
        placement: Rank, node and accelerators of the worker.
        world_size: Number of workers in the group.
        namespace: Name of the job.
        master_address: Address of the node of rank 0.
        master_port: A port on that node, leased for the group.
        hardware: Fields of the robots or other hardware assigned to the worker.
    """

    group: str
    placement: Placement
    world_size: int
    namespace: str
    master_address: str
    master_port: int
    hardware: tuple[Mapping[str, Any], ...] = field(default=())


_current: WorkerContext | None = None


def install_context(context: WorkerContext) -> None:
    """Set the context of this process."""
    global _current
    _current = context


def current_context() -> WorkerContext:
    """Return the context of this process.

    Raises:
        LaunchError: This process is not a worker (W101).
    """
    if _current is None:
        message = "this is not a worker process: a Worker exists only in a worker group"
        fix = Fix("launch a group", "MyWorker.create_group().launch(cluster)")
        raise LaunchError([Finding("W101", message, fixes=(fix,))])
    return _current

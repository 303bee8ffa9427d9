"""What a worker process knows of itself; set by its host before the user's code is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roost.errors import Finding, Fix, LaunchError
from roost.placement import Placement

__all__ = ["WorkerContext", "current_context", "install_context"]


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in its group.

    Attributes:
        group: Name of the group.
        placement: Where the worker lives.
        world_size: Number of workers in the group.
        namespace: Name of the job.
        master_address: Where rank 0 is.
        master_port: A port there that is held for the group.
        hardware: Fields of the robots or other hardware that the worker was given.
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
    """Sets the context of this process."""
    global _current
    _current = context


def current_context() -> WorkerContext:
    """The context of this process.

    Raises:
        LaunchError: Where this process is not a worker.
    """
    if _current is None:
        message = "this is not a worker process: a Worker lives in a group"
        fix = Fix("launch a group", "MyWorker.create_group().launch(cluster)")
        raise LaunchError([Finding("W101", message, fixes=(fix,))])
    return _current

"""All uses of Ray's private API, which may change in any release. Each function says why the public API is not enough.

Tested with Ray 2.47.1 and the version in ``constraints.txt``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

__all__ = [
    "connected_worker_id",
    "dead_drivers",
    "free_resources_of_nodes",
    "id_of_actor",
    "local_node",
    "placement_group_of",
    "read_config_again",
    "visible_devices_variable",
    "without_sigterm_handler",
]


def id_of_actor(handle: Any) -> str:
    """Return the id of an actor, in hexadecimal. The public ``ray.util.state`` would ask the GCS for it."""
    return str(handle._actor_id.hex())


def connected_worker_id() -> str:
    """Return the id of this process in Ray; empty if it is not connected.

    The public ``ray.get_runtime_context()`` would connect it.
    """
    import ray

    worker = ray._private.worker.global_worker
    try:
        return str(worker.worker_id.hex()) if worker.connected else ""
    except AttributeError:  # Ray is being shut down by another thread
        return ""


def local_node() -> Any | None:
    """Return Ray's object of this node, which has the folder of the session; ``None`` without a Ray.

    There is no public way to get that folder: ``/tmp/ray/session_latest`` may belong to another session.
    """
    ray = sys.modules.get("ray")
    return ray._private.worker._global_node if ray is not None and ray.is_initialized() else None


def dead_drivers() -> set[str]:
    """Return Ray's ids of the drivers that have ended. ``ray.util.state.list_jobs`` needs the dashboard."""
    from ray._private.state import jobs

    known: Any = jobs()  # type: ignore[no-untyped-call]
    return {str(job["JobID"]) for job in known if job["IsDead"]}


def free_resources_of_nodes() -> dict[str, dict[str, float]]:
    """Return the free resources by Ray's node id. ``ray.available_resources`` adds up all nodes."""
    from ray._private.state import available_resources_per_node

    found: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return found


def placement_group_of(identity: str) -> Any:
    """Return the placement group with an id in hexadecimal. ``ray.util.get_placement_group`` looks up names only."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(identity)))


def visible_devices_variable() -> str:
    """Return the visible-devices variable that Ray sets for GPUs on this node; it depends on their vendor."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager: Any = get_accelerator_manager_for_resource("GPU")
    return str(manager.get_visible_accelerator_ids_env_var())


def read_config_again() -> None:
    """Have Ray read its environment variables again; it read them when it was imported."""
    from ray import _raylet

    config: Any = vars(_raylet)["Config"]
    config.initialize("")


@contextlib.contextmanager
def without_sigterm_handler() -> Iterator[None]:
    """Keep Ray's Python code from installing its SIGTERM handler during the ``with`` block."""
    import ray

    utils = ray._private.utils
    install = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = install

"""The environment of a worker process."""

from __future__ import annotations

from roost.placement import Placement
from roost.topology import NodeGroup

__all__ = ["worker_environment"]


def worker_environment(placement: Placement, world_size: int, group: NodeGroup) -> dict[str, str]:
    """Return the environment variables that follow from the placement of a process.

    ``LOCAL_RANK`` is the index of the process's first accelerator among the visible ones, so that
    ``cuda:LOCAL_RANK`` exists: 0 if the process sees only its own accelerators. The numbers within the node are
    always in ``NODE_LOCAL_RANK`` and ``NODE_LOCAL_WORLD_SIZE``.

    Args:
        placement: Placement of the process.
        world_size: Number of processes of its component.
        group: The node group of the placement. Its own variables are added.
    """
    isolated = placement.isolate_accelerator
    first = placement.local_accelerator_rank
    local_rank = 0 if isolated else first if first >= 0 else placement.local_rank
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": str(placement.placement_node_rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(1 if isolated else placement.local_world_size),
        "NODE_LOCAL_RANK": str(placement.local_rank),
        "NODE_LOCAL_WORLD_SIZE": str(placement.local_world_size),
        **placement.accelerator_type.worker_environment(placement.visible_accelerators),
        **group.environment(placement.cluster_node_rank).variables,
    }

"""The environment of a worker process."""

from __future__ import annotations

from roost.placement import Placement
from roost.topology import NodeGroup

__all__ = ["worker_environment"]


def worker_environment(placement: Placement, world_size: int, group: NodeGroup) -> dict[str, str]:
    """Everything a process finds in its environment that its placement decides.

    ``LOCAL_RANK`` is the index of the process's first accelerator among those that it *sees*: 0
    where it sees only its own, or ``cuda:LOCAL_RANK`` would not exist. The node-level values are
    always in ``NODE_LOCAL_RANK`` and ``NODE_LOCAL_WORLD_SIZE``.

    Args:
        placement: Where it lives.
        world_size: Number of processes of its component.
        group: The node group that it came from, which may add variables of its own.
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

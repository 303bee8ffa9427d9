"""Made-up topologies with the facts of real ones: names, addresses, racks, memory."""

from __future__ import annotations

from dataclasses import replace

from roost.topology import Topology

__all__ = ["made_up_topology"]


def made_up_topology(
    machines: str, *, nodes_per_rack: int = 8, cpus: float = 128, memory_gib: float = 1024, accelerator_gib: float = 80
) -> Topology:
    """Return a topology with all facts that the checks of a plan use.

    Nodes have the names ``node-0``, ``node-1``, …, addresses from 10.0.0.1 up, and a label ``rack``.

    Args:
        machines: The short text of a topology, such as ``4x8`` (nodes x accelerators).
        nodes_per_rack: Number of nodes in a rack.
        cpus: CPUs of each node.
        memory_gib: Host memory of each node, in GiB.
        accelerator_gib: Memory of each accelerator, in GiB.
    """
    nodes = []
    for node in Topology.parse(machines).nodes:
        number = node.rank + 1
        nodes.append(
            replace(
                node,
                name=f"node-{node.rank}",
                address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
                cpus=cpus,
                memory_gib=memory_gib,
                accelerator_memory_gib=accelerator_gib if node.accelerator_ids else None,
                labels={"rack": f"rack-{node.rank // nodes_per_rack}"},
            )
        )
    return Topology(tuple(nodes))

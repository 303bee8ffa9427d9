"""What a placement must be, written down a second time: slow, obvious, and from the specification alone.

Nothing here looks at how Roost does it. Only the description of the machines is Roost's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roost import Topology


class RefusedError(Exception):
    """The specification does not allow this placement."""


class UnspecifiedError(Exception):
    """The specification leaves open what happens."""


@dataclass(frozen=True)
class Resource:
    node: int
    local: int
    kind: str  # "accelerator", "node", or the type of other hardware
    label: str


def resources_of(topology: Topology, labels: list[str], as_nodes: bool = False) -> list[Resource]:
    found = []
    for label in labels or ["cluster"]:
        group = topology.group(label)
        accelerators = [
            Resource(rank, local, "accelerator", label)
            for rank in group.node_ranks
            for local in range(len(topology.nodes[rank].accelerator_ids))
        ]
        nodes = [Resource(rank, 0, "node", label) for rank in group.node_ranks]
        devices = []
        for rank in group.node_ranks:
            on_node = [item for node_rank, item in group.hardware if node_rank == rank]
            devices += [Resource(rank, local, group.hardware_type, label) for local in range(len(on_node))]
        if as_nodes or label == "node":
            found += nodes
        elif group.hardware_type:
            found += devices
        elif accelerators:
            found += accelerators
        else:
            found += nodes
    return found


def placements_of(topology: Topology, shares: list[list[Resource]], isolate: bool) -> list[dict]:
    """The fields of every process, from the resources of each, in rank order."""
    for share in shares:
        if not share or len({(r.node, r.kind) for r in share}) != 1:
            raise RefusedError("a process has resources of one type, on one node")
    nodes_in_order = list(dict.fromkeys(share[0].node for share in shares))
    rows = []
    for rank, share in enumerate(shares):
        node = topology.nodes[share[0].node]
        same_node = [other for other in range(len(shares)) if shares[other][0].node == node.rank]
        own = [r.local for r in share]
        on_accelerators = share[0].kind == "accelerator"
        own_only = isolate and on_accelerators
        rows.append(
            {
                "rank": rank,
                "cluster_node_rank": node.rank,
                "placement_node_rank": nodes_in_order.index(node.rank),
                "local_accelerator_rank": own[0] if on_accelerators else -1,
                "accelerator_type": node.accelerator_type,
                "local_rank": same_node.index(rank),
                "local_world_size": len(same_node),
                "visible_accelerators": [
                    name for i, name in enumerate(node.accelerator_ids) if not own_only or i in own
                ],
                "isolate_accelerator": isolate,
                "local_hardware_ranks": [] if share[0].kind == "node" else own,
                "node_group_label": share[0].label,
            }
        )
    return rows


# Strategies ----------------------------------------------------------------------------------


def packed(
    topology: Topology, labels: list[str], start: int, end: int, per_process: int, stride: int, isolate: bool = True
) -> list[dict]:
    resources = resources_of(topology, labels)
    block_size = per_process * stride
    if end < start or (end - start + 1) % block_size or end >= len(resources):
        raise RefusedError
    shares = []
    for first in range(start, end + 1, block_size):
        block = resources[first : first + block_size]
        if len({(r.node, r.kind) for r in block}) != 1:
            raise RefusedError("a block lies on one node")
        shares += [[block[j + i * stride] for i in range(per_process)] for j in range(stride)]
    return placements_of(topology, shares, isolate)


def flexible(topology: Topology, labels: list[str], lists: list[list[int]], isolate: bool = True) -> list[dict]:
    resources = resources_of(topology, labels)
    if not lists or any(not ranks or len(set(ranks)) != len(ranks) for ranks in lists):
        raise RefusedError
    if any(rank >= len(resources) for ranks in lists for rank in ranks):
        raise RefusedError
    ordered = sorted((sorted(ranks) for ranks in lists), key=lambda ranks: ranks[0])
    return placements_of(topology, [[resources[rank] for rank in ranks] for ranks in ordered], isolate)


def node(topology: Topology, labels: list[str], ranks: list[int], isolate: bool = True) -> list[dict]:
    nodes = resources_of(topology, labels, as_nodes=True)
    if not ranks or max(ranks) >= len(nodes):
        raise RefusedError
    return placements_of(topology, [[nodes[rank]] for rank in sorted(ranks)], isolate)


# The placement language ----------------------------------------------------------------------


def component(topology: Topology, labels: list[str], text: str, isolate: bool = True) -> list[dict]:
    resources = resources_of(topology, labels)
    shares: list[list[Resource]] = []
    last_resource = -1
    for segment in text.split(","):
        sides = segment.split(":")
        if len(sides) > 2:
            raise RefusedError
        first, last = (0, len(resources) - 1) if sides[0].strip() == "all" else _range(sides[0])
        if first <= last_resource or last >= len(resources) or last < first:
            raise RefusedError
        last_resource = last
        chosen = resources[first : last + 1]
        begin, end = (len(shares), len(shares) + len(chosen) - 1) if len(sides) == 1 else _range(sides[1])
        if begin != len(shares) or end >= 2**24:
            raise RefusedError
        shares += _spread(chosen, end - begin + 1)
    return placements_of(topology, shares, isolate)


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+)(?:\s*-\s*([0-9]+))?", text.strip(), re.ASCII)
    if match is None:
        raise RefusedError
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise RefusedError
    return first, last


def _spread(chosen: list[Resource], processes: int) -> list[list[Resource]]:
    kinds = {r.kind == "node" for r in chosen}
    if kinds == {True, False}:
        raise UnspecifiedError("a segment of bare nodes and hardware")
    if kinds == {True}:
        if processes < len(chosen):
            raise RefusedError("a process with two nodes")
        each, extra = divmod(processes, len(chosen))
        return [[r] for i, r in enumerate(chosen) for _ in range(each + (1 if i < extra else 0))]
    if processes <= len(chosen):
        if len(chosen) % processes:
            raise RefusedError
        size = len(chosen) // processes
        return [chosen[i : i + size] for i in range(0, len(chosen), size)]
    if processes % len(chosen):
        raise RefusedError
    return [[r] for r in chosen for _ in range(processes // len(chosen))]

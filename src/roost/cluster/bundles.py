"""``Bundles``: a placement group with one bundle per accelerator, for code that uses Ray's placement groups directly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from roost.cluster.nodes import NodeInfo
from roost.cluster.reserve import ask_accelerators, first_line, free_resources, pin, remove_groups
from roost.cluster.turn import reservation_turn
from roost.errors import Finding, Fix, ReservationError, counted
from roost.hardware import AcceleratorType

__all__ = ["Bundles", "reserve_bundles"]


@dataclass(frozen=True)
class Bundles:
    """A placement group with one accelerator per bundle, in the cluster's order.

    Entry ``i`` of each list is about the i-th accelerator. It is the same accelerator in every run, although Ray
    assigns accelerators to bundles in any order.

    Attributes:
        placement_group: Ray's placement group.
        bundle_indices: Index of the accelerator's bundle in the placement group.
        node_ranks: Rank of the accelerator's node.
        accelerator_ids: Id of the accelerator on its node.
    """

    placement_group: PlacementGroup
    bundle_indices: tuple[int, ...]
    node_ranks: tuple[int, ...]
    accelerator_ids: tuple[str, ...]

    def release(self) -> None:
        """Release the accelerators, and wait up to 5 s until Ray counts them as free. Safe to call twice."""
        if not ray.is_initialized() or placement_group_table(self.placement_group).get("state") == "REMOVED":
            return
        held = len(self.bundle_indices)
        before = _free_accelerators()
        remove_placement_group(self.placement_group)
        deadline = time.monotonic() + 5.0
        while _free_accelerators() < before + held and time.monotonic() < deadline:
            time.sleep(0.02)


def reserve_bundles(nodes: Sequence[NodeInfo], count: int, cpus: float, timeout_s: float) -> Bundles:
    """Reserve the first ``count`` free accelerators in cluster order, one per bundle.

    Raises:
        ReservationError: There were not enough in time (R205), with the free and registered accelerators of each node;
            or Ray failed (R206).
    """
    try:
        return _reserve(nodes, count, cpus, timeout_s)
    except RayError as error:
        message = f"Ray failed while {counted(count, 'bundle')} were reserved: {first_line(error)}"
        raise ReservationError([Finding("R206", message)]) from error


def _reserve(nodes: Sequence[NodeInfo], count: int, cpus: float, timeout_s: float) -> Bundles:
    deadline = time.monotonic() + timeout_s
    is_possible = count <= sum(node.num_accelerators for node in nodes)
    while True:
        group: PlacementGroup | None = None
        try:
            with reservation_turn(deadline):
                owners = _first_free(nodes, count, cpus)
                group = _take(nodes, owners, cpus) if owners else None
            if group is not None:
                return _in_order(group, nodes, owners)
        except BaseException:
            remove_groups([group] if group is not None else [])
            raise
        if not is_possible or time.monotonic() > deadline:
            raise ReservationError([_shortage(nodes, count, cpus)])
        time.sleep(0.1)


def _in_order(group: PlacementGroup, nodes: Sequence[NodeInfo], owners: Sequence[int]) -> Bundles:
    """Put the bundles of a group in the cluster's order; ``owners`` has the rank of each bundle's node."""
    ids = ask_accelerators([(group, index, nodes[rank]) for index, rank in enumerate(owners)])
    known = {rank: [device.id for device in nodes[rank].accelerators] for rank in set(owners)}
    found = sorted((rank, known[rank].index(ids[index]), index) for index, rank in enumerate(owners))
    return Bundles(
        group,
        tuple(index for _, _, index in found),
        tuple(rank for rank, _, _ in found),
        tuple(known[rank][local] for rank, local, _ in found),
    )


def _free_accelerators() -> float:
    """Return the number of accelerators that Ray counts as free, on all nodes."""
    names = {kind.ray_resource for name in AcceleratorType.names() if (kind := AcceleratorType.get(name))}
    return sum(there.get(name, 0.0) for there in free_resources().values() for name in names)


def _first_free(nodes: Sequence[NodeInfo], count: int, cpus: float) -> list[int]:
    """Return the node rank of each of the first ``count`` free accelerators; empty if there are fewer."""
    free = free_resources()
    owners: list[int] = []
    for node in nodes:
        there = free.get(node.ray_id, {})
        fits = int(there.get(node.accelerator_type.ray_resource, 0.0)) if node.accelerators else 0
        if cpus:
            fits = min(fits, int(there.get("CPU", 0.0) / cpus))
        owners += [node.rank] * min(fits, count - len(owners))
    return owners if len(owners) == count else []


def _take(nodes: Sequence[NodeInfo], owners: Sequence[int], cpus: float) -> PlacementGroup | None:
    """Return a placement group with a bundle on each owner's node; ``None`` if another job took an accelerator first."""
    bundles = [
        {nodes[rank].accelerator_type.ray_resource: 1.0, **({"CPU": cpus} if cpus else {}), **pin(nodes[rank])}
        for rank in owners
    ]
    group = placement_group(bundles)
    try:
        is_there = group.wait(5.0)
    except BaseException:
        remove_groups([group])
        raise
    if not is_there:
        remove_groups([group])
    return group if is_there else None


def _shortage(nodes: Sequence[NodeInfo], count: int, cpus: float) -> Finding:
    free = free_resources()
    lines = []
    for node in nodes[:16]:
        there = free.get(node.ray_id, {})
        accelerators = f"{there.get(node.accelerator_type.ray_resource, 0.0):g} of {node.num_accelerators}"
        lines.append(
            f"node {node.rank}: {accelerators} accelerators free, {there.get('CPU', 0.0):g} of {node.cpus:g} CPUs"
        )
    registered = sum(node.num_accelerators for node in nodes)
    fixes = (Fix("fewer CPUs per bundle", "reserve_bundles(n, cpus=0)"),) if cpus else ()
    message = f"{counted(count, 'bundle')} cannot be reserved: {registered} accelerators are registered"
    return Finding(
        "R205", message, context=tuple(lines), rule=f"a bundle is one accelerator and {cpus:g} CPUs", fixes=fixes
    )

"""The plan of a running job, as its groups were launched with it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import ray

from roost.placement import PlacementMode
from roost.plan import ComponentPlan, Plan
from roost.plan.node_changes import accelerator_uuids
from roost.topology import NodeGroup

__all__ = ["LivePlan", "live_plan", "pack_plan"]


@dataclass(frozen=True)
class LivePlan:
    """What a running job was launched with.

    Attributes:
        plan: Its components that run, and what it merely reserves.
        uuids: The UUIDs of each node's accelerators; empty for a node where they are not known.
    """

    plan: Plan
    uuids: tuple[tuple[str, ...], ...]


def pack_plan(plan: Plan, component: str) -> bytes:
    """A component of a plan, and what the plan reserves, in few bytes: a hundredth of its JSON."""
    kept = tuple(part for part in plan.components if part.name == component or part.placeholder)
    return zlib.compress(Plan(plan.topology, kept, plan.mode).to_json().encode(), 1)


def live_plan(managers: ray.actor.ActorHandle, timeout_s: float = 30.0) -> LivePlan:
    """The plan of all groups that run now, under the names of their components.

    A second group of the same component goes by its own name.
    """
    packed, topology, nodes = ray.get(
        [managers.get_plans.remote(), managers.get_topology.remote(), managers.get_nodes.remote()], timeout=timeout_s
    )
    components: dict[str, ComponentPlan] = {}
    groups: dict[str, NodeGroup] = {group.label: group for group in topology.groups}
    modes = set()
    plans = {name: Plan.from_json(zlib.decompress(data).decode()) for name, data in sorted(packed.items())}
    for name, plan in plans.items():
        groups |= {group.label: group for group in plan.topology.groups}
        modes.add(plan.mode)
        for component in plan.components:
            if component.placeholder or component.name not in components:
                components[component.name] = component
            else:
                components[name] = replace(component, name=name)
    mode = modes.pop() if len(modes) == 1 else PlacementMode.HYBRID
    ordered = tuple(components[name] for name in sorted(components))
    plan = Plan(topology.adding(groups.values()), ordered, mode)
    return LivePlan(plan, accelerator_uuids(_Measured(topology, nodes)))


class _Measured:
    """A cluster as far as its machines are concerned."""

    def __init__(self, topology: Any, nodes: Any) -> None:
        self.topology = topology
        self._nodes = nodes

    def get_node_info(self, rank: int) -> Any:
        return self._nodes[rank]

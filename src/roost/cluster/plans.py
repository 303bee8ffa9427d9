"""The plan of a running job, as its groups were launched with it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from roost.cluster.manager_calls import ask_managers
from roost.cluster.nodes import NodeInfo
from roost.placement import PlacementMode
from roost.plan import ComponentPlan, Plan
from roost.plan.node_changes import accelerator_uuids
from roost.topology import NodeGroup, Topology

__all__ = ["LivePlan", "live_plan", "pack_plan"]


@dataclass(frozen=True)
class LivePlan:
    """The plan of a running job.

    Attributes:
        plan: The running components, and the placeholders.
        uuids: UUIDs of each node's accelerators; empty for a node whose UUIDs are not known.
    """

    plan: Plan
    uuids: tuple[tuple[str, ...], ...]


def pack_plan(plan: Plan, component: str) -> bytes:
    """Return a component of a plan, with the plan's placeholders, as compressed JSON: about 1 % of the plan's JSON."""
    kept = tuple(part for part in plan.components if part.name == component or part.placeholder)
    return zlib.compress(Plan(plan.topology, kept, plan.mode).to_json().encode(), 1)


def live_plan(managers: ray.actor.ActorHandle[Any], timeout_s: float = 30.0) -> LivePlan:
    """Return the plan of all running groups; blocks at most ``timeout_s``.

    A group has the name of its component; a second group of the same component has its own name.

    Raises:
        ClusterError: The managers have died or cannot be reached (R150), or do not answer in time (R107).
    """
    methods = ("get_plans", "get_topology", "get_nodes")
    packed, topology, nodes = (ask_managers(managers, method, timeout_s=timeout_s) for method in methods)
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
    """The nodes of a running job, as :func:`~roost.plan.node_changes.accelerator_uuids` reads them from a cluster."""

    def __init__(self, topology: Topology, nodes: Sequence[NodeInfo]) -> None:
        self.topology = topology
        self._nodes = nodes

    def get_node_info(self, rank: int) -> NodeInfo:
        return self._nodes[rank]

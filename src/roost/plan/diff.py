"""``diff_plans``: compare two plans process by process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from roost.errors import counted
from roost.placement import Placement
from roost.plan.node_changes import NodeChange, NodeUuids, compare_nodes
from roost.plan.plan import ENGINE, ComponentPlan, Plan
from roost.topology import Topology

__all__ = ["PlanDiff", "ProcessChange", "diff_plans"]

FORMAT = "roost.diff/1"

Details = Mapping[str, tuple[Any, Any]]
"""Name of what changed → its value before and after; ``None`` for a value that was not set."""

PLACE = ("node", "accelerators", "hardware")
"""A process moved if one of these details changed."""

_FOLLOWS = {
    "placement_node_rank": "NODE_RANK",
    "local_rank": "NODE_LOCAL_RANK",
    "local_world_size": "NODE_LOCAL_WORLD_SIZE",
    "visible_accelerators": "visible accelerators",
    "isolate_accelerator": "sees only its own accelerators",
    "node_group_label": "node group",
}
"""Other fields of a placement, and their names in a diff."""


class ProcessChange(NamedTuple):
    """One process that was added (``+``), changed (``~``) or removed (``-``).

    Attributes:
        sign: ``+``, ``~`` or ``-``.
        component: Name of its component.
        rank: Its rank.
        before: Its placement in the first plan.
        after: Its placement in the second plan.
        details: What changed, for a changed process. Processes with the same changes may share this object.
    """

    sign: Literal["+", "~", "-"]
    component: str
    rank: int
    before: Placement | None
    after: Placement | None
    details: Details

    @property
    def is_moved(self) -> bool:
        """Whether its node, its accelerators or its hardware changed."""
        return not self.details.keys().isdisjoint(PLACE)


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans.

    Attributes:
        processes: Every process that differs, by component and rank.
        components: Component → what changed for the component as a whole (sizes, role), for components in both plans.
        nodes: How the nodes differ.
        mode: The placement modes before and after, if they differ.
        now_cross: Tensor-parallel groups that newly cross nodes, as (component, first rank, last rank).
        no_longer_cross: Tensor-parallel groups that crossed nodes in the first plan only.
    """

    processes: tuple[ProcessChange, ...] = ()
    components: Mapping[str, Details] = field(default_factory=dict)
    nodes: tuple[NodeChange, ...] = ()
    mode: tuple[str, str] | None = None
    now_cross: tuple[tuple[str, int, int], ...] = ()
    no_longer_cross: tuple[tuple[str, int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the plans are the same."""
        return not (self.processes or self.components or self.nodes or self.mode)

    def __bool__(self) -> bool:
        return not self.is_empty

    @property
    def moved(self) -> int:
        """Number of processes whose node, accelerators or hardware changed."""
        return sum(1 for change in self.processes if change.is_moved)

    def count(self, sign: str) -> int:
        """Return the number of processes that were added (``+``), changed in any way (``~``) or removed (``-``)."""
        return sum(1 for change in self.processes if change.sign == sign)

    @property
    def summary(self) -> str:
        """One line such as ``14 moved, 2 added, 0 removed; 3 tensor-parallel groups now cross nodes``."""
        if self.is_empty:
            return "no differences"
        moved = self.moved
        counts = [f"{moved:,} moved", f"{self.count('+'):,} added", f"{self.count('-'):,} removed"]
        if self.count("~") > moved:
            counts.insert(1, f"{self.count('~') - moved:,} changed in place")
        parts = [", ".join(counts)]
        for groups, word in ((self.now_cross, "now"), (self.no_longer_cross, "no longer")):
            if groups:
                verb = "crosses" if len(groups) == 1 else "cross"
                parts.append(f"{counted(len(groups), 'tensor-parallel group')} {word} {verb} nodes")
        return "; ".join(parts)

    def to_json(self) -> str:
        """Return JSON text: the summary, the counts, and a line for every process that differs."""
        head = {
            "format": FORMAT,
            "same": self.is_empty,
            "summary": self.summary,
            "moved": self.moved,
            "changed": self.count("~"),
            "added": self.count("+"),
            "removed": self.count("-"),
            "mode": list(self.mode) if self.mode else None,
            "now_cross": [_group(*group) for group in self.now_cross],
            "no_longer_cross": [_group(*group) for group in self.no_longer_cross],
            "machines": [
                {
                    "kind": change.kind,
                    "nodes": list(change.node_ranks),
                    "what": change.what,
                    "before": change.planned,
                    "after": change.found,
                }
                for change in self.nodes
            ],
            "components": {name: _pairs(details) for name, details in self.components.items()},
        }
        encode = json.JSONEncoder(ensure_ascii=False).encode
        rows = ",".join(f"\n  {encode(_plain(change))}" for change in self.processes)
        return f'{encode(head)[:-1]},\n "processes": [{rows}]}}\n'


def diff_plans(before: Plan, after: Plan, before_uuids: NodeUuids = (), after_uuids: NodeUuids = ()) -> PlanDiff:
    """Compare two plans.

    Processes are matched by component name and rank. The texts of placement rules and notes are not compared, and
    neither are values that only follow from another size, such as ``WORLD_SIZE``.

    Args:
        before: The first plan.
        after: The second plan.
        before_uuids: UUIDs of the accelerators of each node of the first plan, if known (see ``LockFile.uuids``).
        after_uuids: The same for the second plan.
    """
    return _diff(before, after, tuple(compare_nodes(before.topology, after.topology, before_uuids, after_uuids)))


def _diff(before: Plan, after: Plan, nodes: tuple[NodeChange, ...]) -> PlanDiff:
    olds = {component.name: component for component in before.components}
    news = {component.name: component for component in after.components}
    variables = _Variables(before.topology, after.topology)
    processes: list[ProcessChange] = []
    components: dict[str, Details] = {}
    old_crossing: set[tuple[str, int, int]] = set()
    new_crossing: set[tuple[str, int, int]] = set()
    for name in sorted(olds.keys() | news.keys()):
        old, new = olds.get(name), news.get(name)
        if old is not None:
            old_crossing.update(_crossing(old))
        if new is not None:
            new_crossing.update(_crossing(new))
        if old is not None and new is not None:
            changed = _component_details(old, new)
            if changed:
                components[name] = changed
            processes += _changed(old, new, variables)
        shared = min(old.world_size if old else 0, new.world_size if new else 0)
        if new is not None:
            processes += [ProcessChange("+", name, p.rank, None, p, {}) for p in new.placements[shared:]]
        if old is not None:
            processes += [ProcessChange("-", name, p.rank, p, None, {}) for p in old.placements[shared:]]
    return PlanDiff(
        tuple(processes),
        components,
        nodes,
        (before.mode.value, after.mode.value) if before.mode is not after.mode else None,
        tuple(sorted(new_crossing - old_crossing)),
        tuple(sorted(old_crossing - new_crossing)),
    )


def _component_details(old: ComponentPlan, new: ComponentPlan) -> dict[str, tuple[Any, Any]]:
    pairs = {
        "processes": (old.world_size, new.world_size),
        "role": (old.role, new.role),
        "tensor_parallel": (old.tensor_parallel, new.tensor_parallel),
        "pipeline_parallel": (old.pipeline_parallel, new.pipeline_parallel),
        "processes_per_engine": (old.processes_per_engine, new.processes_per_engine),
        "placeholder": (old.placeholder, new.placeholder),
    }
    return {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}


def _changed(old: ComponentPlan, new: ComponentPlan, variables: _Variables) -> Iterator[ProcessChange]:
    """Yield the processes that are in both plans and differ."""
    declared = {
        "share": (old.gpu_share, new.gpu_share),
        "cpus": (old.cpus, new.cpus),
        "memory_gib": (old.memory_gib, new.memory_gib),
    }
    of_all = {what: pair for what, pair in declared.items() if pair[0] != pair[1]}
    old_transports: Any = old.transports or (None,) * old.world_size
    new_transports: Any = new.transports or (None,) * new.world_size
    has_variables = variables.can_differ
    for p, q, by, now_by in zip(old.placements, new.placements, old_transports, new_transports, strict=False):
        details: Details = of_all
        if p != q:
            details = {**of_all, **_placement_details(p, q)}
        if by is not now_by:
            details = {**details, "transport": (by and by.value, now_by and now_by.value)}
        if has_variables:
            found = variables.changes(p, q)
            if found:
                details = {**details, **found}
        if details:
            yield ProcessChange("~", old.name, p.rank, p, q, details)


def _placement_details(p: Placement, q: Placement) -> dict[str, tuple[Any, Any]]:
    details: dict[str, tuple[Any, Any]] = {}
    if p.cluster_node_rank != q.cluster_node_rank:
        details["node"] = (p.cluster_node_rank, q.cluster_node_rank)
    if p.accelerators != q.accelerators:
        details["accelerators"] = (p.accelerators, q.accelerators)
    if p.local_hardware_ranks != q.local_hardware_ranks and not (p.accelerators or q.accelerators):
        details["hardware"] = (p.local_hardware_ranks, q.local_hardware_ranks)
    if p.accelerator_type != q.accelerator_type:
        details["vendor"] = (p.accelerator_type.name, q.accelerator_type.name)
    for name, what in _FOLLOWS.items():
        mine, other = getattr(p, name), getattr(q, name)
        if mine != other:
            details[what] = (mine, other)
    return details


class _Variables:
    """Differences of the environments that node groups set, computed once per group and node."""

    def __init__(self, before: Topology, after: Topology) -> None:
        self._before = before
        self._after = after
        self._known: dict[tuple[str, int, str, int], Details] = {}
        self.can_differ = any(group.environments for side in (before, after) for group in side.groups)

    def changes(self, p: Placement, q: Placement) -> Details:
        """Return what a node group sets differently for a process with these placements."""
        key = (p.node_group_label, p.cluster_node_rank, q.node_group_label, q.cluster_node_rank)
        found = self._known.get(key)
        if found is None:
            old = self._before.group(key[0]).environment(key[1])
            new = self._after.group(key[2]).environment(key[3])
            found = {
                f"environment {name}": (old.variables.get(name), new.variables.get(name))
                for name in sorted(old.variables.keys() | new.variables.keys())
                if old.variables.get(name) != new.variables.get(name)
            }
            if old.interpreter != new.interpreter:
                found["interpreter"] = (old.interpreter or None, new.interpreter or None)
            self._known[key] = found
        return found


def _crossing(component: ComponentPlan) -> Iterator[tuple[str, int, int]]:
    """Yield the tensor-parallel groups that cross nodes, as (component, first rank, last rank)."""
    tp, first = component.tensor_parallel, component.placements[0]
    width = len(first.accelerators)
    if tp < 2 or not width or width >= tp:
        return
    if component.role == ENGINE and width * component.processes_per_engine < tp:
        return  # the tensor-parallel size is larger than its engines, so no process has peers (N109)
    size = tp // width
    nodes = [placement.cluster_node_rank for placement in component.placements]
    for start in range(0, len(nodes) - size + 1, size):
        if nodes[start] != nodes[start + size - 1]:
            yield component.name, start, start + size - 1


# JSON ----------------------------------------------------------------------------------------


def _group(component: str, first: int, last: int) -> dict[str, Any]:
    return {"component": component, "ranks": [first, last]}


def _pairs(details: Details) -> dict[str, Any]:
    return {what: {"before": before, "after": after} for what, (before, after) in details.items()}


def _plain(change: ProcessChange) -> dict[str, Any]:
    plain: dict[str, Any] = {"sign": change.sign, "component": change.component, "rank": change.rank}
    for side, placement in (("before", change.before), ("after", change.after)):
        if placement is not None:
            plain[side] = {"node": placement.cluster_node_rank, "accelerators": placement.accelerators}
    if change.details:
        plain["changes"] = _pairs(change.details)
    return plain

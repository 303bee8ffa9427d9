"""``diff_plans``: what changes from one plan to another, process by process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from roost.errors import counted
from roost.placement import Placement
from roost.plan.machines import MachineChange, Uuids, compare_machines
from roost.plan.plan import ENGINE, ComponentPlan, Plan
from roost.topology import Topology

__all__ = ["PlanDiff", "ProcessChange", "diff_plans"]

FORMAT = "roost.diff/1"

Details = Mapping[str, tuple[Any, Any]]
"""What changed → its value before and after; ``None`` where it was not said."""

PLACE = ("node", "accelerators", "hardware")
"""The details that make a process a moved one."""

_FOLLOWS = {
    "placement_node_rank": "NODE_RANK",
    "local_rank": "NODE_LOCAL_RANK",
    "local_world_size": "NODE_LOCAL_WORLD_SIZE",
    "visible_accelerators": "visible accelerators",
    "isolate_accelerator": "sees only its own accelerators",
    "node_group_label": "node group",
}
"""Fields of a placement and what people call them, beside the place itself."""


class ProcessChange(NamedTuple):
    """One process that was added (``+``), changed (``~``) or removed (``-``).

    Attributes:
        sign: Which of the three.
        component: The name of its component.
        rank: Its rank.
        before: Where it lives in the first plan.
        after: Where it lives in the second.
        details: For a changed process, what changed. Processes with the same changes may share it.
    """

    sign: Literal["+", "~", "-"]
    component: str
    rank: int
    before: Placement | None
    after: Placement | None
    details: Details

    @property
    def is_moved(self) -> bool:
        """Whether it changed its node or its accelerators."""
        return not self.details.keys().isdisjoint(PLACE)


@dataclass(frozen=True)
class PlanDiff:
    """What changes from one plan to another.

    Attributes:
        processes: Every process that is not the same, by component and rank.
        components: Component → what changed of it as a whole: sizes, role; only of those in both plans.
        machines: How the machines differ.
        mode: The modes before and after, where they differ.
        now_cross: Tensor-parallel groups that cross nodes and did not, as (component, first and last rank).
        no_longer_cross: Those that did and do not.
    """

    processes: tuple[ProcessChange, ...] = ()
    components: Mapping[str, Details] = field(default_factory=dict)
    machines: tuple[MachineChange, ...] = ()
    mode: tuple[str, str] | None = None
    now_cross: tuple[tuple[str, int, int], ...] = ()
    no_longer_cross: tuple[tuple[str, int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the plans say the same."""
        return not (self.processes or self.components or self.machines or self.mode)

    def __bool__(self) -> bool:
        return not self.is_empty

    @property
    def moved(self) -> int:
        """How many processes changed their node or accelerators."""
        return sum(1 for change in self.processes if change.is_moved)

    def count(self, sign: str) -> int:
        """How many processes were added (``+``), changed in any way (``~``) or removed (``-``)."""
        return sum(1 for change in self.processes if change.sign == sign)

    @property
    def summary(self) -> str:
        """One line: ``14 moved, 2 added, 0 removed; 3 tensor-parallel groups now cross nodes``."""
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
        """JSON text: the summary, the counts, and a line for every process that is not the same."""
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
                for change in self.machines
            ],
            "components": {name: _pairs(details) for name, details in self.components.items()},
        }
        encode = json.JSONEncoder(ensure_ascii=False).encode
        rows = ",".join(f"\n  {encode(_plain(change))}" for change in self.processes)
        return f'{encode(head)[:-1]},\n "processes": [{rows}]}}\n'


def diff_plans(before: Plan, after: Plan, before_uuids: Uuids = (), after_uuids: Uuids = ()) -> PlanDiff:
    """What changes from one plan to another.

    A process is the same one where its component's name and its rank are. Texts of placement rules, notes
    and what merely follows from another size (``WORLD_SIZE``) are not compared process by process.

    Args:
        before: The first plan.
        after: The second.
        before_uuids: UUIDs of each node's accelerators in the first, where known (see ``Lock.uuids``).
        after_uuids: The same in the second.
    """
    return _diff(before, after, tuple(compare_machines(before.topology, after.topology, before_uuids, after_uuids)))


def _diff(before: Plan, after: Plan, machines: tuple[MachineChange, ...]) -> PlanDiff:
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
        machines,
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
    """The processes that are in both plans and not the same."""
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
    """What node groups give to processes, and how that differs; asked once per group and node."""

    def __init__(self, before: Topology, after: Topology) -> None:
        self._before = before
        self._after = after
        self._known: dict[tuple[str, int, str, int], Details] = {}
        self.can_differ = any(group.environments for side in (before, after) for group in side.groups)

    def changes(self, p: Placement, q: Placement) -> Details:
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
    """Tensor-parallel groups that are not on one node, as (component, first and last rank)."""
    tp, first = component.tensor_parallel, component.placements[0]
    width = len(first.accelerators)
    if tp < 2 or not width or width >= tp:
        return
    if component.role == ENGINE and width * component.processes_per_engine < tp:
        return  # its engines are smaller than it says: no process has peers
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

"""The data of a page, in a compact form.

Processes are not written one by one. Consecutive nodes on which a component looks the same are one run, the processes
of such a node are written once (its *shape*), and environments are templates with slots. The page's script expands
them. 8,192 accelerators of a regular plan take a few kilobytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from roost.errors import Finding, RankError
from roost.placement import Placement, PlacementMode
from roost.plan import ComponentPlan, Plan
from roost.plan.environment import worker_environment
from roost.plan.plan import ENGINE, TRAINER
from roost.plan.routes import DISTANCES, Route
from roost.ranks import parse_ranks
from roost.report.letters import component_letters
from roost.report.palette import paint_of
from roost.report.racks import racks_of
from roost.topology import Node

__all__ = ["finding_rows", "page_data"]

_LOOKS = attrgetter(
    "local_hardware_ranks", "visible_accelerators", "local_accelerator_rank", "local_rank", "local_world_size",
    "accelerator_type.name", "isolate_accelerator", "node_group_label",
)  # fmt: skip
_SLOTS = ("rank", "node_rank", "first", "local_rank", "local_world_size", "visible")
"""Values of an environment that differ between processes. The script uses their index."""
_TRAINERS = (TRAINER, "critic")
_MOST_CELLS = 4096
"""Number of accelerators that a finding links to at most."""


def page_data(plan: Plan) -> dict[str, Any]:
    """Return plain data for the page's script."""
    shapes = _Shapes(plan)
    letters = component_letters([component.name for component in plan.components])
    return {
        "mode": plan.mode.value,
        "noun": plan.topology.noun,
        "takesTurns": plan.mode is PlacementMode.COLLOCATED,
        "nodes": _nodes(plan.topology.nodes),
        "racks": [[rack.title, _spans(rack.node_ranks)] for rack in racks_of(plan.topology)],
        "groups": [[group.label, _spans(group.node_ranks), group.hardware_type] for group in plan.topology.groups],
        "components": [
            _component(component, letters[component.name], paint_of(index), shapes)
            for index, component in enumerate(plan.components)
        ],
        "shapes": shapes.found,
        "templates": shapes.templates,
        "flows": _flows(plan),
    }


def _spans(ranks: Iterable[int]) -> list[int]:
    """Return ``[first, count, first, count, …]`` for ascending ranks."""
    spans: list[int] = []
    for rank in ranks:
        if spans and spans[-2] + spans[-1] == rank:
            spans[-1] += 1
        else:
            spans += [rank, 1]
    return spans


def _nodes(nodes: Sequence[Node]) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    facts: list[dict[str, Any]] = []
    rows: list[list[Any]] = []
    before: tuple[Any, ...] = ()
    kind = 0
    for node in nodes:
        ids = node.accelerator_ids
        now = (ids, node.accelerator_type.name, node.accelerator_model, node.accelerator_memory_gib, node.cpus,
               node.memory_gib, node.labels, node.hardware)  # fmt: skip
        if now != before:
            is_plain = ids == tuple(str(i) for i in range(len(ids)))
            entry = {
                "count": len(ids),
                "ids": None if is_plain else ids,
                "vendor": node.accelerator_type.name if ids else "",
                "noun": node.accelerator_type.noun if ids else "",
                "model": node.accelerator_model,
                "card": node.accelerator_memory_gib,
                "cpus": node.cpus,
                "memory": node.memory_gib,
                "labels": dict(sorted(node.labels.items())),
                "hardware": [item.type for item in node.hardware],
            }
            kind = kinds.setdefault(repr(sorted(entry.items())), len(facts))
            if kind == len(facts):
                facts.append(entry)
            before = now
        row = [1, kind, node.name, node.address]
        if rows and not node.name and not node.address and rows[-1][1:] == row[1:]:
            rows[-1][0] += 1
        else:
            rows.append(row)
    return {"kinds": facts, "rows": rows}


class _Slot(int):
    """A number whose text is a slot, so that ``worker_environment`` itself can produce the template."""

    def __new__(cls, index: int) -> _Slot:
        return super().__new__(cls, 0)

    def __init__(self, index: int) -> None:
        self.text = f"\ufdd0{index}\ufdd1"

    def __str__(self) -> str:
        return self.text


class _Shapes:
    """The shapes of all components on nodes, without duplicates."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.found: list[list[Any]] = []
        self.templates: list[Any] = []
        self._processes: list[list[Any]] = []
        self._shape_of: dict[tuple[int, ...], int] = {}
        self._template_of: dict[str, int] = {}
        self._environment_of = {
            group.label: {rank: index for index, given in enumerate(group.environments) for rank in given.node_ranks}
            for group in plan.topology.groups
        }

    def runs(self, component: ComponentPlan) -> list[int]:
        """Return ``[first node, number of nodes, first node rank of the component, shape, …]``."""
        runs: list[int] = []
        known: dict[tuple[Any, ...], int] = {}
        transports = self.plan.transport_texts(component.name) or ("",) * component.world_size
        for node, found in groupby(component.placements, key=attrgetter("cluster_node_rank")):
            looks = []
            for placement in found:
                transport = transports[placement.rank]
                key = (_LOOKS(placement), transport, self._variables(placement))
                number = known.get(key)
                if number is None:
                    number = known[key] = self._process(component, placement, transport)
                looks.append(number)
            shape = self._shape_of.setdefault(tuple(looks), len(self.found))
            if shape == len(self.found):
                self.found.append([self._processes[number] for number in looks])
            of_component = placement.placement_node_rank
            if runs and runs[-1] == shape and runs[-4] + runs[-3] == node and runs[-2] + runs[-3] == of_component:
                runs[-3] += 1
            else:
                runs += [node, 1, of_component, shape]
        return runs

    def _variables(self, placement: Placement) -> int:
        """Return a number that is equal for nodes on which a node group sets the same variables."""
        by_node = self._environment_of.get(placement.node_group_label)
        return by_node.get(placement.cluster_node_rank, -1) if by_node else -1

    def _process(self, component: ComponentPlan, placement: Placement, transport: str) -> int:
        locals_, visible = list(placement.local_hardware_ranks), list(placement.visible_accelerators)
        row = [
            locals_,
            0 if visible == [str(local) for local in locals_] else visible,
            placement.local_accelerator_rank,
            placement.local_rank,
            placement.local_world_size,
            self._template(component, placement),
            transport or 0,
        ]
        self._processes.append(row)
        return len(self._processes) - 1

    def _template(self, component: ComponentPlan, placement: Placement) -> int:
        """Return the index of the environment's template. In a template, texts are values and numbers are slots."""
        slots = [_Slot(index) for index in range(len(_SLOTS))]
        with_slots = Placement(
            slots[0],
            placement.cluster_node_rank,
            slots[1],
            slots[2] if placement.local_accelerator_rank >= 0 else -1,
            placement.accelerator_type,
            slots[3],
            slots[4],
            (str(slots[5]),) if placement.visible_accelerators else (),
            placement.isolate_accelerator,
            placement.local_hardware_ranks,
            placement.node_group_label,
        )
        group = self.plan.topology.group(placement.node_group_label)
        texts = {str(slot): index for index, slot in enumerate(slots)}
        variables = worker_environment(with_slots, component.world_size, group)
        template = [
            group.environment(placement.cluster_node_rank).interpreter,
            placement.node_group_label,
            [[name, texts.get(value, value)] for name, value in variables.items()],
        ]
        index = self._template_of.setdefault(repr(template), len(self.templates))
        if index == len(self.templates):
            self.templates.append(template)
        return index


def _component(component: ComponentPlan, letter: str, paint: tuple[str, str], shapes: _Shapes) -> dict[str, Any]:
    return {
        "name": component.name,
        "role": component.role,
        "letter": letter,
        "paint": paint,
        "size": component.world_size,
        "rule": component.rule,
        "groups": component.node_groups,
        "share": component.gpu_share,
        "cpus": component.cpus,
        "memory": component.memory_gib,
        "tp": component.tensor_parallel,
        "pp": component.pipeline_parallel,
        "members": component.processes_per_engine,
        "isEngine": component.role == ENGINE,
        "isReserved": component.placeholder,
        "trains": component.role != ENGINE,
        "generates": component.role not in _TRAINERS,
        "runs": shapes.runs(component),
    }


def _flows(plan: Plan) -> list[dict[str, Any]]:
    """Return the transfer schedules of the weights, with routes instead of single entries."""
    index_of = {component.name: index for index, component in enumerate(plan.components)}
    return [
        {
            "source": index_of[planned.trainer],
            "side": [source.tp, source.pp, source.dp, source.order],
            "receivers": _receiver_runs(planned.receivers, index_of),
            "parts": [
                [part.source_tp, part.source_stage, nbytes, [n for route in part.routes for n in _route(route)]]
                for part, nbytes in planned.schedule.transfer.bundles
            ],
        }
        for planned in plan.weight_schedules
        for source in (planned.schedule.source,)
    ]


def _route(route: Route) -> list[int]:
    distance = DISTANCES.index(route.distance)
    return [route.start, route.stop, route.step, route.source, route.source_step, distance]


def _receiver_runs(receivers: Sequence[tuple[str, int]], index_of: Mapping[str, int]) -> list[int]:
    """Return ``[component, first rank, step, count, …]``."""
    runs: list[int] = []
    for name, rank in receivers:
        index = index_of[name]
        if runs and runs[-4] == index:
            first, step, count = runs[-3:]
            if count == 1 or rank == first + step * count:
                runs[-2:] = [rank - first if count == 1 else step, count + 1]
                continue
        runs += [index, rank, 1, 1]
    return runs


# Findings ----------------------------------------------------------------------------------------

_PLACE = re.compile(r"\bnodes? (\d[\d,-]*)(?: (?:GPU|NPU|XPU|accelerator|[A-Za-z]+) (\d[\d,-]*))?")


def finding_rows(plan: Plan, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return problems and notes, with the accelerators, nodes and components that their texts name."""
    return [
        {
            "code": finding.code,
            "is_problem": finding.is_problem,
            "message": finding.message,
            "place": str(finding.place) if finding.place is not None else "",
            "rule": finding.rule,
            "fixes": [(fix.text, fix.paste) for fix in finding.fixes],
            "cells": _cells(plan, finding.message),
            "components": _components(plan, finding),
        }
        for finding in findings
    ]


def _cells(plan: Plan, message: str) -> list[list[int]]:
    """Return (node, accelerator) of every place that a message names; the accelerator is -1 for a whole node."""
    found: list[list[int]] = []
    for match in _PLACE.finditer(message):
        try:
            nodes = _below(parse_ranks(match[1].rstrip(",-")), plan.topology.num_nodes)
            ranges = parse_ranks(match[2].rstrip(",-")) if match[2] else ()
        except RankError:
            continue
        for node in nodes:
            there = plan.topology.nodes[node].num_accelerators
            found += [[node, local] for local in _below(ranges, there)] if ranges else [[node, -1]]
            if len(found) >= _MOST_CELLS:
                return found[:_MOST_CELLS]
    return found


def _below(ranges: Iterable[range], end: int) -> list[int]:
    return [rank for ranks in ranges for rank in range(ranks.start, min(ranks.stop, end))]


def _components(plan: Plan, finding: Finding) -> list[str]:
    """Return the components that a finding starts with, or that its place in the job file belongs to."""
    words = {word.strip() for word in finding.message.partition(":")[0].split(",")}
    path = finding.place.path.split(".") if finding.place is not None else []
    return [c.name for c in plan.components if c.name in words or c.name in path]

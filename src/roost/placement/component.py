"""``ComponentPlacement``: a strategy for each component of ``cluster.component_placement``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from itertools import chain
from typing import Any

from roost.config import Component, Job, read_job
from roost.errors import Finding, Fix, PlacementError, did_you_mean, raise_problems
from roost.placement.expansion import expand_layout
from roost.placement.language import Segment, parse_placement
from roost.placement.resources import Resources
from roost.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PlacementStrategy,
)
from roost.source import Unresolved
from roost.topology import NODE, Topology

__all__ = ["ComponentPlacement", "HybridComponentPlacement", "PlacementMode"]


MAX_PROBLEMS = 1000
"""Number of problems after which the remaining components are not checked."""


class PlacementMode(Enum):
    """How the components of a job share the accelerators."""

    COLLOCATED = "collocated"
    """Actor and rollout have the same accelerators and take turns."""
    DISAGGREGATED = "disaggregated"
    """Each component has accelerators of its own."""
    HYBRID = "hybrid"
    """Any sets, overlapping or not."""
    AUTO = "auto"
    """Disaggregated, and the actor may grow onto all accelerators."""


Masks = dict[int, int]
"""A set of accelerators: node rank → a bit for each node-local rank, so that its size grows with the nodes."""


def union(sets: Iterable[Masks]) -> Masks:
    """Return the union of several sets."""
    joined: Masks = {}
    for masks in sets:
        for node, bits in masks.items():
            joined[node] = joined.get(node, 0) | bits
    return joined


def count_bits(masks: Masks) -> int:
    """Return the number of accelerators in a set."""
    return sum(bits.bit_count() for bits in masks.values())


class ComponentPlacement:
    """The placements of all components of a job. The constructor checks everything.

    Args:
        config: The result of :func:`roost.load_config`, a mapping, an OmegaConf ``DictConfig``, or a ``Job``.
        cluster: A live cluster or a topology; the job's ``node_groups`` are added to it.

    Raises:
        PlacementError: With every problem of the job, if at least one is about a placement.
        ConfigError: With every problem of the job otherwise.
    """

    def __init__(self, config: Any, cluster: Any) -> None:
        topology = Topology.of(cluster)
        findings: list[Finding] = []
        self.job: Job = read_job(config, findings)
        self.topology: Topology = _topology_of_job(self.job, topology, findings)
        self.notes: list[Finding] = []
        self.job, of_layout = expand_layout(self.job, self.topology, findings, self.notes)
        self._specs: dict[str, Component] = {spec.name: spec for spec in self.job.components}
        self._resources: dict[tuple[str, ...], Resources] = {}
        self._nodes: dict[tuple[str, ...], Resources] = {}
        self._labels_at_fault = self.job.cluster.node_groups.labels - set(self.topology.labels)
        self._segments: dict[str, list[Segment]] = {}
        self._strategies: dict[str, PlacementStrategy] = {}
        parsed: dict[tuple[int, tuple[str, ...]], list[Segment]] = {}  # components of one rule share its segments
        has_nodes = all(finding.code != "C311" for finding in findings)
        for spec in self.job.components if has_nodes else ():  # without enough nodes, ranks cannot be checked
            if len(findings) >= MAX_PROBLEMS:
                break
            resources = self._resources_of(spec, findings)
            if resources is None or not spec.has_placement:
                continue
            if not resources.total and findings:
                continue  # a problem of its node group has been reported
            if spec.name in of_layout:
                self._segments[spec.name] = [of_layout[spec.name]]
                continue
            before = len(findings)
            rule = (id(spec.placement), spec.labels)
            segments = parsed.get(rule)
            if segments is None:
                segments = self._parse(spec, resources, findings)
                parsed[rule] = segments
            if segments and len(findings) == before:
                self._segments[spec.name] = segments
        if not any(finding.is_problem for finding in findings):
            self._decide(findings)
        raise_problems(findings)

    # Steps that a subclass changes ---------------------------------------------------------

    def _parse(self, spec: Component, resources: Resources, findings: list[Finding]) -> list[Segment]:
        if isinstance(spec.placement.value, Unresolved):
            reason = f"{spec.placement.path} could not be resolved: {spec.placement.value.reason}"
            findings.append(Finding("C205", reason, spec.placement.place()))
            return []
        return parse_placement(spec.placement, spec.name, resources, findings)

    def _decide(self, findings: list[Finding]) -> None:
        """Make the strategies after all placements have been parsed without a problem."""
        for name in self._segments:
            self._strategies[name] = self._general_strategy(name)
        self._mode = self._seen_mode()

    # What there is -------------------------------------------------------------------------

    @property
    def placement_mode(self) -> PlacementMode:
        """How the components share the accelerators."""
        return self._mode

    @property
    def components(self) -> list[str]:
        """Names of the components, in the order of the job."""
        return list(self._segments)

    def get_hardware_ranks(self, component_name: str) -> list[int]:
        """Return the resource ranks of a component, ascending, counted in its node groups."""
        return list(chain.from_iterable(segment.resources for segment in self._known(component_name)))

    def get_world_size(self, component_name: str) -> int:
        """Return the number of processes of a component."""
        return self._known(component_name)[-1].processes[-1] + 1

    def get_strategy(self, component_name: str) -> PlacementStrategy:
        """Return the strategy that places a component."""
        self._known(component_name)
        return self._strategies[component_name]

    def spec(self, component_name: str) -> Component:
        """Return a component as written in the job."""
        self._known(component_name)
        return self._specs[component_name]

    def segments(self, component_name: str) -> Sequence[Segment]:
        """Return the parsed placement of a component."""
        return tuple(self._known(component_name))

    # ---------------------------------------------------------------------------------------

    def _known(self, name: str) -> list[Segment]:
        segments = self._segments.get(name)
        if segments is None:
            near = did_you_mean(name, self._segments)
            fixes = (Fix("did you mean", repr(near)),) if near else ()
            rule = "components of this job: " + ", ".join(self._segments)
            raise PlacementError([Finding("P205", f"there is no component {name!r}", rule=rule, fixes=fixes)])
        return segments

    def _resources_of(self, spec: Component, findings: list[Finding]) -> Resources | None:
        if spec.labels in self._resources:
            return self._resources[spec.labels]
        at = spec.label_tree or spec.placement
        unknown = [label for label in spec.labels if not self.topology.has_group(label)]
        for label in unknown:
            if not findings or label not in self._labels_at_fault:
                finding = self.topology.unknown_group(label)
                findings.append(replace(finding, place=at.place(), marks=(at.mark(),)))
        if unknown:
            return None
        try:
            resources = Resources(self.topology, spec.labels)
        except PlacementError as error:
            findings.extend(replace(f, place=at.place(), marks=(at.mark(),)) for f in error.findings)
            return None
        self._resources[spec.labels] = resources
        return resources

    def _general_strategy(self, name: str) -> PlacementStrategy:
        spec = self._specs[name]
        resources = self._resources[spec.labels]
        segments = self._segments[name]
        ranks: list[tuple[int, ...]] = []
        for segment in segments:
            on_nodes = resources.node_of(segment.resources[0]).kind == NODE
            ranks.extend(segment.resources_of_processes(on_nodes))
            if on_nodes:
                self._note_uneven(spec, segment)
        strategy: PlacementStrategy
        if resources.has_hardware:
            strategy = FlexiblePlacementStrategy._trusted(ranks, spec.labels)
        else:
            strategy = NodePlacementStrategy((of_process[0] for of_process in ranks), spec.labels or None)
            if spec.labels not in self._nodes:
                self._nodes[spec.labels] = Resources(self.topology, spec.labels, as_nodes=True)
            resources = self._nodes[spec.labels]
        return strategy._remembering(resources)

    def _note_uneven(self, spec: Component, segment: Segment) -> None:
        each, extra = divmod(len(segment.processes), len(segment.resources))
        if extra:
            first = f"the first {extra}" if extra > 1 else "the first"
            message = (
                f"{spec.name}: {len(segment.processes)} processes on {len(segment.resources)} nodes: "
                f"{each + 1} on {first}, {each} on the others"
            )
            self.notes.append(Finding("N102", message, severity="note"))

    def _accelerators(self, name: str) -> Masks:
        """Return the accelerators of a component."""
        resources = self._resources[self._specs[name].labels]
        found: Masks = {}
        for segment in self._segments[name]:
            for part in resources.nodes_of(segment.resources):
                if part.kind == "accelerator":
                    low = max(segment.resources[0], part.first) - part.first
                    high = min(segment.resources[-1] + 1, part.end) - part.first
                    bits = (1 << high) - (1 << low)
                    found[part.node.rank] = found.get(part.node.rank, 0) | bits
        return found

    def _seen_mode(self) -> PlacementMode:
        """Return the mode of the layout or, without a layout, the mode that the sets of accelerators amount to."""
        if self.job.layout is not None:
            return PlacementMode(self.job.layout.mode)
        sets = {name: self._accelerators(name) for name in self._segments}
        actor, rollout = (
            union(sets[name] for name in sets if self._specs[name].role == role) for role in ("actor", "rollout")
        )
        if actor and actor == rollout:
            return PlacementMode.COLLOCATED
        used = [found for found in sets.values() if found]
        if len(used) > 1 and sum(map(count_bits, used)) == count_bits(union(used)):
            return PlacementMode.DISAGGREGATED
        return PlacementMode.HYBRID


class HybridComponentPlacement(ComponentPlacement):
    """Components on any sets of accelerators, overlapping or not: mode ``HYBRID``."""

    def _seen_mode(self) -> PlacementMode:
        return PlacementMode.HYBRID


def _topology_of_job(job: Job, topology: Topology, findings: list[Finding]) -> Topology:
    """Return the nodes that the job uses, with its node groups."""
    wanted, at = job.cluster.num_nodes, job.cluster.num_nodes_tree
    if wanted is not None and at is not None and wanted > topology.num_nodes:
        findings.append(
            Finding(
                "C311",
                f"the job wants {wanted:,} nodes, and the cluster has {topology.num_nodes:,}",
                at.place(),
                (at.mark(),),
                (f"cluster: {topology.describe()}",),
                fixes=(Fix("use what there is", f"num_nodes: {topology.num_nodes}"),),
            )
        )
    elif wanted is not None:
        topology = topology.first(wanted)
    return topology.adding(job.cluster.node_groups.resolve(topology, findings))

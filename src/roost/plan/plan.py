"""``Plan``: all components of a job at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roost.errors import Finding, Fix, Place, PlacementError, counted, did_you_mean, raise_problems
from roost.placement import (
    ComponentPlacement,
    HybridComponentPlacement,
    ModelParallelComponentPlacement,
    Placement,
    PlacementMode,
)
from roost.placement.resources import collector_paused
from roost.plan.environment import worker_environment
from roost.plan.occupancy import Occupancy
from roost.plan.transport import BytesByTransport, TransportChooser, WeightTransport, transports_text
from roost.source import Tree, as_tree
from roost.topology import Topology

if TYPE_CHECKING:
    from fractions import Fraction

    from roost.plan.planned_schedules import PlannedSchedule

__all__ = ["ComponentPlan", "Plan", "Process"]

TRAINER = "actor"
ENGINE = "rollout"

_MODEL_PARALLEL = ("collocated", "disaggregated", "auto")
_ADDRESS = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*\[\s*([0-9]{1,9})\s*\]\s*\Z", re.ASCII)


@dataclass(frozen=True)
class ComponentPlan:
    """One component, resolved.

    Attributes:
        name: Its name.
        role: What it does in the job.
        placements: One per process, in rank order.
        rule: The placement text it came from.
        node_groups: The groups its ranks were counted in; empty for the whole cluster.
        gpu_share: Fraction of each of its accelerators that a process takes, if declared.
        cpus: CPUs per process, if declared.
        memory_gib: Peak memory of a process on each of its accelerators, if declared.
        tensor_parallel: Size of its tensor-parallel groups.
        transports: For rollout processes, the best transport of weights that the place of each allows; which share
            of its bytes goes that way: :meth:`Plan.transport_shares`.
        places: Where the job file says what, by key; not part of the plan's identity.
        pipeline_parallel: Number of its pipeline stages.
        processes_per_engine: For engines of several nodes: how many processes, one per node, make one.
        placeholder: Reserved only; nothing is started.
    """

    name: str
    role: str
    placements: tuple[Placement, ...]
    rule: str = ""
    node_groups: tuple[str, ...] = ()
    gpu_share: float | None = None
    cpus: float | None = None
    memory_gib: float | None = None
    tensor_parallel: int = 1
    transports: tuple[WeightTransport, ...] = ()
    places: Mapping[str, Place] = field(default_factory=dict, compare=False, repr=False)
    pipeline_parallel: int = 1
    processes_per_engine: int = 1
    placeholder: bool = False

    @property
    def world_size(self) -> int:
        """Number of its processes."""
        return len(self.placements)

    @property
    def accelerators(self) -> dict[int, list[int]]:
        """Node rank → local ranks of all accelerators that it has there."""
        found: dict[int, set[int]] = {}
        for placement in self.placements:
            if placement.accelerators:
                found.setdefault(placement.cluster_node_rank, set()).update(placement.accelerators)
        return {rank: sorted(local) for rank, local in found.items()}

    @property
    def engines(self) -> tuple[tuple[Placement, ...], ...]:
        """Its processes engine by engine; the first of each serves."""
        size = self.processes_per_engine
        return tuple(self.placements[i : i + size] for i in range(0, len(self.placements), size))


@dataclass(frozen=True)
class Process:
    """One process of a plan, with everything that the plan says of it."""

    component: ComponentPlan
    placement: Placement
    environment: dict[str, str]
    interpreter: str
    transport: WeightTransport | None

    def __str__(self) -> str:
        return f"{self.component.name}[{self.placement.rank}]"


@dataclass(frozen=True)
class Plan:
    """Where every process of a job lives. A plain value: no Ray, no GPU, no clock.

    Attributes:
        topology: The nodes that the job uses, with its node groups.
        components: By name.
        mode: How the components share the accelerators.
        notes: What came up while it was resolved.
    """

    topology: Topology
    components: tuple[ComponentPlan, ...]
    mode: PlacementMode = PlacementMode.HYBRID
    notes: tuple[Finding, ...] = ()

    @staticmethod
    def resolve(config: Any, topology: Any) -> Plan:
        """Resolves all components of a job.

        Args:
            config: What :func:`roost.load_config` gives, a mapping, or a ``DictConfig``.
            topology: A topology or a live cluster.

        Raises:
            RoostError: With everything that cannot be resolved.
        """
        with collector_paused():
            return Plan._resolve(as_tree(config), Topology.of(topology))

    @staticmethod
    def _resolve(tree: Tree, whole: Topology) -> Plan:
        placed = _placement_class(tree)(tree, whole)
        notes = list(placed.notes)
        if placed.topology.num_nodes < whole.num_nodes:
            used, there = placed.topology.num_nodes, whole.num_nodes
            first = "node 0" if used == 1 else f"nodes 0-{used - 1}"
            message = f"the job uses {first} of {there:,} nodes (num_nodes: {used})"
            notes.append(Finding("N108", message, severity="note"))
        by_name = {name: tuple(placed.get_strategy(name).get_placement(placed.topology)) for name in placed.components}
        trainer = [p for name in by_name if placed.spec(name).role == TRAINER for p in by_name[name]]
        if placed.placement_mode is PlacementMode.AUTO:  # it may grow over all; it begins on its own
            trainer = trainer[: getattr(placed, "actor_world_size", 0)]
        transport_chooser = TransportChooser(trainer)
        components = []
        findings: list[Finding] = []
        for name in sorted(by_name):
            spec = placed.spec(name)
            tensor_parallel = max(
                placed.job.size(spec, "model.tensor_model_parallel_size", findings),
                placed.job.size(spec, "tensor_parallel_size", findings),
            )
            pipeline_parallel = max(
                placed.job.size(spec, "model.pipeline_model_parallel_size", findings),
                placed.job.size(spec, "pipeline_parallel_size", findings),
            )
            is_engine = spec.role == ENGINE and not spec.placeholder
            transports = transport_chooser.choose(by_name[name]) if is_engine else ()
            components.append(
                ComponentPlan(
                    name,
                    spec.role,
                    by_name[name],
                    " ".join(spec.placement.text.split()),
                    spec.labels,
                    spec.gpu_share,
                    spec.cpus,
                    spec.memory_gib,
                    tensor_parallel,
                    transports,
                    {key: tree.place() for key, tree in spec.entry.items() if tree.is_scalar},
                    pipeline_parallel,
                    spec.processes_per_engine,
                    spec.placeholder,
                )
            )
        raise_problems(findings)
        notes.sort(key=lambda note: (note.code, note.message))
        return Plan(placed.topology, tuple(components), placed.placement_mode, tuple(notes))

    # Questions -----------------------------------------------------------------------------

    def component(self, name: str) -> ComponentPlan:
        """The component of that name.

        Raises:
            PlacementError: Where there is none.
        """
        found = self._by_name.get(name)
        if found is None:
            near = did_you_mean(name, self._by_name)
            fixes = (Fix("did you mean", near),) if near else ()
            rule = "components: " + ", ".join(self._by_name)
            raise PlacementError([Finding("P205", f"there is no component {name!r}", rule=rule, fixes=fixes)])
        return found

    def process(self, component: str, rank: int | None = None) -> Process:
        """One process: ``plan.process("actor", 3)`` or ``plan.process("actor[3]")``.

        Raises:
            PlacementError: Where there is none.
        """
        if rank is None:
            match = _ADDRESS.match(component)
            if match is None:
                message = f"{component!r} is not a process"
                fixes = (Fix("a component and a rank", "actor[3]"),)
                raise PlacementError([Finding("P206", message, fixes=fixes)])
            component, rank = match[1], int(match[2])
        found = self.component(component)
        if not isinstance(rank, int) or not 0 <= rank < found.world_size:
            message = f"{component} has {counted(found.world_size, 'process')}, and no rank {rank}"
            fixes = (Fix("the last one", f"{component}[{found.world_size - 1}]"),)
            raise PlacementError([Finding("P206", message, fixes=fixes)])
        placement = found.placements[rank]
        group = self.topology.group(placement.node_group_label)
        return Process(
            found,
            placement,
            worker_environment(placement, found.world_size, group),
            group.environment(placement.cluster_node_rank).interpreter,
            found.transports[rank] if found.transports else None,
        )

    def environment(self, component: str, rank: int) -> dict[str, str]:
        """The environment of one process."""
        return self.process(component, rank).environment

    def transport_shares(self, component: str, rank: int) -> dict[WeightTransport, Fraction]:
        """Return the share of a rollout process's weights that each transport carries.

        Returns:
            Transports with their shares, the largest first; the shares add up to 1. Empty if the plan does not
            determine them: for other roles, without a trainer, or if the trainer's parallel sizes do not fit.
        """
        from fractions import Fraction

        found = self._bytes_by_transport.get(component)
        sizes = found[rank] if found else {}
        total = sum(sizes.values())
        return {transport: Fraction(size, total) for transport, size in sizes.items()}

    def transport_texts(self, component: str) -> tuple[str, ...]:
        """Return for each process of a component text such as ``ipc`` or ``1/2 ipc, 1/2 shared_memory``.

        Empty if the component receives no weights.
        """
        found = self._bytes_by_transport.get(component)
        if found:
            return tuple(map(transports_text, found))
        return tuple(transport.value for transport in self.component(component).transports)

    @cached_property
    def weight_schedules(self) -> tuple[PlannedSchedule, ...]:
        """Which trainer rank sends which share of the weights to which engine, and by which transport.

        Empty if the plan does not determine it: see :func:`~roost.plan.planned_schedules.plan_schedules`.
        """
        from roost.plan.planned_schedules import plan_schedules

        return plan_schedules(self)

    @cached_property
    def _bytes_by_transport(self) -> dict[str, tuple[BytesByTransport, ...]]:
        from roost.plan.planned_schedules import bytes_by_transport

        return bytes_by_transport(self)

    def on_accelerator(self, node_rank: int, accelerator: int) -> list[tuple[str, int]]:
        """The processes on an accelerator, as (component, rank)."""
        return [
            (component.name, placement.rank)
            for component in self.components
            for placement in component.placements
            if placement.cluster_node_rank == node_rank and accelerator in placement.accelerators
        ]

    @property
    def shared_accelerators(self) -> list[tuple[int, int]]:
        """Accelerators with more than one process, as (node rank, local rank)."""
        where, members = self.occupancy.where(), self.occupancy.members
        return sorted(at for crowd, places in where.items() if sum(members(crowd).values()) > 1 for at in places)

    @property
    def idle_accelerators(self) -> list[tuple[int, int]]:
        """Accelerators that nobody uses, as (node rank, local rank)."""
        return self.occupancy.where().get(0, [])

    @cached_property
    def occupancy(self) -> Occupancy:
        """Who is on each accelerator."""
        return Occupancy(self.topology, self.components)

    @cached_property
    def _by_name(self) -> dict[str, ComponentPlan]:
        return {component.name: component for component in self.components}

    def _repr_html_(self) -> str | None:
        """Return the picture that a notebook shows."""
        import roost  # the package's front knows the reports, which stand above this room

        return roost.draw_image(self)

    # Judgement and keeping -----------------------------------------------------------------

    def check(self) -> list[Finding]:
        """What stands against a launch (problems), and what is worth knowing (notes)."""
        from roost.plan.checks import check_plan

        return check_plan(self)

    def to_json(self) -> str:
        """JSON text, byte-identical for equal plans; :meth:`from_json` is its inverse."""
        from roost.plan.serial import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of :meth:`to_json`.

        Raises:
            ConfigError: Where the text is not a plan.
        """
        from roost.plan.serial import plan_from_json

        return plan_from_json(text)


def _placement_class(tree: Any) -> type[ComponentPlacement]:
    """The reader of a job's placement mode; a mode that is wrong is complained about by any of them."""
    mode, auto = tree.find("cluster.placement_mode"), tree.find("cluster.auto_scheduler")
    if (mode is not None and mode.value in _MODEL_PARALLEL) or (auto is not None and auto.value is True):
        return ModelParallelComponentPlacement
    if mode is not None and mode.value == "hybrid":
        return HybridComponentPlacement
    return ComponentPlacement

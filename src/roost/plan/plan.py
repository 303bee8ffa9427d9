"""``Plan``: all components of a job, resolved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roost.config import Job, read_job
from roost.errors import Finding, Fix, Place, PlacementError, counted, did_you_mean, raise_problems
from roost.placement import (
    ComponentPlacement,
    HybridComponentPlacement,
    ModelParallelComponentPlacement,
    Placement,
    PlacementMode,
)
from roost.plan.environment import worker_environment
from roost.plan.occupancy import Occupancy
from roost.plan.transport import BytesByTransport, TransportChooser, WeightTransport, transports_text
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
        role: Its role, such as ``actor``.
        placements: One placement per process, in rank order.
        rule: The placement text of the job file.
        node_groups: The node groups whose hardware its placement counts; empty for the whole cluster.
        gpu_share: Fraction of each of its accelerators that a process takes, if declared.
        cpus: CPUs per process, if declared.
        memory_gib: Peak memory of a process on each of its accelerators, if declared.
        tensor_parallel: Size of its tensor-parallel groups.
        transports: For rollout processes, the best weight transport that each place allows.
            :meth:`Plan.transport_shares` gives the share of bytes that each transport carries.
        places: Places in the job file, by key. Not compared.
        pipeline_parallel: Number of its pipeline stages.
        processes_per_engine: Number of processes, one per node, of an engine that spans nodes; else 1.
        placeholder: Whether its accelerators are only reserved, and nothing is started.
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
        """Local ranks of its accelerators, by node rank."""
        found: dict[int, set[int]] = {}
        for placement in self.placements:
            if placement.accelerators:
                found.setdefault(placement.cluster_node_rank, set()).update(placement.accelerators)
        return {rank: sorted(local) for rank, local in found.items()}

    @property
    def engines(self) -> tuple[tuple[Placement, ...], ...]:
        """Its processes, grouped by engine. The first process of an engine serves."""
        size = self.processes_per_engine
        return tuple(self.placements[i : i + size] for i in range(0, len(self.placements), size))


@dataclass(frozen=True)
class Process:
    """One process of a plan."""

    component: ComponentPlan
    placement: Placement
    environment: dict[str, str]
    interpreter: str
    transport: WeightTransport | None

    def __str__(self) -> str:
        return f"{self.component.name}[{self.placement.rank}]"


@dataclass(frozen=True)
class Plan:
    """The place of every process of a job. A plain value that needs neither Ray nor a GPU.

    Attributes:
        topology: The nodes that the job uses, with its node groups.
        components: Its components, sorted by name.
        mode: How the components share the accelerators.
        notes: Notes from resolving the job.
    """

    topology: Topology
    components: tuple[ComponentPlan, ...]
    mode: PlacementMode = PlacementMode.HYBRID
    notes: tuple[Finding, ...] = ()

    @staticmethod
    def resolve(config: Any, topology: Any) -> Plan:
        """Resolve all components of a job.

        Args:
            config: The result of :func:`roost.load_config`, a mapping, or a ``DictConfig``.
            topology: A topology or a live cluster.

        Raises:
            RoostError: With all problems of the job.
        """
        return Plan._resolve(read_job(config, []), Topology.of(topology))

    @staticmethod
    def _resolve(job: Job, whole: Topology) -> Plan:
        placed = _placement_class(job)(job, whole)
        notes = list(placed.notes)
        if placed.topology.num_nodes < whole.num_nodes:
            used, there = placed.topology.num_nodes, whole.num_nodes
            first = "node 0" if used == 1 else f"nodes 0-{used - 1}"
            message = f"the job uses {first} of {there:,} nodes (num_nodes: {used})"
            notes.append(Finding("N108", message, severity="note"))
        by_name = {name: tuple(placed.get_strategy(name).get_placement(placed.topology)) for name in placed.components}
        trainer = [p for name in by_name if placed.spec(name).role == TRAINER for p in by_name[name]]
        if placed.placement_mode is PlacementMode.AUTO:  # it starts on its own accelerators, and may grow over all
            trainer = trainer[: getattr(placed, "actor_world_size", 0)]
        transport_chooser = TransportChooser(trainer)
        components = []
        findings: list[Finding] = []
        for name in sorted(by_name):
            spec = placed.spec(name)
            sizes = job.sizes_of(spec.name, spec.role)
            findings += sizes.problems
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
                    sizes.tensor,
                    transports,
                    spec.places(),
                    sizes.pipeline,
                    spec.processes_per_engine,
                    spec.placeholder,
                )
            )
        raise_problems(findings)
        notes.sort(key=lambda note: (note.code, note.message))
        return Plan(placed.topology, tuple(components), placed.placement_mode, tuple(notes))

    # Queries -------------------------------------------------------------------------------

    def component(self, name: str) -> ComponentPlan:
        """Return the component with a name.

        Raises:
            PlacementError: If there is none (P205).
        """
        found = self._by_name.get(name)
        if found is None:
            near = did_you_mean(name, self._by_name)
            fixes = (Fix("did you mean", near),) if near else ()
            rule = "components: " + ", ".join(self._by_name)
            raise PlacementError([Finding("P205", f"there is no component {name!r}", rule=rule, fixes=fixes)])
        return found

    def process(self, component: str, rank: int | None = None) -> Process:
        """Return one process: ``plan.process("actor", 3)`` or ``plan.process("actor[3]")``.

        Raises:
            PlacementError: If there is no such component (P205) or rank (P206).
        """
        if rank is None:
            match = _ADDRESS.match(component)
            if match is None:
                message = f"{component!r} does not name a process"
                fixes = (Fix("a component and a rank", "actor[3]"),)
                raise PlacementError([Finding("P206", message, fixes=fixes)])
            component, rank = match[1], int(match[2])
        found = self.component(component)
        if not isinstance(rank, int) or not 0 <= rank < found.world_size:
            message = f"{component} has {counted(found.world_size, 'process')}; there is no rank {rank}"
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
        """Return the environment variables of one process."""
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
        """Return the processes on an accelerator, as (component, rank)."""
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
        """Accelerators without a process, as (node rank, local rank)."""
        return self.occupancy.where().get(0, [])

    @cached_property
    def occupancy(self) -> Occupancy:
        """The processes on each accelerator."""
        return Occupancy(self.topology, self.components)

    @cached_property
    def _by_name(self) -> dict[str, ComponentPlan]:
        return {component.name: component for component in self.components}

    def _repr_html_(self) -> str | None:
        """Return the picture that a notebook shows."""
        import roost  # draw_image is in report, which this room may not import

        return roost.draw_image(self)

    # Checks and JSON -----------------------------------------------------------------------

    def check(self) -> list[Finding]:
        """Return the findings of the plan: problems, which forbid a launch, then notes."""
        from roost.plan.checks import check_plan

        return check_plan(self)

    def to_json(self) -> str:
        """Return JSON text, byte-identical for equal plans; :meth:`from_json` is its inverse."""
        from roost.plan.serial import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan of a JSON text; the inverse of :meth:`to_json`.

        Raises:
            ConfigError: If the text is not a plan (C401).
        """
        from roost.plan.serial import plan_from_json

        return plan_from_json(text)


def _placement_class(job: Job) -> type[ComponentPlacement]:
    """Return the class that places the components of a job, by the mode that the job insists on."""
    if job.placement_mode in _MODEL_PARALLEL:
        return ModelParallelComponentPlacement
    if job.placement_mode == "hybrid":
        return HybridComponentPlacement
    return ComponentPlacement

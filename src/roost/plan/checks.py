"""Checks of a resolved plan: problems that forbid a launch, and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from roost.errors import Finding, Fix, counted
from roost.placement import PlacementMode
from roost.plan.transport import WeightTransport
from roost.ranks import format_ranks

if TYPE_CHECKING:
    from roost.plan.plan import ComponentPlan, Plan

__all__ = ["check_plan"]

_SLACK = 1e-6


def check_plan(plan: Plan) -> list[Finding]:
    """Return all findings, problems first."""
    findings = [*_check_accelerators(plan), *_check_cpus(plan), *plan.notes, *_check_components(plan)]
    return sorted(findings, key=lambda finding: (not finding.is_problem, finding.code))


def _check_accelerators(plan: Plan) -> Iterator[Finding]:
    where = plan.occupancy.where()
    idle = where.pop(0, [])
    if idle:
        total = plan.topology.num_accelerators
        yield _note(
            "N101",
            f"{len(idle):,} of {counted(total, plan.topology.noun)} are idle: {_places(idle, plan.topology.noun)}",
        )
    if plan.mode is PlacementMode.AUTO:
        yield _note("N112", "auto: the actor may grow over all accelerators, so shares and memory are not checked")
        return
    undeclared: dict[str, int] = {}
    for crowd in sorted(where):
        members = [(plan.components[i], n) for i, n in plan.occupancy.members(crowd).items()]
        yield from _check_shares(plan, members, where[crowd])
        yield from _check_memory(plan, members, where[crowd])
        if sum(n for _, n in members) > 1:
            for component, _ in members:
                if component.gpu_share is None:
                    undeclared[component.name] = undeclared.get(component.name, 0) + len(where[crowd])
    unknown = [
        at for places in where.values() for at in places if plan.topology.nodes[at[0]].accelerator_memory_gib is None
    ]
    if unknown and any(component.memory_gib is not None for component in plan.components):
        message = f"{_places(sorted(unknown), plan.topology.noun)}: memory_gib cannot be checked: the memory of these accelerators is unknown"
        yield _note("N107", message, (Fix("declare it in a cluster file", "accelerators: {count: 8, memory_gib: 80}"),))
    if undeclared:
        names = ", ".join(undeclared)
        most = max(undeclared.values())
        yield _note(
            "N103",
            f"{names}: shared GPUs (up to {most:,}) without a declared gpu_share: their shares are not checked",
            (Fix("for example", "gpu_share: 0.8"),),
        )


def _check_shares(plan: Plan, members: list[tuple[ComponentPlan, int]], at: list[tuple[int, int]]) -> Iterator[Finding]:
    shares = [(c.name, c.gpu_share, n) for c, n in members if c.gpu_share is not None]
    total = sum(share * n for _, share, n in shares)
    if total > 1 + _SLACK:
        worst = max((c for c, _ in members if c.gpu_share is not None), key=lambda c: (c.gpu_share or 0.0, c.name))
        even = int(100 / sum(n for _, _, n in shares)) / 100
        yield Finding(
            "K101",
            f"{_places(at, plan.topology.noun)}: shares add up to {total:g}: {_sum_text(shares)}",
            worst.places.get("gpu_share"),
            context=(f"cluster: {plan.topology.describe()}",),
            rule="the shares of one GPU add up to 1 at most",
            fixes=(Fix("equal parts", f"gpu_share: {even:g}"),) if even else (),
        )


def _check_memory(plan: Plan, members: list[tuple[ComponentPlan, int]], at: list[tuple[int, int]]) -> Iterator[Finding]:
    members = [(c, n) for c, n in members if not c.placeholder]
    needs = [(c.name, c.memory_gib, n) for c, n in members if c.memory_gib is not None]
    total = sum(need * n for _, need, n in needs)
    if not needs:
        return
    by_memory: dict[float | None, list[tuple[int, int]]] = {}
    for place in at:
        by_memory.setdefault(plan.topology.nodes[place[0]].accelerator_memory_gib, []).append(place)
    for memory_gib, places in by_memory.items():
        if memory_gib is not None and total > memory_gib + _SLACK:
            largest = max(
                (c for c, _ in members if c.memory_gib is not None), key=lambda c: (c.memory_gib or 0.0, c.name)
            )
            yield Finding(
                "K102",
                f"{_places(places, plan.topology.noun)}: {total:g} GiB on an accelerator with {memory_gib:g} GiB: {_sum_text(needs)}",
                largest.places.get("memory_gib"),
                context=(f"cluster: {plan.topology.describe()}",),
                rule="memory_gib of all processes on a GPU fits its memory",
                fixes=(Fix("more GPUs for it, a smaller share, or offload between phases"),),
            )


def _check_cpus(plan: Plan) -> Iterator[Finding]:
    wanted: dict[int, dict[int, int]] = {}
    for index, component in enumerate(plan.components):
        if component.cpus is None or component.placeholder:
            continue
        for placement in component.placements:
            on_node = wanted.setdefault(placement.cluster_node_rank, {})
            on_node[index] = on_node.get(index, 0) + 1
    unknown = [rank for rank in sorted(wanted) if plan.topology.nodes[rank].cpus is None]
    if unknown:
        message = f"{_nodes(unknown)}: cpus cannot be checked: the number of CPUs is unknown"
        yield _note("N113", message, (Fix("declare it in a cluster file", "cpus: 128"),))
    short: dict[tuple[float, tuple[tuple[int, int], ...]], list[int]] = {}
    for rank, on_node in sorted(wanted.items()):
        available = plan.topology.nodes[rank].cpus
        if available is not None:
            short.setdefault((available, tuple(sorted(on_node.items()))), []).append(rank)
    for (available, counts), ranks in short.items():
        parts = [(plan.components[i].name, plan.components[i].cpus or 0.0, n) for i, n in counts]
        total = sum(cpus * n for _, cpus, n in parts)
        if total <= available + _SLACK:
            continue
        most = max((plan.components[i] for i, _ in counts), key=lambda c: ((c.cpus or 0.0) * c.world_size, c.name))
        yield Finding(
            "K103",
            f"{_nodes(ranks)}: {total:g} CPUs are requested and {available:g} are available: {_sum_text(parts)}",
            most.places.get("cpus"),
            rule="cpus of all processes on a node fit its CPUs",
            fixes=(Fix("fewer CPUs per process, or fewer processes"),),
        )


def _check_components(plan: Plan) -> Iterator[Finding]:
    crowded = _crowded_accelerators(plan)
    for index, component in enumerate(plan.components):
        yield from _check_engines(component)
        yield from _check_tensor_parallel(component)
        yield from _check_models(plan, component)
        yield from _check_transports(plan, component)
        if component.role in ("actor", "critic") and index in crowded:
            yield _double_ranks(plan, component, crowded[index])


def _check_engines(component: ComponentPlan) -> Iterator[Finding]:
    count, size = component.world_size, component.processes_per_engine
    if count % size:
        fits = max(n for n in range(1, size + 1) if count % n == 0)
        yield Finding(
            "K104",
            f"{component.name}: {counted(count, 'process')} cannot make engines of {size}",
            component.places.get("processes_per_engine"),
            rule="the processes of a component are a multiple of processes_per_engine",
            fixes=(Fix("one that divides", f"processes_per_engine: {fits}"),),
        )


def _check_tensor_parallel(component: ComponentPlan) -> Iterator[Finding]:
    tp = component.tensor_parallel
    if tp < 2 or not component.placements or component.placements[0].local_accelerator_rank < 0:
        return
    per_process = len(component.placements[0].local_hardware_ranks)
    if per_process * component.processes_per_engine >= tp:
        return
    if component.role == "rollout":
        yield _note(
            "N109",
            f"{component.name}: tensor_parallel_size is {tp}, but a process has {counted(per_process, 'GPU')}",
            (
                Fix("derive engines from the sizes", "placement_mode: collocated"),
                Fix("or place them", "rollout: 0-7:0-3"),
            ),
        )
        return
    size = tp // per_process
    nodes = [placement.cluster_node_rank for placement in component.placements]
    crossing = [i for i in range(0, len(nodes) - size + 1, size) if nodes[i] != nodes[i + size - 1]]
    if crossing:
        first = crossing[0]
        yield _note(
            "N105",
            f"{component.name}: {len(crossing):,} tensor-parallel groups cross nodes, the first is ranks "
            f"{first}-{first + size - 1}: their traffic leaves NVLink",
        )


def _check_models(plan: Plan, component: ComponentPlan) -> Iterator[Finding]:
    nodes = plan.topology.nodes
    ranks = {p.cluster_node_rank for p in component.placements if p.local_accelerator_rank >= 0}
    models = sorted({(nodes[rank].accelerator_type.name, nodes[rank].accelerator_model) for rank in ranks})
    if len(models) > 1:
        names = ", ".join(model or vendor for vendor, model in models)
        yield _note("N106", f"{component.name}: its GPUs are of different models: {names}")


def _check_transports(plan: Plan, component: ComponentPlan) -> Iterator[Finding]:
    found = Counter(plan.transport_texts(component.name))
    if len(found) > 1:
        between = "; " if any("," in text for text in found) else ", "
        counts = between.join(f"{count:,} by {text}" for text, count in sorted(found.items()))
        yield _note("N104", f"{component.name}: weights reach its processes by different transports: {counts}")
    if WeightTransport.FILE in component.transports:
        yield _note(
            "N110",
            f"{component.name}: its accelerators are of another vendor than the trainer's, so weights go through files",
        )


def _crowded_accelerators(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Return, by component index, the accelerators that hold more than one process of that component."""
    crowded: dict[int, list[tuple[int, int]]] = {}
    for crowd, places in plan.occupancy.where().items():
        for index, count in plan.occupancy.members(crowd).items():
            if count > 1:
                crowded.setdefault(index, []).extend(places)
    return crowded


def _double_ranks(plan: Plan, component: ComponentPlan, at: list[tuple[int, int]]) -> Finding:
    message = (
        f"{component.name}: several of its ranks share one GPU ({_places(at, plan.topology.noun)}), which NCCL refuses"
    )
    return _note("N111", message, (Fix("one process per GPU", f"{component.name}: 0-7"),))


def _note(code: str, message: str, fixes: tuple[Fix, ...] = ()) -> Finding:
    return Finding(code, message, fixes=fixes, severity="note")


def _sum_text(parts: Iterable[tuple[str, float | None, int]]) -> str:
    return " + ".join(f"{name} {n} x {value:g}" if n > 1 else f"{name} {value:g}" for name, value, n in parts)


def _nodes(ranks: list[int]) -> str:
    return f"node {ranks[0]}" if len(ranks) == 1 else f"nodes {format_ranks(ranks)}"


def _places(at: list[tuple[int, int]], noun: str) -> str:
    """Return such as ``nodes 0-3 GPU 4-7``. Nodes with the same local ranks share an entry."""
    by_node: dict[int, list[int]] = {}
    for node, local in at:
        by_node.setdefault(node, []).append(local)
    by_locals: dict[str, list[int]] = {}
    for node, local_ranks in by_node.items():
        by_locals.setdefault(format_ranks(local_ranks), []).append(node)
    parts = [f"{_nodes(nodes)} {noun} {text}" for text, nodes in by_locals.items()]
    more = f"; … {len(parts) - 4} more" if len(parts) > 4 else ""
    shown = "; ".join(parts[:4])
    return (shown if len(shown) <= 160 else shown[:159] + "…") + more

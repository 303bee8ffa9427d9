"""The explanation of one process: its place, the rule behind it, its weights and its environment."""

from __future__ import annotations

from rich.text import Text

from roost.errors import Finding
from roost.placement import PlacementMode
from roost.placement.language import Segment, parse_placement
from roost.placement.resources import Resources
from roost.plan import Plan, Process, WeightTransport
from roost.ranks import format_ranks
from roost.report.columns import align
from roost.report.weights import weight_lines
from roost.source import Tree
from roost.topology import NODE

__all__ = ["explain_process"]

_TRANSPORTS = {
    "ipc": "in place, by CUDA IPC: the trainer is on the same GPUs",
    "shared_memory": "through shared memory: the trainer is on the same node",
    "broadcast": "by collective broadcast: the trainer is on other GPUs",
    "file": "through files: the trainer's accelerators are of another vendor",
}
_TRANSPORT_SHARES = {
    "ipc": "in place, by CUDA IPC: the part of trainer ranks on the engine's own GPUs",
    "shared_memory": "through host memory: the part of trainer ranks on other GPUs of the node",
    "broadcast": "by collective broadcast: the part of trainer ranks on other nodes",
}
_UNKNOWN_SHARES = (
    "in place, by CUDA IPC, for the part that the trainer has on the same GPUs; the rest through host memory"
)


def explain_process(plan: Plan, process: Process) -> Text:
    """Return what ``roost explain`` shows of a process."""
    title = Text.assemble((str(process), "bold"), f" goes to {_where(plan, process)}\n")
    facts = align([[Text(f"  {name}", style="dim"), text] for name, text in _facts(plan, process)], gap=2, header=False)
    environment = "".join(f"\n    {key}={value}" for key, value in process.environment.items())
    return title.append_text(facts).append("\n  environment", style="dim").append(environment)


def _where(plan: Plan, process: Process) -> str:
    placement = process.placement
    node = plan.topology.nodes[placement.cluster_node_rank]
    text = f"node {node.rank}"
    details = ", ".join(word for word in (node.name, node.address) if word)
    text += f" ({details})" if details else ""
    own = placement.accelerators
    if own:
        text += f", {placement.accelerator_type.noun}{'s' if len(own) > 1 else ''} {format_ranks(own)}"
    elif placement.local_hardware_ranks:
        kind = plan.topology.group(placement.node_group_label).hardware_type
        text += f", {kind} {format_ranks(placement.local_hardware_ranks)}"
    return text


def _facts(plan: Plan, process: Process) -> list[tuple[str, str]]:
    component, placement = process.component, process.placement
    facts = [("rule", f"{component.name}: {component.rule}")]
    facts += [("", line) for line in _reasons(plan, process)]
    rank, size = placement.local_rank, placement.local_world_size
    facts.append(
        ("on the node", f"local rank {rank} of {size}, node rank {placement.placement_node_rank} of the component")
    )
    others = {
        other
        for local in placement.accelerators
        for other in plan.on_accelerator(placement.cluster_node_rank, local)
        if other != (component.name, placement.rank)
    }
    neighbours = [f"{name}[{rank}]" for name, rank in sorted(others)]
    if neighbours:
        more = f", … {len(neighbours) - 12} more" if len(neighbours) > 12 else ""
        facts.append(("shares with", ", ".join(neighbours[:12]) + more))
    if component.processes_per_engine > 1:
        engine, member = divmod(placement.rank, component.processes_per_engine)
        facts.append(("engine", f"{engine}, member {member} of {component.processes_per_engine}"))
    if component.gpu_share is not None:
        facts.append(("share", f"{component.gpu_share:g} of each of its GPUs"))
    weights = [*_transport_lines(plan, process), *weight_lines(plan, process)]
    facts += [("" if i else "weights", line) for i, line in enumerate(weights)]
    if process.interpreter:
        facts.append(("interpreter", process.interpreter))
    return facts


def _transport_lines(plan: Plan, process: Process) -> list[str]:
    """Return how a process gets its weights, the largest share first."""
    if process.transport is None:
        return []
    shares = plan.transport_shares(process.component.name, process.placement.rank)
    if len(shares) > 1:
        return [f"{share} {_TRANSPORT_SHARES[transport.value]}" for transport, share in shares.items()]
    if not shares and process.transport is WeightTransport.IPC:
        return [_UNKNOWN_SHARES]
    used = next(iter(shares), process.transport)
    return [_TRANSPORTS[used.value]]


def _reasons(plan: Plan, process: Process) -> list[str]:
    """Return why a process has its place: the placement segment that names it, and the hardware that ranks count."""
    component, placement = process.component, process.placement
    resources = Resources(plan.topology, component.node_groups)
    findings: list[Finding] = []
    segments = parse_placement(Tree(component.rule), component.name, resources, findings)
    counted = " + ".join(component.node_groups) or "the whole cluster"
    lines = [f"ranks count the {resources.noun(count=2)} of {counted}: {resources.counted(resources.total)}"]
    segment = next((s for s in segments if placement.rank in s.processes), None) if not findings else None
    if segment is not None and segments[-1].processes[-1] + 1 == component.world_size:
        given = _resources_of(segment, resources, placement.rank)
        spans = [resources.node_of(rank) for rank in given]
        local = tuple(rank - span.first for rank, span in zip(given, spans, strict=True) if span.kind != NODE)
        if spans[0].node.rank == placement.cluster_node_rank and local == placement.local_hardware_ranks:
            return [*lines, _segment_reason(segment, resources, placement.rank)]
    if plan.mode is PlacementMode.AUTO and component.role == "actor":
        return [*lines, "auto: one process on every accelerator, so that the actor can grow"]
    per_process = len(placement.local_hardware_ranks)
    return [*lines, f"{plan.mode.value}: the parallel sizes make {component.world_size} processes of {per_process}"]


def _resources_of(segment: Segment, resources: Resources, rank: int) -> tuple[int, ...]:
    """Return the resource ranks that a segment assigns to a process."""
    on_nodes = resources.node_of(segment.resources[0]).kind == NODE
    shares = zip(segment.processes, segment.resources_of_processes(on_nodes), strict=True)
    return next(share for process, share in shares if process == rank)


def _segment_reason(segment: Segment, resources: Resources, rank: int) -> str:
    first = resources.node_of(segment.resources[0])
    noun = resources.noun(first, 2)
    text = f"{format_ranks(segment.resources)}:{format_ranks(segment.processes)} puts "
    text += f"{len(segment.processes)} processes on {len(segment.resources)} {noun}"
    ratio = len(segment.resources) / len(segment.processes)
    if ratio > 1:
        text += f", {ratio:g} each"
    elif ratio < 1:
        text += f", about {1 / ratio:g} on each" if (1 / ratio) % 1 else f", {1 / ratio:g} on each"
    share = _resources_of(segment, resources, rank)
    return f"{text}; process {rank} gets {resources.noun(first)} rank {format_ranks(share)}"

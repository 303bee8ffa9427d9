"""Turn ``cluster.layout`` into components, placed on the nodes of a topology."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from roost.config import Component, Job
from roost.config.layout import LayoutSection
from roost.errors import Finding, Fix, PlacementError, counted
from roost.placement.language import Segment, format_segments
from roost.placement.layouts import EngineShare, Layout, resolve_layout
from roost.source import Tree
from roost.topology import Topology

__all__ = ["PlacedComponent", "expand_layout"]

PlacedComponent = tuple[Component, Segment]
"""A component of a layout, and its placement."""

_NOTES = {
    "debug_train_only": "debug_train_only: no engines are placed; the trainer lives on saved rollouts",
    "debug_rollout_only": "debug_rollout_only: no trainer is placed; engines keep the weights that they start with",
    "external_engines": "external_engines: engines run elsewhere; none is placed",
}


def expand_layout(
    job: Job, topology: Topology, findings: list[Finding], notes: list[Finding]
) -> tuple[Job, dict[str, Segment]]:
    """Return the job with the components of its layout before its other components, and their placements by name.

    Args:
        job: A job; a job without a layout is returned as it is.
        topology: The nodes that the job uses.
        findings: Where problems go, each with the place of the number that it is about.
        notes: Where notes go.
    """
    section = job.layout
    if section is None or any(finding.is_problem for finding in findings):
        return job, {}
    sizes = [node.num_accelerators for node in topology.nodes if node.num_accelerators]
    found = [*_check_machines(section, topology, sizes)]
    layout: Layout | None = None
    if not found:
        try:
            layout = _resolve(section, sizes)
        except PlacementError as error:
            found += [_placed(finding, section, topology) for finding in error.findings]
    if layout is None:
        findings += found
        return job, {}
    found += _check_layout(section, layout)
    placed = [*_trainers(section, layout), *_engines(section, layout)]
    components = [component for component, _ in placed]
    if not components:
        message = "the layout places nothing"
        fix = Fix("say how many GPUs there are to place on", "rollout_num_gpus: 8")
        found.append(_finding("P411", message, section.tree, fixes=(fix,)))
    names = {"actor", "rollout", *(component.name for component in components)}
    found += [_twice(component) for component in job.components if component.name in names]
    findings += found
    notes += _notes(section, layout, sizes)
    mode = section.mode or _seen_mode(section, layout)
    whole = replace(job, components=(*components, *job.components), layout=replace(section, mode=mode))
    return whole, {component.name: segment for component, segment in placed}


def _resolve(section: LayoutSection, sizes: list[int]) -> Layout:
    return resolve_layout(
        section.actor_num_nodes,
        section.actor_num_gpus_per_node,
        section.rollout_num_gpus,
        colocate=section.colocate,
        debug_train_only=section.debug_train_only,
        debug_rollout_only=section.debug_rollout_only,
        external_engines=section.external_engines,
        async_training=section.async_training,
        rollout_num_gpus_per_engine=section.rollout_num_gpus_per_engine,
        use_critic=section.use_critic,
        num_gpus_per_actor=section.num_gpus_per_actor,
        num_gpus_per_critic=section.num_gpus_per_critic,
        num_gpus_per_rollout_engine=section.num_gpus_per_rollout_engine,
        num_gpus_per_node=sizes,
        rollout_groups=section.rollout_groups,
    )


def _finding(code: str, message: str, at: Tree, rule: str = "", fixes: tuple[Fix, ...] = ()) -> Finding:
    return Finding(code, message, at.place(), (at.mark(),), rule=rule, fixes=fixes)


def _placed(finding: Finding, section: LayoutSection, topology: Topology) -> Finding:
    """Return a finding of the layout arithmetic with the place of the value that it is about."""
    at = section.at(finding.place.path if finding.place else "")
    fixes = finding.fixes
    if section.mode:  # the job uses the key mode, not colocate
        words = {"colocate: true": "mode: collocated", "colocate: false": "mode: disaggregated"}
        for old, new in words.items():
            fixes = tuple(Fix(fix.text, fix.paste.replace(old, new)) for fix in fixes)
    context = (f"cluster: {topology.describe()}",)
    return replace(finding, place=at.place(), marks=(at.mark(),), context=context, fixes=fixes)


# Checking ---------------------------------------------------------------------------------------


def _check_machines(section: LayoutSection, topology: Topology, sizes: list[int]) -> Iterable[Finding]:
    if not sizes:
        message = f"a layout counts GPUs, and there are none: {topology.describe()}"
        fix = Fix("place by nodes", "component_placement: {actor: 0, rollout: 0}")
        yield _finding("P411", message, section.tree, fixes=(fix,))
    stated = section.num_gpus_per_node
    other = next((node for node in topology.nodes if node.num_accelerators not in (0, stated)), None)
    if stated is not None and other is not None:
        message = f"num_gpus_per_node is {stated}, and node {other.rank} has {counted(other.num_accelerators, 'GPU')}"
        fix = Fix("leave it out: the machines say it")
        yield _finding("P413", message, section.at("num_gpus_per_node"), fixes=(fix,))


def _check_layout(section: LayoutSection, layout: Layout) -> Iterable[Finding]:
    if section.mode == "collocated" and layout.actor and len(layout.rollout) > len(layout.actor):
        message = (
            f"collocated engines have the trainer's GPUs: {len(layout.rollout)} are wanted, "
            f"and the trainer has {len(layout.actor)}"
        )
        fixes = (
            Fix("go on beyond the trainer's", "mode: hybrid"),
            Fix("or have as many", f"rollout_num_gpus: {len(layout.actor)}"),
        )
        yield _finding("P412", message, section.at("rollout_num_gpus"), fixes=fixes)


def _twice(component: Component) -> Finding:
    message = f"component {component.name!r} is placed twice: by cluster.layout and by component_placement"
    fix = Fix("keep one of the two; further components may stand beside a layout")
    return _finding("P112", message, component.placement, "a component is defined once", (fix,))


def _seen_mode(section: LayoutSection, layout: Layout) -> str:
    if not section.colocate:
        return "disaggregated"
    goes_on = layout.actor and len(layout.rollout) > len(layout.actor)
    return "hybrid" if goes_on else "collocated"


def _notes(section: LayoutSection, layout: Layout, sizes: list[int]) -> Iterable[Finding]:
    for key, text in _NOTES.items():
        if getattr(section, key):
            yield Finding("N115", text, severity="note")
    wanted, left = section.actor_num_nodes, len(layout.actor)
    touched = 0
    while left > 0:
        left -= sizes[touched]
        touched += 1
    if touched and touched != wanted:
        each = section.actor_num_gpus_per_node
        message = (
            f"actor: {counted(wanted, 'node')} x {counted(each, 'GPU')} are the first {len(layout.actor)} GPUs, "
            f"and these are on {counted(touched, 'node')}"
        )
        yield Finding("N114", message, severity="note")


# Components -------------------------------------------------------------------------------------


def _trainers(section: LayoutSection, layout: Layout) -> Iterable[PlacedComponent]:
    for role, ranks in (("actor", layout.actor), ("critic", layout.critic)):
        if ranks:
            key = "actor_num_gpus_per_node" if role == "actor" else "use_critic"
            segment = Segment(ranks, range(len(ranks)))
            yield _component(section, role, role, segment, key, f"num_gpus_per_{role}", layout), segment


def _engines(section: LayoutSection, layout: Layout) -> Iterable[PlacedComponent]:
    groups: dict[int, list[EngineShare]] = {}
    for engine in layout.engines:
        groups.setdefault(engine.group, []).append(engine)
    for group, engines in groups.items():
        ranks = range(engines[0].positions[0], engines[-1].positions[-1] + 1)
        segment = Segment(ranks, range(len(engines) * engines[0].members))
        key = "rollout_num_gpus" if section.rollout_groups is None else f"rollout_groups.{group}"
        name = f"rollout-{group}" if group else "rollout"
        component = _component(section, name, "rollout", segment, key, "num_gpus_per_rollout_engine", layout)
        yield (
            replace(component, processes_per_engine=engines[0].members, placeholder=engines[0].placeholder),
            segment,
        )


def _component(
    section: LayoutSection, name: str, role: str, segment: Segment, key: str, share_key: str, layout: Layout
) -> Component:
    """Return a component of a layout; its placement as text is for people and for the saved plan."""
    text = format_segments([segment])
    placement = section.at(key).standing_for(text, text)
    share = layout.shares[role]
    entry = {"placement": placement, "gpu_share": section.at(share_key).standing_for(share, f"{share:g}")}
    return Component(name, placement, entry, role=role, gpu_share=share)

"""Reading a job file into one typed :class:`Job`; every value keeps its place in the file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roost.config import keys
from roost.config.components import Component, read_components
from roost.config.layout import LayoutSection, read_layout
from roost.config.sizes import Algorithm, ParallelSizes, read_algorithm, read_sizes
from roost.errors import Finding, Fix, raise_problems
from roost.source import Config, Fields, Tree, as_tree, load_tree
from roost.source.keys import program as program_kind
from roost.topology.groups import NodeGroupEntries
from roost.topology.keys import NUM_NODES

__all__ = ["ClusterSettings", "Job", "load_config", "read_cluster", "read_job"]


@dataclass(frozen=True)
class ClusterSettings:
    """The values of a ``cluster`` section that a live cluster needs.

    Attributes:
        num_nodes: Number of nodes that the job uses; ``None`` for all.
        num_nodes_tree: That value, for the places of errors; ``None`` if it is missing.
        node_order: ``address``, ``name`` or ``label:KEY``.
        node_groups: The node groups as written.
    """

    num_nodes: int | None
    num_nodes_tree: Tree | None
    node_order: str
    node_groups: NodeGroupEntries

    def plain(self) -> Any:
        """Return the whole ``cluster`` section as plain Python data."""
        return self.node_groups.section.plain()


@dataclass(frozen=True)
class Job:
    """A job file, read once.

    Attributes:
        tree: The whole configuration; all but the fields below is the job's own.
        cluster: Nodes, their order, and node groups.
        components: The components in the order of the file; those of a layout are added once the nodes are known.
        components_tree: The value that places the components, for the places of errors.
        placement_mode: The mode that the job insists on; empty if it does not.
        run: The function that runs the job, as ``module:function``; empty if not given.
        layout: Numbers that place trainer and engines; ``None`` without a layout.
        sizes: Parallel sizes by section name.
        algorithm: Settings of the algorithm.
        programs: Programs by the name or the role of their component, as ``module:Name``.
        problems: Everything that is wrong with the file, except for what ``sizes`` and ``algorithm`` hold.
    """

    tree: Tree
    cluster: ClusterSettings
    components: tuple[Component, ...] = ()
    components_tree: Tree = field(default_factory=lambda: Tree(None))
    placement_mode: str = ""
    run: str = ""
    layout: LayoutSection | None = None
    sizes: Mapping[str, ParallelSizes] = field(default_factory=dict)
    algorithm: Algorithm = field(default_factory=Algorithm)
    programs: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Finding, ...] = ()

    def sizes_of(self, name: str, role: str) -> ParallelSizes:
        """Return the sizes in the section with a component's name or, if there is none, with its role."""
        return self.sizes.get(name) or self.sizes.get(role) or ParallelSizes()


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read a job file into a mapping whose values keep line and column.

    Raises:
        ConfigError: With every problem of the file that can be found at once.
    """
    return Config(load_tree(path))


def read_job(config: Any, findings: list[Finding] | None = None) -> Job:
    """Return the job that a configuration describes.

    Args:
        config: The result of :func:`load_config`, a mapping, or a ``DictConfig``; a ``Job`` is returned as it is.
        findings: Where problems go; without it, they are raised.

    Raises:
        RoostError: With every problem, if there is no ``findings``.
    """
    if isinstance(config, Job):
        job = config
    else:
        problems: list[Finding] = []
        job = replace(_read(as_tree(config), problems), problems=tuple(problems))
    if findings is None:
        raise_problems(job.problems)
    else:
        findings.extend(job.problems)
    return job


def read_cluster(config: Any) -> ClusterSettings:
    """Return the settings for a live cluster from a job, or from a ``cluster`` section alone.

    Raises:
        ConfigError: A value is wrong.
    """
    if isinstance(config, Job):
        return config.cluster
    tree = as_tree(config)
    findings: list[Finding] = []
    settings = _read_settings(Fields(tree.get("cluster") or tree, findings, keys.CLUSTER.what))
    raise_problems(findings)
    return settings


def _read_settings(fields: Fields) -> ClusterSettings:
    num_nodes = fields.read(NUM_NODES) or None
    order = fields.read(keys.NODE_ORDER)
    if order is not None and order not in ("address", "name") and not order.startswith("label:"):
        fields.wrong(fields.tree.value[keys.NODE_ORDER.name], "node_order is address, name or label:KEY")
        order = None
    num_nodes_tree = fields.tree.get(NUM_NODES.name)
    return ClusterSettings(num_nodes, num_nodes_tree, order or keys.NODE_ORDER.default, NodeGroupEntries(fields.tree))


def _read(tree: Tree, findings: list[Finding]) -> Job:
    section = tree.get("cluster")
    if section is None or not section.is_mapping:
        what = "a job needs a 'cluster' section" if section is None else "the cluster section is a mapping"
        near = tree.get(keys.COMPONENT_PLACEMENT.name)
        fix = Fix("indent it under", "cluster:") if near else Fix("add it", "cluster: {component_placement: …}")
        at = tree if section is None else section
        findings.append(Finding("C206", what, (near or at).place(), fixes=(fix,)))
        nothing = Tree({}, "cluster")
        return Job(tree, ClusterSettings(None, None, keys.NODE_ORDER.default, NodeGroupEntries(nothing)))
    fields = Fields(section, findings, keys.CLUSTER.what)
    before = len(findings)
    fields.only(keys.CLUSTER.names, _stray_components(fields))
    is_explained = any(keys.COMPONENT_PLACEMENT.name in str(fix) for f in findings[before:] for fix in f.fixes)
    settings = _read_settings(fields)
    mode = _read_mode(fields)
    layout = read_layout(fields.read(keys.LAYOUT_KEY), findings)
    if layout is not None and mode:
        is_mode = section.get(keys.PLACEMENT_MODE.name) is not None
        key = keys.PLACEMENT_MODE.name if is_mode else keys.AUTO_SCHEDULER.name
        fields.complain("204", f"a layout has a mode of its own, and {key} is set too", section.value[key])
    components: list[Component] = []
    placements = fields.read(keys.COMPONENT_PLACEMENT)
    if placements is None and is_explained:
        pass  # the placements stand under another key or in another place, which has been complained about
    elif layout is not None and (placements is None or placements.value is None):
        pass  # the layout places the components
    elif placements is None or placements.value is None:
        rule = "component_placement says where each component goes"
        fix = Fix("add it", "component_placement: {actor: 0-7}")
        fields.complain("206", "nothing is placed: component_placement is missing", section, rule, [fix])
    elif not placements.is_mapping or not placements.value:
        fields.wrong(placements, "component_placement maps component names to placements")
    else:
        components = read_components(placements, findings)
    run = tree.get(keys.RUN.name)
    program = ""
    if run is not None and run.is_scalar:
        program = Fields(tree, findings, keys.JOB.what).read(keys.RUN_PROGRAM)
    return Job(
        tree,
        settings,
        tuple(components),
        placements or section,
        mode,
        program,
        layout,
        read_sizes(tree, components),
        read_algorithm(tree),
        _read_programs(fields, components),
    )


def _read_programs(fields: Fields, components: Sequence[Component]) -> dict[str, str]:
    section = fields.read(keys.PROGRAMS)
    if section is None or section.value is None:
        return {}
    entries = Fields(section, fields.findings, "programs")
    if not entries.ok:
        return {}
    own = {component.name for component in components if component.worker or component.engine}
    programs = {}
    for name, _ in section.items():
        if name in own:
            message = f"{name} has a program beside its placement, and another one in programs"
            fields.complain("204", message, section.keys[name])
        text = program_kind().read(entries, name)
        if text:
            programs[name] = text
    return programs


def _read_mode(fields: Fields) -> str:
    is_auto = fields.read(keys.AUTO_SCHEDULER)
    mode = fields.read(keys.PLACEMENT_MODE)
    if is_auto and mode not in ("", "auto"):
        at = fields.tree.value[keys.PLACEMENT_MODE.name]
        fields.complain("204", f"auto_scheduler is true, and placement_mode is {mode}", at)
    return mode or ("auto" if is_auto else "")


def _stray_components(fields: Fields) -> list[str]:
    """Return the keys beside ``component_placement`` that look like components, after complaining about each."""
    strays = []
    for key, value in fields.tree.items():
        looks_placed = value.is_scalar and re.match(r"(all|[0-9])[0-9,:\- ]*\Z", value.text)
        if key in keys.CLUSTER.names or not looks_placed or ("," not in key and not isinstance(value.value, str)):
            continue
        strays.append(key)
        message = f"{key!r} stands beside component_placement, not under it"
        fixes = [Fix("move it", f"component_placement: {{{_quoted(key)}: {value.text}}}")]
        fields.complain("201", message, fields.tree.keys[key], fixes=fixes)
    return strays


def _quoted(key: str) -> str:
    return f'"{key}"' if "," in key else key

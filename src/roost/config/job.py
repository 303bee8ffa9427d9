"""The ``cluster`` section of a job, typed; every value keeps its line and column."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roost.config.layout import LayoutSection, read_layout
from roost.errors import Finding, Fix, Mark, raise_problems
from roost.source import Config, Fields, Tree, as_tree, load_tree

__all__ = ["Component", "Job", "load_config", "read_job"]

CLUSTER_KEYS = (
    "num_nodes", "component_placement", "layout", "node_groups", "auto_scheduler", "placement_mode", "node_order",
)  # fmt: skip
COMPONENT_KEYS = (
    "node_group", "placement", "role", "gpu_share", "cpus", "memory_gib", "worker", "processes_per_engine",
    "placeholder",
)  # fmt: skip
MODES = ("collocated", "disaggregated", "hybrid", "auto")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z", re.ASCII)
WORDS_OF_YAML = {"null", "true", "false", "none", "nan", "all"}


@dataclass(frozen=True)
class Component:
    """One component of a job, as written.

    Attributes:
        name: Its name.
        placement: The placement text, with its place; null where it is missing.
        entry: Everything that is said of it, by key.
        labels: The node groups to count resources in; empty for the whole cluster.
        role: What it does in the job; its name unless said otherwise.
        gpu_share: Fraction of each of its accelerators that a process takes; ``None``: not said.
        cpus: CPUs per process.
        memory_gib: Peak memory per process on each of its accelerators.
        worker: The class that runs in its processes, as ``module:Class``.
        processes_per_engine: How many processes, one per node, make one engine.
        placeholder: Reserved only; nothing is started.
    """

    name: str
    placement: Tree
    entry: Mapping[str, Tree]
    labels: tuple[str, ...] = ()
    label_tree: Tree | None = None
    role: str = ""
    gpu_share: float | None = None
    cpus: float | None = None
    memory_gib: float | None = None
    worker: str = ""
    processes_per_engine: int = 1
    placeholder: bool = False


@dataclass(frozen=True)
class Job:
    """A job description: what Roost reads of a configuration.

    Attributes:
        tree: The whole configuration.
        section: Its ``cluster`` section.
        components: In the order of the file; those of a layout come with the machines.
        num_nodes: Nodes that the job uses; ``None``: all there are.
        placement_mode: A mode that the job insists on; empty: as written.
        run: The function that runs the job, as ``module:function``.
        layout: Numbers to place trainer and engines by, if the job has them.
    """

    tree: Tree
    section: Tree
    components: tuple[Component, ...]
    num_nodes: int | None = None
    placement_mode: str = ""
    run: str = ""
    layout: LayoutSection | None = None

    def size(self, component: Component, path: str, findings: list[Finding], default: int = 1) -> int:
        """A size from a component's own section, such as ``rollout.tensor_parallel_size``.

        The section has the component's name, or that of its role.
        """
        section = component.name if self.tree.get(component.name) is not None else component.role
        parent, _, key = f"{section}.{path}".rpartition(".")
        tree = self.tree.find(parent)
        if tree is None or not tree.is_mapping:
            return default
        return Fields(tree, findings, parent).integer(key, 1, default) or default

    def flag(self, path: str, findings: list[Finding]) -> bool:
        """A switch from elsewhere in the job, such as ``algorithm.recompute_logprobs``."""
        parent, _, key = path.rpartition(".")
        tree = self.tree.find(parent)
        if tree is None or not tree.is_mapping:
            return False
        return Fields(tree, findings, parent).boolean(key)


def load_config(path: str | os.PathLike[str]) -> Config:
    """Reads a job file; what it gives keeps line and column.

    Raises:
        ConfigError: With every problem of the file that can be seen at once.
    """
    return Config(load_tree(path))


def read_job(config: Any, findings: list[Finding] | None = None) -> Job:
    """The job description of a configuration.

    Args:
        config: What :func:`load_config` gives, a mapping, or a ``DictConfig``.
        findings: Where problems go; without it, they are raised.
    """
    collected: list[Finding] = [] if findings is None else findings
    job = _read(as_tree(config), collected)
    if findings is None:
        raise_problems(collected)
    return job


def _read(tree: Tree, findings: list[Finding]) -> Job:
    section = tree.get("cluster")
    if section is None or not section.is_mapping:
        what = "a job needs a 'cluster' section" if section is None else "the cluster section is a mapping"
        near = tree.get("component_placement")
        fix = Fix("indent it under", "cluster:") if near else Fix("add it", "cluster: {component_placement: …}")
        at = tree if section is None else section
        findings.append(Finding("C206", what, (near or at).place(), fixes=(fix,)))
        return Job(tree, Tree({}, "cluster"), ())
    fields = Fields(section, findings, "the cluster section")
    placements = section.get("component_placement")
    before = len(findings)
    fields.only((*CLUSTER_KEYS, *_stray_components(fields)))
    is_explained = any("component_placement" in str(fix) for f in findings[before:] for fix in f.fixes)
    num_nodes = fields.integer("num_nodes", 0) or None
    mode = _read_mode(fields)
    order = fields.text("node_order")
    if order is not None and order not in ("address", "name") and not order.startswith("label:"):
        fields.wrong(section.value["node_order"], "node_order is address, name or label:KEY")
    layout = read_layout(section, findings)
    if layout is not None and mode:
        key = "placement_mode" if section.get("placement_mode") is not None else "auto_scheduler"
        fields.complain("204", f"a layout has a mode of its own, and {key} is said too", section.value[key])
    components: list[Component] = []
    if placements is None and is_explained:
        pass  # it is there, under another name or in another place
    elif layout is not None and (placements is None or placements.value is None):
        pass  # the layout places what there is
    elif placements is None or placements.value is None:
        example = "component_placement: {actor: 0-7}"
        rule = "component_placement says where each component goes"
        fields.complain(
            "206", "nothing is placed: component_placement is missing", section, rule, [Fix("add it", example)]
        )
    elif not placements.is_mapping or not placements.value:
        fields.wrong(placements, "component_placement maps component names to placements")
    else:
        components = _read_components(placements, findings)
    run = tree.get("run")
    program = _program(Fields(tree, findings, "the job"), "run") if run is not None and run.is_scalar else ""
    return Job(tree, section, tuple(components), num_nodes, mode, program, layout)


def _stray_components(fields: Fields) -> list[str]:
    """Keys beside ``component_placement`` that look like components: said once, with the remedy."""
    strays = []
    for key, value in fields.tree.items():
        looks_placed = value.is_scalar and re.match(r"(all|[0-9])[0-9,:\- ]*\Z", value.text)
        if key in CLUSTER_KEYS or not looks_placed or ("," not in key and not isinstance(value.value, str)):
            continue
        strays.append(key)
        message = f"{key!r} stands beside component_placement, not under it"
        fixes = [Fix("move it", f"component_placement: {{{_quoted(key)}: {value.text}}}")]
        fields.complain("201", message, fields.tree.keys[key], fixes=fixes)
    return strays


def _quoted(key: str) -> str:
    return f'"{key}"' if "," in key else key


def _read_mode(fields: Fields) -> str:
    auto = fields.boolean("auto_scheduler")
    tree = fields.tree.get("placement_mode")
    if tree is None or tree.value is None:
        return "auto" if auto else ""
    if tree.value not in MODES:
        fields.wrong(tree, "placement_mode is one of " + ", ".join(MODES))
        return ""
    if auto and tree.value != "auto":
        fields.complain("204", f"auto_scheduler is true, and placement_mode is {tree.value}", tree)
    return str(tree.value)


def _read_components(placements: Tree, findings: list[Finding]) -> list[Component]:
    components: list[Component] = []
    seen: dict[str, Tree] = {}
    for key, tree in placements.items():
        key_tree = placements.keys[key]
        names = _names(key, key_tree, seen, findings)
        component = _read_component(tree, names, findings)
        if component is not None:
            components.extend(replace(component, name=name, role=component.role or name) for name in names)
    return components


def _names(key: str, key_tree: Tree, seen: dict[str, Tree], findings: list[Finding]) -> list[str]:
    """The component names in one key; each may stand once in a job."""
    names: list[str] = []
    offset = 0
    for part in key.split(","):
        name = part.strip()
        start = offset + len(part) - len(part.lstrip())
        offset += len(part) + 1
        mark = key_tree.mark(start, max(1, len(name)))
        if not _NAME.match(name) or name.lower() in WORDS_OF_YAML:
            findings.append(
                Finding(
                    "P113",
                    f"{name[:40]!r} is not a name for a component" if name else "a component name is missing here",
                    key_tree.place(start),
                    (mark,),
                    rule="letters, digits, '_', '-' and '.', beginning with a letter or '_'",
                )
            )
        elif name in seen:
            line = seen[name].line
            before = f"; the first is in line {line}" if line else ""
            message = f"component {name!r} is placed twice{before}"
            rule = "a component is defined once"
            findings.append(Finding("P112", message, key_tree.place(start), (mark,), rule=rule))
        else:
            seen[name] = key_tree
            names.append(name)
    return names


def _read_component(tree: Tree, names: list[str], findings: list[Finding]) -> Component | None:
    if tree.is_scalar:
        return Component("", tree, {"placement": tree})
    what = f"the placement of {', '.join(names) or 'a component'}"
    if tree.is_list:
        findings.append(_list_finding(tree, what))
        return None
    fields = Fields(tree, findings, what)
    fields.only(COMPONENT_KEYS)
    placement = tree.get("placement")
    if placement is None:
        fields.require("placement", "placement: 0-7")
    label_tree = tree.get("node_group")
    labels = _labels(fields, label_tree)
    share = fields.number("gpu_share", maximum=1.0)
    cpus, memory_gib = fields.number("cpus"), fields.number("memory_gib")
    role = fields.text("role") or ""
    if placement is not None and not placement.is_scalar:
        findings.append(_list_finding(placement, what))
        return None
    if labels is None:
        return None
    return Component(
        "",
        placement or Tree(None),
        tree.value,
        labels,
        label_tree,
        role,
        share,
        cpus,
        memory_gib,
        _program(fields, "worker"),
        fields.integer("processes_per_engine", 1, 1) or 1,
        fields.boolean("placeholder"),
    )


def _program(fields: Fields, key: str) -> str:
    """A ``module:name``, or nothing."""
    text = fields.text(key)
    if text is not None and not re.match(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z", text):
        fields.wrong(fields.tree.value[key], f"{key} is written module:Name")
        return ""
    return text or ""


def _list_finding(tree: Tree, what: str) -> Finding:
    ranks = [child.text for child in tree.value if child.is_scalar] if tree.is_list else []
    paste = ",".join(ranks)
    fixes = (Fix("as text", f'"{paste}"'),) if paste and len(paste) < 200 else ()
    rule = "a placement is a text such as 0-7 or 0-3:0-1"
    return Finding(
        "P101",
        f"{what} is a text, not {tree.kind}",
        tree.place(),
        (Mark(max(1, tree.column), 1),),
        rule=rule,
        fixes=fixes,
    )


def _labels(fields: Fields, tree: Tree | None) -> tuple[str, ...] | None:
    """Labels of node groups from ``a``, ``"a,b"`` or ``[a, b]``; ``None`` where they are wrong."""
    if tree is None:
        return ()
    labels: list[str] = []
    for item in tree.value if tree.is_list else [tree]:
        text = fields.as_text(item, "node_group")
        if text is None:
            return None
        labels.extend(part.strip() for part in text.split(","))
    if "" in labels or not labels:
        fields.wrong(tree, "node_group is a label, or labels separated by commas")
        return None
    twice = next((label for label in labels if labels.count(label) > 1), None) if len(labels) < 1000 else None
    if twice is not None:
        fields.complain("203", f"node group {twice!r} is named twice", tree)
        return None
    return tuple(labels)

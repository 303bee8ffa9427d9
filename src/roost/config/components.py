"""Reading ``cluster.component_placement`` of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from roost.config import keys
from roost.errors import Finding, Fix, Mark, Place
from roost.source import Fields, Tree

__all__ = ["Component", "read_components"]

_NAME = re.compile(rf"{keys.NAME_PATTERN}\Z", re.ASCII)


@dataclass(frozen=True)
class Component:
    """One component of a job, as written.

    Attributes:
        name: Name of the component.
        placement: The placement text with its place; its value is ``None`` if the text is missing.
        entry: All values written for the component, by key.
        labels: Node groups in which the placement counts ranks; empty for the whole cluster.
        label_tree: The value that names them, for the places of errors; ``None`` if there is none.
        role: What the component does in the job; by default its name.
        gpu_share: Fraction that one process takes of each of its accelerators; ``None`` if not given.
        cpus: CPUs per process; ``None`` if not given.
        memory_gib: Peak memory of one process on each of its accelerators in GiB; ``None`` if not given.
        worker: Worker class, as ``module:Class``; empty if not given.
        engine: Function that returns an engine, as ``module:function``; empty if not given.
        processes_per_engine: Number of processes, one per node, that make one engine.
        placeholder: The accelerators are reserved, and nothing is started.
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
    engine: str = ""
    processes_per_engine: int = 1
    placeholder: bool = False

    @property
    def has_placement(self) -> bool:
        """Whether a placement is written, right or wrong."""
        return keys.PLACEMENT.name in self.entry

    def places(self) -> dict[str, Place]:
        """Return the place of each single value that is written, by key."""
        return {key: tree.place() for key, tree in self.entry.items() if tree.is_scalar}


def read_components(placements: Tree, findings: list[Finding]) -> list[Component]:
    """Return the components in the order of the file; problems are added to the findings."""
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
    """Return the component names in one key, separated by commas; each may stand once in a job."""
    names: list[str] = []
    offset = 0
    for part in key.split(","):
        name = part.strip()
        start = offset + len(part) - len(part.lstrip())
        offset += len(part) + 1
        mark = key_tree.mark(start, max(1, len(name)))
        if not _NAME.match(name) or name.lower() in keys.YAML_WORDS:
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
        return Component("", tree, {keys.PLACEMENT.name: tree})
    what = f"the placement of {', '.join(names) or 'a component'}"
    if tree.is_list:
        findings.append(_list_finding(tree, what))
        return None
    fields = keys.COMPONENT.open(tree, findings, what=what)
    placement = fields.read(keys.PLACEMENT)
    if placement is None:
        fields.require(keys.PLACEMENT)
    label_tree = fields.read(keys.NODE_GROUP)
    labels = _labels(fields, label_tree)
    share = fields.read(keys.GPU_SHARE)
    cpus, memory_gib = fields.read(keys.CPUS), fields.read(keys.MEMORY_GIB)
    role = fields.read(keys.ROLE) or ""
    worker, engine = fields.read(keys.WORKER), fields.read(keys.ENGINE)
    if worker and engine:
        fields.complain("204", "a component has a worker or an engine, not both", tree.value[keys.ENGINE.name])
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
        worker,
        engine,
        fields.read(keys.PROCESSES_PER_ENGINE),
        fields.read(keys.PLACEHOLDER),
    )


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
    """Return the labels of node groups from ``a``, ``"a,b"`` or ``[a, b]``; ``None`` if they are wrong."""
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

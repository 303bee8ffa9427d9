"""Reading ``node_groups`` of a job file or a cluster file: labels, nodes, environments, hardware."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from roost.errors import Finding, Fix, RankError, did_you_mean
from roost.hardware import AcceleratorType, device_key, hardware_fields, hardware_types
from roost.ranks import format_ranks, parse_ranks
from roost.source import Fields, Tree
from roost.topology import keys
from roost.topology.model import CLUSTER, NODE, Hardware, NodeEnvironment, NodeGroup, Topology

RESERVED_VARIABLES = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "NODE_RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_LOCAL_RANK",
        "NODE_LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GROUP_NAME",
    ]
)
"""Variables that the plan sets. A group must not set them: its workers would have a wrong rank or address."""

ALL_NODES = "all"
"""In ``node_ranks``: all nodes of the cluster for a group, all nodes of the group for an entry of ``env_configs``."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


@dataclass(frozen=True)
class NodeGroupEntries:
    """The node groups of a job as written; they are read once the nodes are known.

    Attributes:
        section: The mapping with the key ``node_groups``.
    """

    section: Tree

    @property
    def labels(self) -> frozenset[str]:
        """All labels as written, also those of groups that turn out to be wrong."""
        entries = self.section.get(keys.NODE_GROUPS.name)
        if entries is None or not entries.is_list:
            return frozenset()
        labels = [entry.get(keys.LABEL.name) for entry in entries.value]
        return frozenset(label.text for label in labels if label is not None and label.is_scalar)

    def resolve(self, topology: Topology, findings: list[Finding]) -> list[NodeGroup]:
        """Return the groups on a topology; problems are added to the findings."""
        return read_groups(self.section, topology, findings)


def read_groups(
    section: Tree,
    topology: Topology,
    findings: list[Finding],
    letter: str = "C",
    check_hardware: bool = True,
) -> list[NodeGroup]:
    """Return the groups under ``node_groups``; problems are added to the findings.

    Args:
        section: The mapping with the key ``node_groups``.
        topology: The nodes, and the groups that the cluster's own description defines.
        findings: Where problems go.
        letter: First letter of the error codes: ``C`` for job files, ``T`` for cluster files.
        check_hardware: Whether hardware types must be registered.
    """
    top = Fields(section, findings, "the cluster section", letter)
    if not top.ok:
        return []
    groups: list[NodeGroup] = []
    seen: dict[str, Tree] = {}
    fields_by_label: dict[str, Fields] = {}
    for entry in top.read(keys.NODE_GROUPS):
        reader = _GroupReader(entry, topology, findings, letter, check_hardware)
        group = reader.read()
        if group is None:
            continue
        at = entry.value[keys.LABEL.name]
        if group.label in seen:
            line = seen[group.label].line
            first = f"; the first is in line {line}" if line else ""
            reader.fields.complain("301", f"the label {group.label!r} is given twice{first}", at)
            continue
        seen[group.label] = at
        known = next((g for g in topology.groups if g.label == group.label), None)
        if known is not None and known.node_ranks != group.node_ranks:
            message = (
                f"node group {group.label!r} is nodes {format_ranks(group.node_ranks)} here, "
                f"and nodes {format_ranks(known.node_ranks)} in the cluster's own description"
            )
            reader.fields.complain("301", message, at, fixes=[Fix("choose another label, or drop this group")])
            continue
        if known is not None:  # the cluster's description fills in what the job leaves out
            group = NodeGroup(
                group.label,
                group.node_ranks,
                group.hardware_type or known.hardware_type,
                group.hardware if group.hardware_type else known.hardware,
                group.environments or known.environments,
            )
        fields_by_label[group.label] = reader.fields
        groups.append(group)
    if check_hardware:
        _check_owners(topology.adding(groups).groups, fields_by_label)
    return groups


def _check_owners(groups: Iterable[NodeGroup], fields_by_label: Mapping[str, Fields]) -> None:
    """Complain about a device that two groups have: two components could be given the same robot."""
    owners: dict[tuple[int, str], str] = {}
    for group in groups:
        for rank, item in group.hardware:
            owner = owners.setdefault((rank, device_key(item.type, item.fields)), group.label)
            fields = fields_by_label.get(group.label) or fields_by_label.get(owner)
            if owner != group.label and fields is not None:
                message = f"the same {item.type} on node {rank} is in the node groups {owner!r} and {group.label!r}"
                at = fields.tree.get("hardware") or fields.tree
                fixes = [Fix("leave it out of one of the groups; or, if these are two, give them fields that differ")]
                fields.complain("310", message, at, rule="a device belongs to one node group", fixes=fixes)
                break


def check_label(fields: Fields, at: Tree, label: str) -> bool:
    """Return whether a text may be the label of a group; complain if not."""
    if label in (CLUSTER, NODE):
        meaning = "all nodes, by node rank" if label == NODE else "everything, and the default"
        fields.complain("302", f"the label {label!r} is reserved: it means {meaning}", at)
        return False
    if "," in label:
        fields.complain("303", f"a label has no comma: {label!r}", at, rule="commas separate labels")
        return False
    return True


def check_hardware_fields(fields: Fields, type_name: str, values: dict[str, Tree], must_be_registered: bool) -> bool:
    """Check the values of a device against the dataclass registered for its type; return whether they are right."""
    import json

    for key, value in values.items():
        try:
            json.dumps(value.plain(), allow_nan=False)
        except (TypeError, ValueError):
            fields.wrong(value, f"{key} is a text, a number, true or false, a list or a mapping")
            return False
    known = hardware_fields(type_name)
    if known is None:
        return not must_be_registered
    before = len(fields.findings)
    names = [field.name for field in known]
    for key in [key for key in values if key not in names]:
        near = did_you_mean(key, names)
        fixes = [Fix("did you mean", f"{near}:")] if near else []
        rule = f"fields of {type_name}: {', '.join(names) or 'none'}"
        at = fields.tree.keys[key]
        fields.complain("309", f"{type_name} has no field {key!r}", at, rule=rule, fixes=fixes)
    for field in known:
        given = values.get(field.name)
        if given is None and field.required:
            fixes = [Fix("add it", f"{field.name}:")]
            fields.complain("309", f"{type_name} needs {field.name!r}", fields.tree, fixes=fixes)
        elif given is not None and not field.accepts(given.value):
            message = f"{type_name}.{field.name} is of type {field.type_name}, not {given.kind}"
            fields.complain("309", message, given)
    return len(fields.findings) == before


class _GroupReader:
    def __init__(
        self, tree: Tree, topology: Topology, findings: list[Finding], letter: str, check_hardware: bool
    ) -> None:
        self.topology = topology
        self.check_hardware = check_hardware
        self.fields = keys.NODE_GROUP.open(tree, findings, letter)

    def read(self) -> NodeGroup | None:
        fields = self.fields
        if not fields.ok:
            return None
        label_tree = fields.require(keys.LABEL)
        ranks_tree = fields.require(keys.GROUP_NODE_RANKS)
        label = None
        if label_tree is not None:
            label = fields.as_text(label_tree, "label")
            if label is not None and not check_label(fields, label_tree, label):
                label = None
        ranks: tuple[int, ...] = ()
        if ranks_tree is not None:
            limit = range(self.topology.num_nodes)
            ranks = self._ranks(ranks_tree, limit, f"the cluster has nodes 0-{limit[-1]}")
        self.members = frozenset(ranks)
        environments = self._environments(ranks)
        hardware_type, hardware = self._hardware(fields.read(keys.GROUP_HARDWARE), ranks)
        if label is None or not ranks:
            return None
        return NodeGroup(label, ranks, hardware_type, hardware, environments)

    def _ranks(self, tree: Tree, allowed: range | frozenset[int], rule: str) -> tuple[int, ...]:
        """Return ascending node ranks from ``3``, ``"0-3,5"``, ``all`` or a list; complain about others than the allowed."""
        fields = self.fields
        if isinstance(tree.value, str) and tree.value.strip().lower() == ALL_NODES:
            return tuple(sorted(allowed))
        ranks: list[int] = []
        for item in tree.value if tree.is_list else [tree]:
            if not item.is_scalar or item.value is None or isinstance(item.value, (bool, float)):
                fields.wrong(item, "node_ranks is a rank (3), a range (0-7), a list of them, or all")
                continue
            try:
                ranges = parse_ranks(item.text)
            except RankError as error:
                mark = item.mark(error.offset, error.length)
                fixes = (Fix("write", f"node_ranks: {error.suggestion}"),) if error.suggestion else ()
                code = fields.letter + "305"
                place = item.place(error.offset)
                fields.findings.append(Finding(code, error.reason, place, (mark,), fixes=fixes))
                continue
            for run in ranges:
                outside = _first_outside(run, allowed)
                if outside is not None:
                    fields.complain("304", f"node rank {outside} is outside: {rule}", item)
                else:
                    ranks.extend(run)
        if tree.is_list and not tree.value:
            fields.complain("305", "node_ranks names no node", tree)
        ordered = tuple(sorted(set(ranks)))
        if len(ordered) != len(ranks):
            fields.complain("305", "a node rank stands twice in node_ranks", tree)
        return ordered

    def _environments(self, group_ranks: tuple[int, ...]) -> tuple[NodeEnvironment, ...]:
        environments: list[NodeEnvironment] = []
        taken: set[int] = set()
        allowed = frozenset(group_ranks)
        for tree in self.fields.read(keys.ENV_CONFIGS):
            fields = keys.ENVIRONMENT.open(tree, self.fields.findings, self.fields.letter)
            if not fields.ok:
                continue
            ranks_tree = fields.require(keys.ENVIRONMENT_NODE_RANKS, f"node_ranks: {format_ranks(group_ranks)}")
            variables = self._variables(fields)
            interpreter = fields.read(keys.INTERPRETER) or ""
            if ranks_tree is None or not group_ranks:
                continue
            rule = f"the group has nodes {format_ranks(group_ranks)}"
            ranks = self._ranks(ranks_tree, allowed, rule)
            twice = taken.intersection(ranks)
            if twice:
                message = f"node {min(twice)} has two env_configs in this group"
                fields.complain("306", message, ranks_tree, rule="env_configs of a group do not overlap")
            taken.update(ranks)
            environments.append(NodeEnvironment(ranks, variables, interpreter))
        return tuple(environments)

    def _variables(self, fields: Fields) -> dict[str, str]:
        variables: dict[str, str] = {}
        reserved = RESERVED_VARIABLES | {
            name
            for vendor in AcceleratorType.names()
            if (kind := AcceleratorType.get(vendor))
            for name in (kind.visible_devices_variable, *kind.noset_variables)
        }
        for entry in fields.entries(keys.ENV_VARS.name):
            rule = "each entry of env_vars is one 'NAME: value'"
            if not entry.is_mapping:
                name = entry.text.partition("=")[0].strip() if entry.is_scalar else ""
                fixes = [Fix("write", f"- {name}: value")] if _VARIABLE.match(name) else []
                fields.complain(
                    "307", f"an entry of env_vars is {entry.kind}, not a name and a value", entry, rule, fixes
                )
                continue
            items = entry.items()
            if len(items) != 1:
                pasted = "; ".join(f"- {key}: {value.text}" for key, value in items[:4] if value.is_scalar)
                fixes = [Fix("one entry each", pasted)] if pasted else []
                fields.complain("307", f"an entry of env_vars has {len(items)} names", entry, rule, fixes)
                continue
            name, value = items[0]
            key = entry.keys[name]
            if not _VARIABLE.match(name):
                fields.complain("307", f"{name!r} is not the name of a variable", key)
            elif name in reserved:
                message = f"{name} is set by the plan: a value here would send workers astray"
                fields.complain("307", message, key, fixes=[Fix("remove it")])
            elif name in variables:
                fields.complain("307", f"{name} is set twice for the same nodes", key)
            elif not value.is_scalar or value.value is None:
                fixes = [Fix("an empty value", f'{name}: ""')]
                fields.complain("307", f"{name} needs a value, not {value.kind}", value, fixes=fixes)
            elif "\0" in value.text:
                fields.complain("307", f"the value of {name} has a NUL character in it", value)
            else:
                variables[name] = value.text
        return variables

    def _hardware(
        self, tree: Tree | None, group_ranks: tuple[int, ...]
    ) -> tuple[str, tuple[tuple[int, Hardware], ...]]:
        if tree is None or tree.value is None:
            return "", ()
        fields = keys.HARDWARE.open(tree, self.fields.findings, self.fields.letter)
        if not fields.ok:
            return "", ()
        fields.require(keys.HARDWARE_TYPE)
        kind = fields.read(keys.HARDWARE_TYPE)
        if kind is None:
            return "", ()
        if self.check_hardware and hardware_fields(kind) is None:
            self._unknown_type(fields, kind)
            return kind, ()
        items: list[tuple[int, Hardware]] = []
        seen: set[tuple[int, str]] = set()
        for entry in fields.read(keys.HARDWARE_CONFIGS):
            item = self._hardware_config(entry, kind, group_ranks)
            if item is None:
                continue
            fingerprint = (item[0], device_key(kind, item[1].fields))
            if self.check_hardware and fingerprint in seen:
                at = entry.keys.get("node_rank", entry)
                fields.complain("310", f"this {kind} on node {item[0]} is listed twice", at)
            else:
                seen.add(fingerprint)
                items.append(item)
        if tree.get(keys.HARDWARE_CONFIGS.name) is None:  # use the devices that the nodes carry
            nodes = self.topology.nodes
            items = [(r, item) for r in group_ranks for item in nodes[r].hardware if item.type == kind]
        return kind, tuple(sorted(items, key=lambda item: item[0]))

    def _hardware_config(self, tree: Tree, kind: str, group_ranks: tuple[int, ...]) -> tuple[int, Hardware] | None:
        fields = keys.DEVICE.open(tree, self.fields.findings, self.fields.letter)
        if not fields.ok:
            return None
        fields.require(keys.DEVICE_NODE_RANK)
        rank = fields.read(keys.DEVICE_NODE_RANK)
        values = {key: value for key, value in tree.items() if key != "node_rank"}
        sound = check_hardware_fields(fields, kind, values, must_be_registered=False)
        if rank is None:
            return None
        if not group_ranks:  # the wrong node ranks have been reported
            return None
        if rank not in self.members:
            rule = f"the group has nodes {format_ranks(group_ranks)}"
            message = f"a {kind} is on node {rank}, which is not in its group"
            fields.complain("310", message, tree.value["node_rank"], rule=rule)
            return None
        plain: dict[str, Any] = {key: value.plain() for key, value in values.items()}
        return (rank, Hardware(kind, plain)) if sound else None

    def _unknown_type(self, fields: Fields, kind: str) -> None:
        known = hardware_types()
        near = did_you_mean(kind, known)
        fixes = [Fix("did you mean", f"type: {near}")] if near else []
        fixes.append(Fix("register it, above its dataclass", f'@roost.register_hardware("{kind}")'))
        fixes.append(Fix("at the command line, import the module that does", "--import my_robots"))
        rule = "registered types: " + (", ".join(known) or "none")
        at = fields.tree.value["type"]
        fields.complain("308", f"hardware type {kind!r} is not registered", at, rule=rule, fixes=fixes)


def _first_outside(run: range, allowed: range | frozenset[int]) -> int | None:
    """Return the first rank of a range that is not allowed, or ``None``. A range may have billions of ranks."""
    if isinstance(allowed, range):
        if run[0] not in allowed:
            return run[0]
        return None if run[-1] in allowed else allowed[-1] + 1
    return next((rank for rank in run if rank not in allowed), None)

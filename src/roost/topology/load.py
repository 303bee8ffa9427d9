"""Cluster files: the full form of a topology."""

from __future__ import annotations

from roost.errors import Finding, Fix, did_you_mean, raise_problems
from roost.hardware import AcceleratorType
from roost.source import Fields, Tree
from roost.topology.groups import check_hardware_fields, check_label, read_groups
from roost.topology.model import Hardware, Node, NodeGroup, Topology, numbered_ids
from roost.topology.parse import MAX_ACCELERATORS_PER_NODE, MAX_NODES

TOP_KEYS = ("nodes", "node_groups")
NODE_KEYS = (
    "count", "name", "address", "cpus", "memory_gib", "accelerators", "labels", "hardware", "group",
)  # fmt: skip
ACCELERATOR_KEYS = ("count", "model", "vendor", "memory_gib", "ids")


def read_topology(tree: Tree, check_hardware: bool = True, check_names: bool = True) -> Topology:
    """The topology that a tree describes.

    Args:
        tree: A mapping with ``nodes`` and perhaps ``node_groups``.
        check_hardware: Whether hardware types must be registered.
        check_names: Whether names and addresses must be unique; machines that were measured may share a name.

    Raises:
        TopologyError: With every problem.
    """
    findings: list[Finding] = []
    top = Fields(tree, findings, "a cluster file", "T")
    top.only(TOP_KEYS)
    top.require("nodes", "nodes: [{count: 2, accelerators: {count: 8}}]")
    nodes: list[Node] = []
    members: dict[str, list[int]] = {}
    for entry in top.entries("nodes"):
        first = len(nodes)
        group = _read_nodes(entry, nodes, findings)
        if group:
            members.setdefault(group, []).extend(range(first, len(nodes)))
    if check_names:
        _check_unique(tree, nodes, findings)
    if not nodes and not findings:
        top.complain("203", "a cluster has at least one node", tree.get("nodes") or tree)
    raise_problems(findings)
    topology = Topology(tuple(nodes), tuple(NodeGroup(label, tuple(r)) for label, r in members.items()))
    groups = read_groups(tree, topology, findings, "T", check_hardware)
    raise_problems(findings)
    return topology.adding(groups)


def _read_nodes(tree: Tree, nodes: list[Node], findings: list[Finding]) -> str | None:
    """Adds the nodes of one entry; returns the label of their group, if it names one."""
    fields = Fields(tree, findings, "a node entry", "T")
    if not fields.ok:
        return None
    fields.only(NODE_KEYS)
    count = fields.integer("count", 1, 1) or 1
    if count > MAX_NODES - len(nodes):
        fields.wrong(tree.value["count"], f"a cluster has at most {MAX_NODES:,} nodes")
        return None
    names = _one_each(fields, "name", count)
    addresses = _one_each(fields, "address", count)
    cpus = fields.number("cpus")
    memory_gib = fields.number("memory_gib")
    kind, model, card_gib, ids = _read_accelerators(tree.get("accelerators"), findings)
    labels = _read_labels(fields)
    hardware = tuple(item for entry in fields.entries("hardware") if (item := _read_hardware(entry, findings)))
    for i in range(count):
        rank = len(nodes)
        node = Node(rank, names[i], addresses[i], cpus, memory_gib, ids, kind, model, card_gib, labels, hardware)
        nodes.append(node)
    group = fields.text("group")
    return group if group and check_label(fields, tree.value["group"], group) else None


def _one_each(fields: Fields, key: str, count: int) -> list[str]:
    """A text per node: a list of as many, one for a single node, or ``gpu`` → ``gpu-0``, ``gpu-1``."""
    tree = fields.tree.get(key)
    if tree is None or tree.value is None:
        return [""] * count
    if tree.is_list:
        texts = [fields.as_text(item, key) or "" for item in tree.value]
        if len(texts) != count:
            fields.wrong(tree, f"{key} lists one per node: {count}")
            return [""] * count
        return texts
    text = fields.as_text(tree, key) or ""
    if count == 1:
        return [text]
    if key == "address":
        fields.wrong(tree, f"{count} nodes have {count} addresses: a list of them")
        return [""] * count
    return [f"{text}-{i}" for i in range(count)]


def _read_accelerators(
    tree: Tree | None, findings: list[Finding]
) -> tuple[AcceleratorType, str, float | None, tuple[str, ...]]:
    none = (AcceleratorType.NO_ACCEL, "", None, ())
    if tree is None or tree.value is None:
        return none
    if isinstance(tree.value, int):  # accelerators: 8
        tree = Tree({"count": tree}, "accelerators")
    fields = Fields(tree, findings, "accelerators", "T")
    if not fields.ok:
        return none
    fields.only(ACCELERATOR_KEYS)
    id_trees = fields.entries("ids")
    ids = tuple(fields.as_text(item, "an id") or "" for item in id_trees)
    count = fields.integer("count", 0, len(ids)) or 0
    if count > MAX_ACCELERATORS_PER_NODE:
        fields.wrong(tree.get("count") or tree, f"a node has at most {MAX_ACCELERATORS_PER_NODE:,} accelerators")
        return none
    if ids and (len(ids) != count or len(set(ids)) != count):
        fields.wrong(tree.value["ids"], f"ids are unique, one per accelerator ({count})")
        return none
    model = fields.text("model") or ""
    memory_gib = fields.number("memory_gib")
    vendor = fields.text("vendor") or "NVIDIA"
    kind = AcceleratorType.get(vendor)
    if kind is None or not kind.visible_devices_variable:
        near = did_you_mean(vendor, AcceleratorType.names())
        fixes = [Fix("did you mean", f"vendor: {near}")] if near else []
        rule = "vendors: " + ", ".join(AcceleratorType.names())
        at = tree.value["vendor"]
        fields.complain("312", f"there is no accelerator vendor {vendor!r}", at, rule=rule, fixes=fixes)
        return none
    return (kind, model, memory_gib, ids or numbered_ids(count)) if count else none


def _read_labels(fields: Fields) -> dict[str, str]:
    tree = fields.tree.get("labels")
    if tree is None or tree.value is None:
        return {}
    if not tree.is_mapping:
        fields.wrong(tree, "labels is a mapping, such as {rack: r1}")
        return {}
    labels = {}
    for key, value in tree.items():
        if value.is_scalar and value.value is not None:
            labels[key] = value.text
        else:
            fields.wrong(value, f"label {key} is a text")
    return labels


def _read_hardware(tree: Tree, findings: list[Finding]) -> Hardware | None:
    fields = Fields(tree, findings, "a piece of hardware", "T")
    fields.require("type", "type: Franka")
    kind = fields.text("type")
    if kind is None:
        return None
    values = {key: value for key, value in tree.items() if key != "type"}
    check_hardware_fields(fields, kind, values, must_be_registered=False)
    return Hardware(kind, {key: value.plain() for key, value in values.items()})


def _check_unique(tree: Tree, nodes: list[Node], findings: list[Finding]) -> None:
    """No two nodes have one name or one address: whoever looks for it would find the wrong one."""
    for what, texts in (("name", [n.name for n in nodes]), ("address", [n.address for n in nodes])):
        seen: dict[str, int] = {}
        for rank, text in enumerate(texts):
            if text and text in seen:
                message = f"nodes {seen[text]} and {rank} have the same {what} {text!r}"
                rule = "names and addresses of nodes are unique"
                findings.append(Finding("T102", message, (tree.get("nodes") or tree).place(), rule=rule))
            seen.setdefault(text, rank)

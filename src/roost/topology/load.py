"""Reading cluster files, which describe a topology in full."""

from __future__ import annotations

from roost.errors import Finding, Fix, did_you_mean, raise_problems
from roost.hardware import AcceleratorType
from roost.source import Fields, Key, Tree
from roost.topology import keys
from roost.topology.groups import check_hardware_fields, check_label, read_groups
from roost.topology.model import Hardware, Node, NodeGroup, Topology, numbered_ids
from roost.topology.parse import MAX_ACCELERATORS_PER_NODE, MAX_NODES


def read_topology(tree: Tree, check_hardware: bool = True, check_names: bool = True) -> Topology:
    """Return the topology that a tree describes.

    Args:
        tree: A mapping with ``nodes`` and optionally ``node_groups``.
        check_hardware: Whether hardware types must be registered.
        check_names: Whether names and addresses must be unique; nodes of a live cluster may share a name.

    Raises:
        TopologyError: With every problem.
    """
    findings: list[Finding] = []
    top = keys.CLUSTER_FILE.open(tree, findings, "T")
    top.require(keys.NODES)
    nodes: list[Node] = []
    members: dict[str, list[int]] = {}
    for entry in top.read(keys.NODES):
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
    """Add the nodes of one entry to a list; return the label of their group, or ``None`` if it has none."""
    fields = keys.NODE_ENTRY.open(tree, findings, "T")
    if not fields.ok:
        return None
    count = fields.read(keys.NODE_COUNT)
    if count > MAX_NODES - len(nodes):
        fields.wrong(tree.value["count"], f"a cluster has at most {MAX_NODES:,} nodes")
        return None
    names = _one_each(fields, keys.NODE_NAME, count)
    addresses = _one_each(fields, keys.NODE_ADDRESS, count)
    cpus = fields.read(keys.CPUS)
    memory_gib = fields.read(keys.NODE_MEMORY)
    kind, model, accelerator_gib, ids = _read_accelerators(fields.read(keys.NODE_ACCELERATORS), findings)
    labels = _read_labels(fields)
    hardware = tuple(item for entry in fields.read(keys.NODE_HARDWARE) if (item := _read_hardware(entry, findings)))
    for i in range(count):
        rank = len(nodes)
        node = Node(rank, names[i], addresses[i], cpus, memory_gib, ids, kind, model, accelerator_gib, labels, hardware)
        nodes.append(node)
    group = fields.read(keys.NODE_IN_GROUP)
    return group if group and check_label(fields, tree.value[keys.NODE_IN_GROUP.name], group) else None


def _one_each(fields: Fields, key: Key[Tree | None], count: int) -> list[str]:
    """Return a text for each node of an entry: a list of them, or one text; ``gpu`` gives ``gpu-0``, ``gpu-1``, …"""
    tree = fields.read(key)
    if tree is None or tree.value is None:
        return [""] * count
    if tree.is_list:
        texts = [fields.as_text(item, key.name) or "" for item in tree.value]
        if len(texts) != count:
            fields.wrong(tree, f"{key.name} lists one per node: {count}")
            return [""] * count
        return texts
    text = fields.as_text(tree, key.name) or ""
    if count == 1:
        return [text]
    if key is keys.NODE_ADDRESS:
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
    fields = keys.ACCELERATORS.open(tree, findings, "T")
    if not fields.ok:
        return none
    id_trees = fields.entries(keys.ACCELERATOR_IDS.name)
    ids = tuple(fields.as_text(item, "an id") or "" for item in id_trees)
    count = fields.read(keys.ACCELERATOR_COUNT)
    if count is None:
        count = len(ids)
    if count > MAX_ACCELERATORS_PER_NODE:
        fields.wrong(tree.get("count") or tree, f"a node has at most {MAX_ACCELERATORS_PER_NODE:,} accelerators")
        return none
    if ids and (len(ids) != count or len(set(ids)) != count):
        fields.wrong(tree.value["ids"], f"ids are unique, one per accelerator ({count})")
        return none
    model = fields.read(keys.ACCELERATOR_MODEL) or ""
    memory_gib = fields.read(keys.ACCELERATOR_MEMORY)
    vendor = fields.read(keys.VENDOR) or keys.VENDOR.default
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
    tree = fields.read(keys.NODE_LABELS)
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
    fields = keys.NODE_DEVICE.open(tree, findings, "T")
    fields.require(keys.NODE_DEVICE_TYPE)
    kind = fields.read(keys.NODE_DEVICE_TYPE)
    if kind is None:
        return None
    values = {key: value for key, value in tree.items() if key != "type"}
    check_hardware_fields(fields, kind, values, must_be_registered=False)
    return Hardware(kind, {key: value.plain() for key, value in values.items()})


def _check_unique(tree: Tree, nodes: list[Node], findings: list[Finding]) -> None:
    """Check that no two nodes have the same name or address: a lookup could find the wrong node."""
    for what, texts in (("name", [n.name for n in nodes]), ("address", [n.address for n in nodes])):
        seen: dict[str, int] = {}
        for rank, text in enumerate(texts):
            if text and text in seen:
                message = f"nodes {seen[text]} and {rank} have the same {what} {text!r}"
                rule = "names and addresses of nodes are unique"
                findings.append(Finding("T102", message, (tree.get("nodes") or tree).place(), rule=rule))
            seen.setdefault(text, rank)

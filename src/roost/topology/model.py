"""``Node``, ``NodeGroup`` and ``Topology``: frozen values that can be written as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from roost.errors import Finding, Fix, PlacementError, TopologyError, did_you_mean, raise_problems
from roost.hardware import AcceleratorType
from roost.ranks import format_ranks

__all__ = ["CLUSTER", "NODE", "Hardware", "Node", "NodeEnvironment", "NodeGroup", "Topology"]

CLUSTER = "cluster"
"""Label of the reserved group of all hardware of the cluster; the default."""

NODE = "node"
"""Label of the reserved group in which resource ranks count nodes."""


@lru_cache(maxsize=1024)
def numbered_ids(count: int) -> tuple[str, ...]:
    """Return ``("0", "1", …)``, the default ids of a node's accelerators. Nodes share the tuple."""
    return tuple(str(i) for i in range(count))


@dataclass(frozen=True)
class Hardware:
    """One device that is not an accelerator: a robot, a camera."""

    type: str
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Node:
    """One machine.

    Attributes:
        rank: Index in the cluster; node 0 is the head.
        name: A name for people; may be empty.
        address: IP address or host name; empty if unknown.
        cpus: Number of CPUs; ``None`` if unknown.
        memory_gib: Host memory in GiB; ``None`` if unknown.
        accelerator_ids: Ids of the accelerators as the driver counts them, in order.
        accelerator_type: Vendor of the accelerators.
        accelerator_model: Model of the accelerators, such as ``H200``; empty if unknown.
        accelerator_memory_gib: Memory of one accelerator in GiB; ``None`` if unknown.
        labels: Rack, NVLink domain, or any other labels.
        hardware: Robots and other devices.
    """

    rank: int
    name: str = ""
    address: str = ""
    cpus: float | None = None
    memory_gib: float | None = None
    accelerator_ids: tuple[str, ...] = ()
    accelerator_type: AcceleratorType = AcceleratorType.NO_ACCEL
    accelerator_model: str = ""
    accelerator_memory_gib: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    hardware: tuple[Hardware, ...] = ()

    @property
    def num_accelerators(self) -> int:
        """Number of accelerators."""
        return len(self.accelerator_ids)

    @property
    def display_name(self) -> str:
        """The name, or ``node-3`` if the node has none."""
        return self.name or f"node-{self.rank}"


@dataclass(frozen=True)
class NodeEnvironment:
    """Environment variables and the interpreter of a group's workers on some of its nodes."""

    node_ranks: tuple[int, ...]
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    interpreter: str = ""


@dataclass(frozen=True)
class NodeGroup:
    """A named set of nodes.

    Attributes:
        label: Name of the group, case-sensitive.
        node_ranks: Ranks of its nodes, ascending.
        hardware_type: Type of the devices that resource ranks of the group count; empty for accelerators.
        hardware: These devices, each with the rank of its node, in the order of the nodes.
        environments: Environment variables and interpreters; a node is in one of them at most.
    """

    label: str
    node_ranks: tuple[int, ...]
    hardware_type: str = ""
    hardware: tuple[tuple[int, Hardware], ...] = ()
    environments: tuple[NodeEnvironment, ...] = ()

    @cached_property
    def _environment_by_node(self) -> dict[int, NodeEnvironment]:
        return {rank: env for env in self.environments for rank in env.node_ranks}

    def environment(self, node_rank: int) -> NodeEnvironment:
        """Return the environment of this group's workers on a node; empty if the group has none for it."""
        return self._environment_by_node.get(node_rank) or NodeEnvironment((node_rank,))

    @cached_property
    def hardware_by_node(self) -> dict[int, tuple[Hardware, ...]]:
        """The group's hardware, by node rank."""
        by_node: dict[int, list[Hardware]] = {}
        for rank, item in self.hardware:
            by_node.setdefault(rank, []).append(item)
        return {rank: tuple(items) for rank, items in by_node.items()}


@dataclass(frozen=True)
class Topology:
    """The nodes that a job is planned on.

    Attributes:
        nodes: All nodes, in cluster order.
        groups: The defined groups, without the two reserved ones.
    """

    nodes: tuple[Node, ...]
    groups: tuple[NodeGroup, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise TopologyError([Finding("T103", "a topology needs at least one node")])
        for index, node in enumerate(self.nodes):
            if node.rank != index:
                message = f"node ranks count from 0 in order: node {index} says it is {node.rank}"
                raise TopologyError([Finding("T103", message)])

    # What there is -------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @cached_property
    def num_accelerators(self) -> int:
        """Number of accelerators of all nodes."""
        return sum(len(node.accelerator_ids) for node in self.nodes)

    @cached_property
    def noun(self) -> str:
        """The word for its accelerators: GPU, NPU; or accelerator if there are several kinds."""
        nouns = {node.accelerator_type.noun for node in self.nodes if node.accelerator_ids} or {"GPU"}
        return nouns.pop() if len(nouns) == 1 else "accelerator"

    @property
    def topology(self) -> Topology:
        """The topology itself, so that a topology can be passed in place of a live cluster."""
        return self

    @cached_property
    def _groups_by_label(self) -> dict[str, NodeGroup]:
        every = tuple(range(len(self.nodes)))
        reserved = {CLUSTER: NodeGroup(CLUSTER, every), NODE: NodeGroup(NODE, every)}
        return {group.label: group for group in self.groups} | reserved

    @property
    def labels(self) -> list[str]:
        """Labels of all groups, the two reserved ones last."""
        return list(self._groups_by_label)

    def has_group(self, label: str) -> bool:
        """Return whether a group with a label is defined or reserved."""
        return label in self._groups_by_label

    def group(self, label: str | None = CLUSTER) -> NodeGroup:
        """Return the group with a label; ``None`` stands for all nodes.

        Raises:
            PlacementError: There is no such group.
        """
        label = CLUSTER if label is None else label
        found = self._groups_by_label.get(label) if isinstance(label, str) else None
        if found is None:
            raise PlacementError([self.unknown_group(label)])
        return found

    def unknown_group(self, label: str) -> Finding:
        """Return the finding about a label that no group has."""
        near = did_you_mean(str(label), self.labels)
        fixes = [Fix("did you mean", f"node_group: {near}")] if near else []
        fixes.append(Fix("or define it", f"node_groups: [{{label: {label}, node_ranks: 0}}]"))
        return Finding(
            "P111",
            f"there is no node group {label!r}",
            context=(f"cluster: {self.describe()}", "groups: " + ", ".join(self.labels[:20])),
            rule="a label is one of cluster.node_groups, 'node' or 'cluster'; case matters",
            fixes=tuple(fixes),
        )

    def describe(self) -> str:
        """Return one line for people: ``8 nodes x 8 GPUs (H200) + 2 nodes without GPUs``."""
        return self._description

    @cached_property
    def _description(self) -> str:
        parts = []
        for (count, kind, model), run in groupby(
            self.nodes, key=lambda n: (len(n.accelerator_ids), n.accelerator_type, n.accelerator_model)
        ):
            number = sum(1 for _ in run)
            nodes = f"{number:,} node{'s' if number > 1 else ''}"
            if not count:
                parts.append(f"{nodes} without GPUs")
                continue
            vendor = "" if kind is AcceleratorType.NVIDIA else kind.name
            detail = " ".join(word for word in (vendor, model) if word)
            noun = f"{kind.noun}{'s' if count > 1 else ''}"
            parts.append(f"{nodes} x {count} {noun}" + (f" ({detail})" if detail else ""))
        shown = " + ".join(parts[:6])
        return shown if len(parts) <= 6 else f"{shown} + {len(parts) - 6:,} more kinds"

    # Where it comes from -------------------------------------------------------------------

    @staticmethod
    def of(cluster_or_topology: Any) -> Topology:
        """Return the topology of a live cluster, or a topology itself.

        Raises:
            TopologyError: The argument is neither.
        """
        topology = getattr(cluster_or_topology, "topology", None)
        if not isinstance(topology, Topology):
            message = f"a cluster or a topology is wanted, not a {type(cluster_or_topology).__name__}"
            fix = Fix("describe the machines", 'roost.Topology.parse("2x8")')
            raise TopologyError([Finding("T103", message, fixes=(fix,))])
        return topology

    @staticmethod
    def parse(text: str) -> Topology:
        """Return the topology of a short text: ``"2x8"``, ``"8x8:A800+8x8:4090+2x0"``.

        Raises:
            TopologyError: With every part of the text that is wrong.
        """
        from roost.topology.parse import parse_topology

        return parse_topology(text)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Topology:
        """Return the topology that a cluster file describes.

        Raises:
            ConfigError: The file cannot be read or is not YAML.
            TopologyError: With every problem of its contents.
        """
        from roost.source import load_tree
        from roost.topology.load import read_topology

        return read_topology(load_tree(path))

    def with_groups(self, cluster_config: Any) -> Topology:
        """Return this topology with the ``node_groups`` of a job added.

        Args:
            cluster_config: A job's ``cluster`` section, or the whole job.

        Raises:
            ConfigError: With every problem of the groups.
        """
        from roost.source import as_tree
        from roost.topology import keys
        from roost.topology.groups import read_groups

        tree = as_tree(cluster_config)
        section = tree.get("cluster") or tree
        findings: list[Finding] = []
        used = section.get(keys.NUM_NODES.name)
        limit = used.value if used is not None and type(used.value) is int and used.value > 0 else self.num_nodes
        groups = read_groups(section, self.first(limit), findings)
        raise_problems(findings)
        return self.adding(groups)

    def adding(self, groups: Iterable[NodeGroup]) -> Topology:
        """Return this topology with further groups; a group with a label that exists replaces the old one."""
        merged = {group.label: group for group in self.groups} | {group.label: group for group in groups}
        return Topology(self.nodes, tuple(merged.values())) if merged else self

    def first(self, num_nodes: int) -> Topology:
        """Return the first nodes as a topology; groups keep their nodes among these, and empty groups are dropped."""
        if num_nodes >= len(self.nodes):
            return self
        groups = []
        for group in self.groups:
            ranks = tuple(rank for rank in group.node_ranks if rank < num_nodes)
            if ranks:
                hardware = tuple(item for item in group.hardware if item[0] < num_nodes)
                envs = tuple(
                    NodeEnvironment(kept, env.variables, env.interpreter)
                    for env in group.environments
                    if (kept := tuple(rank for rank in env.node_ranks if rank < num_nodes))
                )
                groups.append(NodeGroup(group.label, ranks, group.hardware_type, hardware, envs))
        return Topology(self.nodes[:num_nodes], tuple(groups))

    # JSON ----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return plain data in the form of a cluster file; equal nodes are written once, with a count."""
        entries: list[dict[str, Any]] = []
        for node in self.nodes:
            entry = _node_entry(node)
            if entries and "name" not in entry and entries[-1] == {"count": entries[-1]["count"], **entry}:
                entries[-1]["count"] += 1
            else:
                entries.append({"count": 1, **entry})
        plain: dict[str, Any] = {"nodes": entries}
        if self.groups:
            plain["node_groups"] = [_group_entry(group) for group in self.groups]
        return plain

    def to_json(self) -> str:
        """Return JSON text, identical for equal topologies; :meth:`from_json` is the inverse."""
        import json

        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Topology:
        """Return the topology of plain data; the inverse of :meth:`to_dict`."""
        from roost.source import as_tree
        from roost.topology.load import read_topology

        return read_topology(as_tree(plain), check_hardware=False, check_names=False)

    @staticmethod
    def from_json(text: str) -> Topology:
        """Return the topology of a JSON text; the inverse of :meth:`to_json`.

        Raises:
            TopologyError: The text is not the JSON of a topology.
        """
        import json

        try:
            plain = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TopologyError([Finding("T104", f"not a topology: not JSON ({error})")]) from None
        if not isinstance(plain, dict):
            raise TopologyError([Finding("T104", "not a topology: a JSON object is wanted")])
        return Topology.from_dict(plain)


def _number(value: float | None) -> float | None:
    """Return 8 for both 8 and 8.0, so that equal topologies have identical JSON."""
    return int(value) if value is not None and value == int(value) else value


def _sorted(value: Any) -> Any:
    """Return plain data with sorted keys."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, (list, tuple)) else value


def _node_entry(node: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": node.name,
        "address": node.address,
        "cpus": _number(node.cpus),
        "memory_gib": _number(node.memory_gib),
        "labels": dict(sorted(node.labels.items())),
        "hardware": [{"type": item.type, **_sorted(item.fields)} for item in node.hardware],
    }
    entry = {key: value for key, value in entry.items() if value not in ("", None, {}, [])}
    if node.accelerator_ids:
        accelerators: dict[str, Any] = {
            "count": len(node.accelerator_ids),
            "vendor": node.accelerator_type.name,
            "model": node.accelerator_model,
            "memory_gib": _number(node.accelerator_memory_gib),
        }
        if node.accelerator_ids != numbered_ids(len(node.accelerator_ids)):
            accelerators["ids"] = list(node.accelerator_ids)
        entry["accelerators"] = {k: v for k, v in accelerators.items() if v not in ("", None)}
    return entry


def _group_entry(group: NodeGroup) -> dict[str, Any]:
    entry: dict[str, Any] = {"label": group.label, "node_ranks": format_ranks(group.node_ranks)}
    if group.hardware_type:
        entry["hardware"] = {
            "type": group.hardware_type,
            "configs": [{"node_rank": rank, **_sorted(item.fields)} for rank, item in group.hardware],
        }
    if group.environments:
        entry["env_configs"] = []
        for env in group.environments:
            config: dict[str, Any] = {"node_ranks": format_ranks(env.node_ranks)}
            if env.variables:
                config["env_vars"] = [{key: value} for key, value in sorted(env.variables.items())]
            if env.interpreter:
                config["python_interpreter_path"] = env.interpreter
            entry["env_configs"].append(config)
    return entry

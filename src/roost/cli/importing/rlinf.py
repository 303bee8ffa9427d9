"""Convert an RLinf configuration to a job file. The placement language is the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from roost.cli.importing.configs import Settings
from roost.cli.importing.parts import Imported, Left, raise_found, write_left, write_sizes
from roost.cli.inputs import read_cluster
from roost.cli.writing import Writer, scalar
from roost.errors import RankError, RoostError
from roost.hardware import hardware_types
from roost.ranks import parse_ranks
from roost.source import Tree
from roost.topology import Topology
from roost.topology.keys import NODE_GROUP

__all__ = ["import_rlinf"]

_MODEL = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
_ENGINE = ("tensor_parallel_size", "pipeline_parallel_size")
_SCHEDULER = "Settings of RLinf's scheduler, which Roost does not have"
_OTHERS = "Not about placement"
_GPUS_PER_NODE = 8
"""GPUs per node, if the configuration does not set it."""


@dataclass
class _Section:
    """The cluster section."""

    num_nodes: int
    placements: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    is_auto: bool = False
    without_hardware: list[str] = field(default_factory=list)
    """Labels of node groups with ``ignore_hardware``."""

    @property
    def names(self) -> list[str]:
        return [name.strip() for key in self.placements for name in key.split(",")]

    def placement(self, name: str) -> str:
        """Return the placement text of a component."""
        for key, value in self.placements.items():
            if name in [part.strip() for part in key.split(",")]:
                return str(value.get("placement", "") if isinstance(value, dict) else value)
        return ""

    @property
    def types(self) -> tuple[str, ...]:
        """Hardware types of its node groups."""
        found = [group["hardware"].get("type") for group in self.groups if isinstance(group.get("hardware"), dict)]
        return tuple(dict.fromkeys(str(kind) for kind in found if kind))


def import_rlinf(words: Sequence[str], cluster: str = "") -> Imported:
    """Return the job file of an RLinf configuration.

    Args:
        words: A file, overrides (``cluster.num_nodes=2``), or both.
        cluster: The value of ``--cluster``; empty: the smallest cluster that fits.

    Raises:
        UsageError: With all invalid values (U140), unresolved values (U142) and contradictions (U141).
    """
    settings = Settings.read(words)
    left = Left()
    remarks: list[str] = []
    section = _read(settings, left)
    raise_found(settings.findings)
    cluster = cluster or _machines(section, settings)
    topology = read_cluster(cluster)
    _ignore_hardware(section, topology, left, remarks)
    sizes = _sizes(settings, section)
    recompute = settings.boolean("algorithm.recompute_logprobs") and "inference" in section.names
    raise_found(settings.findings)
    mode = _mode(settings, section)
    head = [f"From a configuration of RLinf, made for --cluster {cluster}"]
    if not settings.has("cluster.num_gpus_per_node"):
        head.append("RLinf counts the GPUs of live nodes; other machines: roost plan … --cluster 4x8")
    text = _write(section, mode, sizes, recompute)
    if mode and not _resolves(text, topology) and _resolves(plain := _write(section, "", sizes, recompute), topology):
        text = plain
        remarks.append(f"placement_mode: {mode} is left out: the placement does not match that mode.")
    unknown = [kind for kind in section.types if kind not in hardware_types()]
    if unknown:
        remarks.append(f"Types that a module registers (--import, docs/how-to/topologies.md): {', '.join(unknown)}.")
    _collect_left(settings, left, remarks)
    writer = Writer()
    for line in [*head, *(f"- {remark}" for remark in remarks)]:
        writer.comment(line)
    end = Writer()
    write_left(end, left)
    ending = f"\n{end.text()}" if left.about else ""
    return Imported(writer.text() + text + ending, cluster, section.types)


# Reading ----------------------------------------------------------------------------------------


def _read(settings: Settings, left: Left) -> _Section:
    tree = settings.tree.get("cluster")
    placements = tree.get("component_placement") if tree is not None else None
    if placements is None or not placements.is_mapping or not placements.value:
        fix = ("it looks like", "cluster: {num_nodes: 1, component_placement: {actor,rollout: all}}")
        settings.clash("nothing is placed: cluster.component_placement is missing", "cluster", fix)
        return _Section(1)
    section = _Section(settings.integer("cluster.num_nodes", 1), is_auto=settings.boolean("cluster.auto_scheduler"))
    settings.used.update(("cluster.component_placement", "cluster.node_groups", "cluster.num_gpus_per_node"))
    for key, value in placements.items():
        path = f"cluster.component_placement.{key}"
        section.placements[key] = (
            {inner: _text(settings, child, path) for inner, child in value.items()}
            if value.is_mapping
            else _text(settings, value, path)
        )
    groups = settings.at("cluster.node_groups")
    if groups is None:
        return section
    for index, entry in enumerate(groups.value if groups.is_list else [groups]):
        group = settings.plain(entry, f"cluster.node_groups.{index}")
        if not isinstance(group, dict):
            settings.clash("a node group is a mapping", "cluster.node_groups")
            continue
        label = str(group.get("label", index))
        if group.pop("ignore_hardware", False):
            section.without_hardware.append(label)
        for key in [key for key in group if key not in NODE_GROUP.names]:
            left.add("Keys of node groups that Roost does not have", f"{label}: {key} {group.pop(key)}")
        section.groups.append({key: _without_null(value) for key, value in group.items() if value is not None})
    return section


def _text(settings: Settings, tree: Tree, path: str) -> Any:
    """Return a placement or a label as written."""
    if not tree.is_scalar:
        return settings.plain(tree, path)
    if "${" not in tree.text:
        return tree.value if isinstance(tree.value, int) else tree.text
    return settings.plain(tree, path)


def _without_null(value: Any) -> Any:
    """Return a value without null keys, which mean the same as missing keys."""
    if isinstance(value, dict):
        return {key: _without_null(child) for key, child in value.items() if child is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _ranks_of(group: dict[str, Any]) -> list[int]:
    value = group.get("node_ranks", "")
    try:
        return [
            rank
            for item in (value if isinstance(value, list) else [value])
            for run in parse_ranks(str(item))
            for rank in run
        ]
    except RankError:
        return []  # the plan reports it, with its place


def _machines(section: _Section, settings: Settings) -> str:
    """Return the cluster text. Nodes that only carry robots, or whose hardware is ignored, have no GPUs."""
    each = settings.integer("cluster.num_gpus_per_node", _GPUS_PER_NODE, 0)
    bare: set[int] = set()
    others: set[int] = set()
    for group in section.groups:
        is_bare = "hardware" in group or str(group.get("label")) in section.without_hardware
        (bare if is_bare else others).update(_ranks_of(group))
    sizes = [0 if rank in bare - others else each for rank in range(section.num_nodes)]
    if not any(sizes) and any(_counts_accelerators(section, name) for name in section.names):
        sizes = [each] * section.num_nodes
    return "+".join(f"{len(list(run))}x{size}" for size, run in groupby(sizes))


def _counts_accelerators(section: _Section, name: str) -> bool:
    for key, value in section.placements.items():
        if name in [part.strip() for part in key.split(",")]:
            return not isinstance(value, dict) or value.get("node_group", "cluster") == "cluster"
    return False


def _ignore_hardware(section: _Section, topology: Topology, left: Left, remarks: list[str]) -> None:
    """Place components of groups with ``ignore_hardware`` in the group ``node``, whose ranks count nodes."""
    for group in section.groups:
        label = str(group.get("label"))
        nodes = _ranks_of(group)
        if label not in section.without_hardware:
            continue
        if not any(topology.nodes[rank].num_accelerators for rank in nodes if rank < topology.num_nodes):
            remarks.append(
                f"Group {label} ignores hardware: its nodes have none here, so its ranks count nodes anyway."
            )
            continue
        moved = []
        for key, value in section.placements.items():
            if isinstance(value, dict) and str(value.get("node_group")) == label:
                value["node_group"] = "node"
                value["placement"] = _by_node(str(value.get("placement", "all")), nodes)
                moved.append(key)
        if moved:
            remarks.append(
                f"Group {label} ignores hardware: {', '.join(moved)} is placed by node instead (node_group: node)."
            )
            if group.get("env_configs"):
                left.add("Environments of a group reach only its own components", f"{label}: env_configs")


def _by_node(text: str, nodes: list[int]) -> str:
    """Return a placement on the nodes of a group as a placement on the nodes of the cluster."""
    segments = []
    for segment in text.split(","):
        resources, colon, processes = segment.partition(":")
        try:
            chosen = nodes if resources.strip() == "all" else [nodes[i] for run in parse_ranks(resources) for i in run]
        except (RankError, IndexError):
            return text  # the plan reports it
        first, last = chosen[0], chosen[-1]
        ranks = f"{first}-{last}" if len(chosen) > 1 and last - first + 1 == len(chosen) else ",".join(map(str, chosen))
        segments.append(ranks + colon + processes)
    return ",".join(segments)


def _sizes(settings: Settings, section: _Section) -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = {}
    for name in sorted(section.names, key=lambda name: (name != "actor", name != "rollout", name)):
        found = {
            key: settings.integer(f"{name}.model.{key}", 1) for key in _MODEL if settings.has(f"{name}.model.{key}")
        }
        found |= {key: settings.integer(f"{name}.{key}", 1) for key in _ENGINE if settings.has(f"{name}.{key}")}
        sizes[name] = found
    return sizes


# Deciding and writing ---------------------------------------------------------------------------


def _mode(settings: Settings, section: _Section) -> str:
    """Return the mode of RLinf's model-parallel placement; empty for tasks without it."""
    task = settings.text("runner.task_type")
    has_sizes = settings.has("rollout.tensor_parallel_size") or settings.has("actor.model.tensor_model_parallel_size")
    if section.is_auto or not {"actor", "rollout"} <= set(section.names):
        return ""
    if task.startswith("embodied") or not (task or has_sizes):
        return ""
    actor, rollout = (re.sub(r"\s", "", section.placement(name)).partition(":")[0] for name in ("actor", "rollout"))
    return "collocated" if actor == rollout else "disaggregated"


def _write(section: _Section, mode: str, sizes: dict[str, dict[str, int]], recompute: bool) -> str:
    writer = Writer().key("cluster").key("num_nodes", section.num_nodes, depth=1)
    if section.is_auto:
        writer.key("auto_scheduler", True, "the actor may grow; the scheduler itself is RLinf's", depth=1)
    if mode:
        writer.key("placement_mode", mode, "RLinf derives it; a Roost job file states it", depth=1)
    if section.groups:
        writer.key("node_groups", section.groups, depth=1)
    writer.key("component_placement", depth=1)
    for key, value in section.placements.items():
        if isinstance(value, dict):
            writer.key(key, depth=2)
            for inner, child in value.items():
                writer.key(inner, child, depth=3)
        else:
            writer.raw(f"    {scalar(key)}: {value if isinstance(value, int) else scalar(value)}")
    write_sizes(writer, sizes)
    if recompute:
        writer.key("algorithm").key("recompute_logprobs", True, depth=1)
    return writer.text()


def _resolves(text: str, topology: Topology) -> bool:
    from roost.plan import Plan
    from roost.source.yaml import read_text

    try:
        Plan.resolve(read_text(text), topology)
    except RoostError as error:
        return set(error.codes) == {"C308"}  # a hardware type that its user registers
    return True


def _collect_left(settings: Settings, left: Left, remarks: list[str]) -> None:
    if settings.composed_of:
        remarks.append(
            f"Hydra composes it of {', '.join(settings.composed_of)}, which were not read: what they change about "
            "placement, say after --."
        )
    if settings.program:
        left.add("The program", " ".join(settings.program))
    for removed in settings.removed:
        left.add("Removed by the command line", f"~{removed}")
    settings.used.discard("runner.task_type")
    for name, keys in settings.left().items():
        if name == "cluster":
            left.add(_SCHEDULER, ", ".join(f"cluster.{key}" for key in keys))
        else:
            left.add(_OTHERS, f"{name}: {', '.join(keys)}")

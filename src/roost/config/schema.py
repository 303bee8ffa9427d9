"""JSON Schemas of job and cluster files, for editors.

The keys come from the tables that the readers use; what each key takes, and what an editor says of it,
stands here. A key that one side knows and the other does not is an error as soon as the schema is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roost.config import job, layout
from roost.hardware import AcceleratorType
from roost.topology import CLUSTER, NODE, groups, load

__all__ = ["cluster_schema", "job_schema"]

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_RANKS = r"[0-9]+(\s*-\s*[0-9]+)?"
_SEGMENT = rf"(all|{_RANKS})(\s*:\s*{_RANKS})?"
PLACEMENT_PATTERN = rf"^\s*{_SEGMENT}(\s*,\s*{_SEGMENT})*\s*$"
"""A placement text. What it means is checked by ``roost validate``; this is only its form."""
_NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
_NAMES_PATTERN = rf"^\s*{_NAME}(\s*,\s*{_NAME})*\s*$"
_RANKS_PATTERN = rf"^\s*{_RANKS}(\s*,\s*{_RANKS})*\s*$"
_PROGRAM_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"


# What values may be -----------------------------------------------------------------------------


def _or_null(schema: Schema) -> Schema:
    """The same, or null, which readers take for a key that is missing."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    choices = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, **choices, "type": [*kinds, "null"]}


def _count(minimum: int) -> Schema:
    return _or_null({"type": "integer", "minimum": minimum})


def _one_or_many(item: Schema, is_required: bool = False) -> Schema:
    """A list; a single entry may stand without the list."""
    return {"anyOf": [{"type": "array", "items": item}, item, *([] if is_required else [{"type": "null"}])]}


_SWITCH = _or_null({"type": "boolean"})
_ABOVE_ZERO = _or_null({"type": "number", "exclusiveMinimum": 0})
_SHARE = _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
_TEXT: Schema = {"type": ["string", "number"], "pattern": r"\S"}
_LABEL: Schema = {
    "type": ["string", "number"],
    "pattern": r"^[^,]*[^,\s][^,]*$",
    "not": {"enum": [CLUSTER, NODE]},
}
_PROGRAM = _or_null({"type": "string", "pattern": _PROGRAM_PATTERN})
_PLACEMENT: Schema = {"type": ["string", "integer"], "pattern": PLACEMENT_PATTERN, "minimum": 0}
_NODE_RANK: Schema = {"type": ["integer", "string"], "minimum": 0, "pattern": _RANKS_PATTERN}
_ALL_NODES: Schema = {"type": "string", "pattern": r"^\s*[aA][lL][lL]\s*$"}
_NODE_RANKS: Schema = {"anyOf": [_NODE_RANK, _ALL_NODES, {"type": "array", "items": _NODE_RANK, "minItems": 1}]}
_SCALAR: Schema = {"type": ["string", "number", "boolean"]}


def _mapping(
    keys: tuple[str, ...], entries: Mapping[str, tuple[Schema, str]], what: str, required: tuple[str, ...] = ()
) -> Schema:
    """A mapping with exactly the keys that its reader knows."""
    if set(keys) != set(entries):
        odd = ", ".join(sorted(set(keys) ^ set(entries)))
        raise LookupError(f"{what}: reader and schema do not agree on {odd}")
    properties = {key: {**entries[key][0], "description": entries[key][1]} for key in keys}
    schema: Schema = {"type": "object", "description": what, "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def _having(key: str) -> Schema:
    """A mapping that says something under a key."""
    return {"required": [key], "properties": {key: {"not": {"type": "null"}}}}


# Node groups, in both files ---------------------------------------------------------------------


def _node_groups() -> Schema:
    variable: Schema = {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": _SCALAR}
    environment = _mapping(
        groups.ENVIRONMENT_KEYS,
        {
            "node_ranks": (_NODE_RANKS, "The nodes of the group that this is for: 3, 0-3, a list, or all."),
            "env_vars": (_one_or_many(variable), "Variables of the workers there: a list of single NAME: value."),
            "python_interpreter_path": (_or_null(_TEXT), "The Python that workers there are started with."),
        },
        "Variables and interpreter of workers on some nodes of the group.",
        required=("node_ranks",),
    )
    device: Schema = {
        "type": "object",
        "description": "One piece of hardware: its node, and the fields of its registered type.",
        "properties": {"node_rank": {"type": "integer", "minimum": 0, "description": "The node that has it."}},
        "required": ["node_rank"],
    }
    hardware = _mapping(
        groups.HARDWARE_KEYS,
        {
            "type": (_TEXT, "A type that a module registers with register_hardware, such as Franka."),
            "configs": (_one_or_many(device), "One entry per piece of hardware. Without it, what the nodes carry."),
        },
        "Robots or other hardware: placement ranks of this group count them.",
        required=("type",),
    )
    group = _mapping(
        groups.GROUP_KEYS,
        {
            "label": (_LABEL, "Its name, for node_group of a component. 'node' and 'cluster' are taken."),
            "node_ranks": (_NODE_RANKS, "Its nodes: a rank (3), a range (0-7), a list of them, or all."),
            "env_configs": (_one_or_many(environment), "Variables and interpreters of workers on its nodes."),
            "hardware": (_or_null(hardware), "Robots or other hardware: placement ranks of this group count them."),
        },
        "Some of the nodes, under a name.",
        required=("label", "node_ranks"),
    )
    return _one_or_many(group)


# Jobs -------------------------------------------------------------------------------------------


def _component() -> Schema:
    labels: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
    return _mapping(
        job.COMPONENT_KEYS,
        {
            "placement": (_PLACEMENT, "Where: resource_ranks[:process_ranks], such as 0-7, all, or 0-7:0-3."),
            "node_group": (labels, "Where ranks are counted: a label, 'a,b' or a list; node counts nodes."),
            "role": (_or_null(_TEXT), "What it does: actor, rollout, inference, critic, reward, … Default: its name."),
            "gpu_share": (_SHARE, "Fraction of each of its GPUs that one process takes; added up per GPU."),
            "cpus": (_ABOVE_ZERO, "CPUs that one process takes."),
            "memory_gib": (_ABOVE_ZERO, "Peak memory of one process on each of its GPUs; added up per GPU."),
            "worker": (_PROGRAM, "module:Class that 'roost run' launches there."),
            "processes_per_engine": (_count(1), "How many processes, one per node, make one engine. Default 1."),
            "placeholder": (_SWITCH, "true: its GPUs are reserved, and nothing is started."),
        },
        "Where a component goes, in full.",
        required=("placement",),
    )


def _layout() -> Schema:
    share = "Fraction of a GPU that one {} takes."
    group = _mapping(
        layout.GROUP_KEYS,
        {
            "num_gpus": ({"type": "integer", "minimum": 0}, "GPUs of this group."),
            "num_gpus_per_engine": (_count(1), "GPUs of one of its engines. Default: rollout_num_gpus_per_engine."),
            "placeholder": (_SWITCH, "true: reserved, and nothing is started there."),
        },
        "A group of engines.",
        required=("num_gpus",),
    )
    about = {
        "actor_num_nodes": "Nodes of the trainer. Default 1.",
        "actor_num_gpus_per_node": "GPUs of the trainer on each of its nodes.",
        "rollout_num_gpus": "GPUs of all engines. Default, where they share: the trainer's.",
        "rollout_num_gpus_per_engine": "GPUs of one engine. Default 1.",
        "num_gpus_per_node": "GPUs of a node; checked against the machines, which say it anyway.",
        "num_gpus_per_actor": share.format("trainer process"),
        "num_gpus_per_critic": share.format("critic process"),
        "num_gpus_per_rollout_engine": share.format("engine") + " Of each of its GPUs.",
        "debug_train_only": "Only the trainer, which lives on saved rollouts.",
        "debug_rollout_only": "Only the engines.",
        "external_engines": "Engines run elsewhere; none is placed.",
        "async_training": "Generation goes on while the trainer trains: refused where they share GPUs.",
        "use_critic": "A critic on the trainer's GPUs.",
    }
    entries: dict[str, tuple[Schema, str]] = {
        "mode": (
            _or_null({"type": "string", "enum": list(layout.MODES)}),
            "collocated: engines on the trainer's GPUs; disaggregated: on others; hybrid: from the trainer's on.",
        ),
        "colocate": (_SWITCH, "The same as a switch: trainer and engines share GPUs."),
        "rollout_groups": (_one_or_many(group), "Several groups of engines instead of one."),
    }
    entries |= {key: (_count(minimum), about[key]) for key, minimum in layout.COUNTS.items()}
    entries |= {key: (_SHARE, about[key]) for key in layout.SHARES}
    entries |= {key: (_SWITCH, about[key]) for key in layout.SWITCHES}
    schema = _mapping(layout.KEYS, entries, "Trainer and engines by numbers instead of placements.")
    generates_only: Schema = {"properties": {"debug_rollout_only": {"const": True}}, "required": ["debug_rollout_only"]}
    return {**schema, "if": generates_only, "else": _having("actor_num_gpus_per_node")}


def _cluster_section() -> Schema:
    placements: Schema = {
        "type": ["object", "null"],
        "minProperties": 1,
        "propertyNames": {"pattern": _NAMES_PATTERN, "not": {"enum": sorted(job.WORDS_OF_YAML)}},
        "additionalProperties": {
            "description": "Where the component goes: a placement such as 0-7, all or 0-7:0-3; or a mapping.",
            "anyOf": [{"$ref": "#/$defs/placement"}, {"$ref": "#/$defs/component"}],
        },
    }
    order: Schema = {"type": "string", "pattern": r"^(address|name|label:.*)$"}
    schema = _mapping(
        job.CLUSTER_KEYS,
        {
            "num_nodes": (_count(0), "The job uses the first so many nodes; 0 or nothing: all there are."),
            "component_placement": (placements, "Components (names, or several with commas), and where each goes."),
            "layout": ({"anyOf": [{"$ref": "#/$defs/layout"}, {"type": "null"}]}, "Numbers instead of placements."),
            "node_groups": (_node_groups(), "Nodes under names, with environments and hardware."),
            "auto_scheduler": (_SWITCH, "true: the same as placement_mode: auto."),
            "placement_mode": (
                _or_null({"type": "string", "enum": list(job.MODES)}),
                "Insist on a mode; a job that is not so is refused. Parallel sizes then decide engines.",
            ),
            "node_order": (_or_null(order), "Order of live nodes after the head: address, name or label:KEY."),
        },
        "Where everything goes.",
    )
    return {**schema, "anyOf": [_having("component_placement"), _having("layout")]}


def _sizes() -> Schema:
    """Sections that Roost reads a few sizes of; everything else in them is the job's own."""
    size = _or_null({"type": "integer", "minimum": 1})

    def section(what: str, sizes: dict[str, str]) -> Schema:
        return {"description": what, "properties": {k: {**size, "description": text} for k, text in sizes.items()}}

    model = section(
        "The model. Roost reads its parallel sizes.",
        {
            "tensor_model_parallel_size": "GPUs that share each tensor.",
            "context_parallel_size": "GPUs that share each sequence.",
            "pipeline_model_parallel_size": "Pipeline stages.",
        },
    )
    engine = section(
        "The rollout engines. Roost reads their parallel sizes.",
        {
            "tensor_parallel_size": "GPUs that share each tensor of an engine.",
            "pipeline_parallel_size": "Pipeline stages of an engine.",
        },
    )
    recompute = {**_SWITCH, "description": "Whether inference recomputes log-probabilities."}
    found: Schema = {"rollout": engine}
    for role in ("actor", "critic", "inference", "critic_inference"):
        found[role] = {"description": f"The {role}; parallel sizes are read.", "properties": {"model": model}}
    found["algorithm"] = {"description": "The algorithm.", "properties": {"recompute_logprobs": recompute}}
    return found


def job_schema() -> Schema:
    """The JSON Schema of a job file."""
    run: Schema = {
        "description": "module:function that 'roost run' calls with the cluster and the plan.",
        "type": ["string", "object", "array", "null"],
        "pattern": _PROGRAM_PATTERN,
    }
    return {
        "$schema": _DIALECT,
        "$id": "urn:roost:schema:job",
        "title": "Roost job file",
        "description": "Roost reads the sections below; all others are the job's own.",
        "type": "object",
        "properties": {"cluster": {"$ref": "#/$defs/cluster"}, "run": run, **_sizes()},
        "required": ["cluster"],
        "$defs": {
            "cluster": _cluster_section(),
            "component": _component(),
            "layout": _layout(),
            "placement": _PLACEMENT,
        },
    }


# Clusters ---------------------------------------------------------------------------------------


def _node() -> Schema:
    accelerators = _mapping(
        load.ACCELERATOR_KEYS,
        {
            "count": (_count(0), "How many a node has. Default: as many as there are ids."),
            "model": (_or_null(_TEXT), "Their model, such as H200."),
            "vendor": (_or_null(_TEXT), "Their vendor: " + ", ".join(AcceleratorType.names()) + ". Default NVIDIA."),
            "memory_gib": (_ABOVE_ZERO, "Memory of one of them; memory_gib of components is added up against it."),
            "ids": (
                {"type": ["array", "null"], "items": _TEXT},
                "Their ids on the node, one each. Default: 0, 1, 2, …",
            ),
        },
        "The accelerators of each of these nodes.",
    )
    device: Schema = {
        "type": "object",
        "description": "One piece of hardware: its type, and the fields of that type.",
        "properties": {"type": {**_TEXT, "description": "A type registered with register_hardware."}},
        "required": ["type"],
    }
    one_each: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]}
    labels: Schema = {"type": ["object", "null"], "additionalProperties": _SCALAR}
    how_many: Schema = {"anyOf": [{"type": ["integer", "null"], "minimum": 0}, accelerators]}
    return _mapping(
        load.NODE_KEYS,
        {
            "count": (_count(1), "How many such nodes. Default 1."),
            "name": (one_each, "Its name; for several nodes a list, or a stem: gpu gives gpu-0, gpu-1, …"),
            "address": (one_each, "Its address; for several nodes a list."),
            "cpus": (_ABOVE_ZERO, "CPUs of a node."),
            "memory_gib": (_ABOVE_ZERO, "Memory of a node."),
            "accelerators": (how_many, "Accelerators of a node: a number, or a mapping. Default: none."),
            "labels": (labels, "Labels such as rack: r1."),
            "hardware": (_one_or_many(device), "Robots or other hardware that each of these nodes has."),
            "group": (_or_null(_LABEL), "Puts these nodes into the node group of this label."),
        },
        "Like nodes, written once.",
    )


def cluster_schema() -> Schema:
    """The JSON Schema of a cluster file."""
    schema = _mapping(
        load.TOP_KEYS,
        {
            "nodes": (_one_or_many(_node(), is_required=True), "The nodes, in order: rank 0 is the first."),
            "node_groups": (_node_groups(), "Nodes under names, with environments and hardware."),
        },
        "The machines, in the order that ranks count.",
        required=("nodes",),
    )
    head = {"$schema": _DIALECT, "$id": "urn:roost:schema:cluster", "title": "Roost cluster file"}
    return {**head, **schema}

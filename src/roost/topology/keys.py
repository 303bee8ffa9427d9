"""The keys of cluster files, and of node groups in job files."""

from __future__ import annotations

from roost.hardware import AcceleratorType
from roost.source.keys import (
    TEXT_SCHEMA,
    Key,
    Schema,
    Section,
    entries,
    form,
    integer,
    integer_or,
    nested,
    number,
    text,
)
from roost.topology.model import CLUSTER, NODE

__all__ = [
    "ACCELERATORS",
    "CLUSTER_FILE",
    "ENVIRONMENT",
    "HARDWARE",
    "NODE_ENTRY",
    "NODE_GROUP",
    "NODE_GROUPS",
    "NUM_NODES",
]

RANK_PATTERN = r"[0-9]+(\s*-\s*[0-9]+)?"
"""A rank or a range, as a regular expression."""

LABEL_SCHEMA: Schema = {
    "type": ["string", "number"],
    "pattern": r"^[^,]*[^,\s][^,]*$",
    "not": {"enum": [CLUSTER, NODE]},
}
SCALAR_SCHEMA: Schema = {"type": ["string", "number", "boolean"]}
_RANKS_SCHEMA: Schema = {
    "type": ["integer", "string"],
    "minimum": 0,
    "pattern": rf"^\s*{RANK_PATTERN}(\s*,\s*{RANK_PATTERN})*\s*$",
}
_ALL_SCHEMA: Schema = {"type": "string", "pattern": r"^\s*[aA][lL][lL]\s*$"}
_NODE_RANKS = form(
    {"anyOf": [_RANKS_SCHEMA, _ALL_SCHEMA, {"type": "array", "items": _RANKS_SCHEMA, "minItems": 1}]},
    "rank, range, list of them, or `all`",
)
_ONE_PER_NODE = form({"anyOf": [TEXT_SCHEMA, {"type": "array", "items": TEXT_SCHEMA}]}, "text, or a list of texts")
_VARIABLE: Schema = {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": SCALAR_SCHEMA}


# Node groups, in job files and in cluster files ------------------------------------------------

ENVIRONMENT_NODE_RANKS = Key(
    "node_ranks",
    _NODE_RANKS,
    "Nodes of the group that the entry is for: a rank (3), a range (0-3), a list of them, or all.",
    "0-3",
    required=True,
)
ENV_VARS = Key(
    "env_vars",
    form(
        {"anyOf": [{"type": "array", "items": _VARIABLE}, _VARIABLE]},
        "list of single `NAME: value` entries",
    ),
    "Environment variables of the workers on these nodes: a list of entries with one name and value each.",
    "[{NCCL_DEBUG: INFO}]",
)
INTERPRETER = Key(
    "python_interpreter_path",
    text(),
    "Python interpreter that starts the workers on these nodes.",
    "/opt/venv/bin/python",
    "the interpreter that started Ray",
)
ENVIRONMENT = Section(
    "an env_configs entry",
    "Environment variables and the interpreter of workers on some nodes of a group.",
    (ENVIRONMENT_NODE_RANKS, ENV_VARS, INTERPRETER),
    "Environment entry",
)

DEVICE_NODE_RANK = Key("node_rank", integer(0), "Rank of the node that has the device.", "0", required=True)
DEVICE = Section(
    "an entry of hardware.configs",
    "One device: the rank of its node, and the fields of its registered type.",
    (DEVICE_NODE_RANK,),
    "Device",
    is_open=True,
)

HARDWARE_TYPE = Key(
    "type", text(), "A type that a module registers with register_hardware, such as Franka.", "Franka", required=True
)
HARDWARE_CONFIGS = Key(
    "configs",
    entries(DEVICE),
    "One entry for each device.",
    "[{node_rank: 0, robot_ip: 10.0.0.9}]",
    "the devices of that type that the nodes carry",
)
HARDWARE = Section(
    "hardware",
    "Robots or other devices: placement ranks of the group count them instead of accelerators.",
    (HARDWARE_TYPE, HARDWARE_CONFIGS),
    "Hardware of a node group",
)

LABEL = Key(
    "label",
    text(LABEL_SCHEMA),
    "Name of the group, for node_group of a component. 'node' and 'cluster' are reserved.",
    "a800",
    required=True,
)
GROUP_NODE_RANKS = Key(
    "node_ranks",
    _NODE_RANKS,
    "Nodes of the group: a rank (3), a range (0-7), a list of them, or all.",
    "0-3",
    required=True,
)
ENV_CONFIGS = Key(
    "env_configs",
    entries(ENVIRONMENT),
    "Environment variables and interpreters of the workers on the group's nodes.",
    "[{node_ranks: 0-3, env_vars: [{NCCL_DEBUG: INFO}]}]",
)
GROUP_HARDWARE = Key(
    "hardware",
    nested(HARDWARE),
    HARDWARE.about,
    "{type: Franka, configs: [{node_rank: 0, robot_ip: 10.0.0.9}]}",
    "none: the group counts accelerators, or nodes where there are none",
)
NODE_GROUP = Section(
    "a node group",
    "A named set of nodes.",
    (LABEL, GROUP_NODE_RANKS, ENV_CONFIGS, GROUP_HARDWARE),
    "Node group",
)

NODE_GROUPS = Key(
    "node_groups",
    entries(NODE_GROUP),
    "Named sets of nodes, with environments and hardware.",
    "[{label: a800, node_ranks: 0-3}]",
)

NUM_NODES = Key(
    "num_nodes",
    integer(0),
    "The job uses the first so many nodes; 0 means all.",
    "2",
    "all nodes",
)


# Cluster files -----------------------------------------------------------------------------------

ACCELERATOR_COUNT = Key(
    "count", integer(0), "Number of accelerators of one node.", "8", "the number of ids, or 0 without ids"
)
ACCELERATOR_MODEL = Key("model", text(), "Model of the accelerators, such as H200.", "H200")
VENDOR = Key(
    "vendor",
    text(),
    f"Vendor of the accelerators: {', '.join(AcceleratorType.names())}.",
    "AMD",
    "NVIDIA",
)
ACCELERATOR_MEMORY = Key(
    "memory_gib",
    number(),
    "Memory of one accelerator in GiB. The sum of memory_gib of the processes on it is checked against it.",
    "141",
)
ACCELERATOR_IDS = Key(
    "ids",
    form({"type": "array", "items": TEXT_SCHEMA}, "list of texts"),
    "Ids of the accelerators on the node, one for each.",
    "[GPU-aa, GPU-bb]",
    "0, 1, 2, …",
)
ACCELERATORS = Section(
    "accelerators",
    "The accelerators of each of the entry's nodes.",
    (ACCELERATOR_COUNT, ACCELERATOR_MODEL, VENDOR, ACCELERATOR_MEMORY, ACCELERATOR_IDS),
    "Accelerators",
)

NODE_DEVICE_TYPE = Key("type", text(), "A type registered with register_hardware.", "Franka", required=True)
NODE_DEVICE = Section(
    "a piece of hardware",
    "One device: its type, and the fields of that type.",
    (NODE_DEVICE_TYPE,),
    "Device of a node",
    is_open=True,
)

NODE_COUNT = Key("count", integer_or(1, 1), "Number of nodes like this.", "4")
NODE_NAME = Key(
    "name",
    _ONE_PER_NODE,
    "Name of the node. For several nodes: a list, or a stem, so that gpu gives gpu-0, gpu-1, …",
    "gpu",
)
NODE_ADDRESS = Key("address", _ONE_PER_NODE, "Address of the node. For several nodes: a list.", "10.0.0.1")
CPUS = Key("cpus", number(), "CPUs of one node.", "64")
NODE_MEMORY = Key("memory_gib", number(), "Host memory of one node in GiB.", "1024")
NODE_ACCELERATORS = Key(
    "accelerators",
    form({"anyOf": [{"type": "integer", "minimum": 0}, ACCELERATORS.schema()]}, f"number, or {ACCELERATORS.link}"),
    "Accelerators of one node: their number, or a mapping.",
    "8",
    "none",
)
NODE_LABELS = Key(
    "labels",
    form({"type": "object", "additionalProperties": SCALAR_SCHEMA}, "mapping of names to texts"),
    "Labels of the nodes, such as rack: r1.",
    "{rack: r1}",
)
NODE_HARDWARE = Key(
    "hardware",
    entries(NODE_DEVICE),
    "Robots or other devices that each of these nodes carries.",
    "[{type: Franka, robot_ip: 10.0.0.9}]",
)
NODE_IN_GROUP = Key("group", text(LABEL_SCHEMA), "Label of a node group that these nodes belong to.", "a800")
NODE_ENTRY = Section(
    "a node entry",
    "One node, or several nodes that are alike.",
    (
        NODE_COUNT,
        NODE_NAME,
        NODE_ADDRESS,
        CPUS,
        NODE_MEMORY,
        NODE_ACCELERATORS,
        NODE_LABELS,
        NODE_HARDWARE,
        NODE_IN_GROUP,
    ),
    "Node entry",
)

NODES = Key(
    "nodes",
    entries(NODE_ENTRY),
    "The nodes in order: the first has rank 0.",
    "[{count: 2, accelerators: {count: 8}}]",
    required=True,
)
CLUSTER_FILE = Section(
    "a cluster file",
    "The nodes of a cluster, in the order of their ranks.",
    (NODES, NODE_GROUPS),
    "Cluster file",
)

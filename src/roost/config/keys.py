"""The keys of job files. Node groups are declared in ``topology.keys``: cluster files have them too."""

from __future__ import annotations

from typing import Any

from roost.source.keys import (
    TEXT_SCHEMA,
    Key,
    Schema,
    Section,
    choice,
    entries,
    form,
    integer,
    integer_or,
    nested,
    number,
    program,
    switch,
    text,
)
from roost.topology.keys import NODE_GROUPS, NUM_NODES, RANK_PATTERN

__all__ = ["ALGORITHM", "CLUSTER", "COMPONENT", "ENGINE_SIZES", "JOB", "LAYOUT", "MODEL_SIZES", "ROLLOUT_GROUP"]

YAML_WORDS = frozenset({"null", "true", "false", "none", "nan", "all"})
"""Words that mean something else in a job file, and so cannot be the name of a component."""

NAME_PATTERN = r"[A-Za-z_][A-Za-z0-9_.-]*"
"""A component name, as a regular expression."""

_SEGMENT = rf"(all|{RANK_PATTERN})(\s*:\s*{RANK_PATTERN})?"
PLACEMENT_PATTERN = rf"^\s*{_SEGMENT}(\s*,\s*{_SEGMENT})*\s*$"
"""The form of a placement text, as a regular expression; its meaning is checked against the nodes."""

PLACEMENT_SCHEMA: Schema = {"type": ["string", "integer"], "pattern": PLACEMENT_PATTERN, "minimum": 0}


def _given(key: Key[Any]) -> Schema:
    """Return the schema of a mapping in which a key has a value."""
    return {"required": [key.name], "properties": {key.name: {"not": {"type": "null"}}}}


# A component --------------------------------------------------------------------------------------

PLACEMENT = Key(
    "placement",
    form(PLACEMENT_SCHEMA, "placement text"),
    "Where its processes live: resource_ranks[:process_ranks], such as 0-7, all, or 0-7:0-3.",
    "0-7",
    required=True,
)
NODE_GROUP = Key(
    "node_group",
    form({"anyOf": [TEXT_SCHEMA, {"type": "array", "items": TEXT_SCHEMA, "minItems": 1}]}, "label, or list of labels"),
    "Node groups in which the placement counts ranks: a label, 'a,b' or a list; 'node' counts nodes.",
    "a800",
    "the whole cluster",
    can_be_null=False,
)
ROLE = Key(
    "role",
    text(),
    "What the component does: actor, rollout, inference, critic, reward, …",
    "actor",
    "the component's name",
)
GPU_SHARE = Key(
    "gpu_share",
    number(1),
    "Fraction that one process takes of each of its GPUs. The shares on a GPU may add up to 1.",
    "0.5",
)
CPUS = Key("cpus", number(), "CPUs that one process takes.", "4")
MEMORY_GIB = Key(
    "memory_gib",
    number(),
    "Peak memory of one process on each of its GPUs in GiB. The sum per GPU is checked.",
    "60",
)
WORKER = Key("worker", program(), "Worker class that 'roost run' and roost.launch start there.", "my_job:Actor")
ENGINE = Key(
    "engine",
    program(),
    "Function that returns an engine, called in the processes of the component; "
    "with all values of the job if it takes an argument.",
    "my_job:make_engine",
)
PROCESSES_PER_ENGINE = Key(
    "processes_per_engine",
    integer_or(1, 1),
    "Number of processes, one for each node, that make one engine.",
    "2",
)
PLACEHOLDER = Key("placeholder", switch(), "true: its GPUs are reserved, and nothing is started on them.", "true")
COMPONENT = Section(
    "the placement of a component",
    "A component in full; a placement text alone stands for a mapping with only that key.",
    (PLACEMENT, NODE_GROUP, ROLE, GPU_SHARE, CPUS, MEMORY_GIB, WORKER, ENGINE, PROCESSES_PER_ENGINE, PLACEHOLDER),
    "Component",
)


# A layout ----------------------------------------------------------------------------------------

GROUP_GPUS = Key("num_gpus", integer(0), "GPUs of all engines of the group together.", "8", required=True)
GROUP_GPUS_PER_ENGINE = Key(
    "num_gpus_per_engine", integer(1), "GPUs of one engine of the group.", "2", "rollout_num_gpus_per_engine"
)
GROUP_PLACEHOLDER = Key("placeholder", switch(), "true: the GPUs are reserved, and nothing is started on them.", "true")
ROLLOUT_GROUP = Section(
    "a rollout group",
    "Engines of one size.",
    (GROUP_GPUS, GROUP_GPUS_PER_ENGINE, GROUP_PLACEHOLDER),
    "Rollout group",
)

ACTOR_GPUS_PER_NODE = Key(
    "actor_num_gpus_per_node",
    integer(0),
    "GPUs of the trainer on each of its nodes. Required unless debug_rollout_only is true.",
    "8",
)
DEBUG_ROLLOUT_ONLY = Key("debug_rollout_only", switch(), "Place only the engines.", "true")
COLOCATE = Key(
    "colocate",
    switch(),
    "Whether trainer and engines share GPUs: an older form of mode.",
    "true",
    "true for the modes collocated and hybrid, else false",
)
LAYOUT_MODE = Key(
    "mode",
    choice("collocated", "disaggregated", "hybrid"),
    "collocated: engines on the trainer's GPUs; disaggregated: engines on other GPUs; "
    "hybrid: engines on the trainer's GPUs and on further ones.",
    "collocated",
    "what colocate and the numbers amount to",
)
ROLLOUT_GROUPS = Key(
    "rollout_groups",
    entries(ROLLOUT_GROUP),
    "Several groups of engines instead of one.",
    "[{num_gpus: 8, num_gpus_per_engine: 2}]",
)
_TRAINER_SHARE = "0.8 where the engines share the GPU, else 1; half of it with a critic"
LAYOUT_NUMBERS = (
    Key("actor_num_nodes", integer_or(1, 0), "Nodes of the trainer.", "2"),
    ACTOR_GPUS_PER_NODE,
    Key("rollout_num_gpus", integer(0), "GPUs of all engines.", "8", "the trainer's GPUs if they are shared, else 0"),
    Key("rollout_num_gpus_per_engine", integer_or(1, 1), "GPUs of one engine.", "2"),
    Key("num_gpus_per_node", integer(1), "GPUs of a node. Checked against the nodes.", "8", "taken from the nodes"),
    Key("num_gpus_per_actor", number(1), "Fraction of a GPU that one trainer process takes.", "0.8", _TRAINER_SHARE),
    Key("num_gpus_per_critic", number(1), "Fraction of a GPU that one critic process takes.", "0.4", _TRAINER_SHARE),
    Key(
        "num_gpus_per_rollout_engine",
        number(1),
        "Fraction that an engine takes of each of its GPUs.",
        "0.2",
        "0.2 where it shares them with the trainer, else 1",
    ),
    Key("debug_train_only", switch(), "Place only the trainer, which trains on saved rollouts.", "true"),
    DEBUG_ROLLOUT_ONLY,
    Key("external_engines", switch(), "Engines run elsewhere: none is placed.", "true"),
    Key("async_training", switch(), "Generate while the trainer trains: refused where they share GPUs.", "true"),
    Key("use_critic", switch(), "Place a critic on the trainer's GPUs.", "true"),
)
"""Keys that are read one by one, without regard to each other."""
LAYOUT = Section(
    "the layout",
    "Trainer and engines by numbers instead of placements.",
    (*LAYOUT_NUMBERS, ROLLOUT_GROUPS, LAYOUT_MODE, COLOCATE),
    "Layout",
    pattern={
        "if": {"properties": {DEBUG_ROLLOUT_ONLY.name: {"const": True}}, "required": [DEBUG_ROLLOUT_ONLY.name]},
        "else": _given(ACTOR_GPUS_PER_NODE),
    },
)


# The cluster section ----------------------------------------------------------------------------

COMPONENT_PLACEMENT = Key(
    "component_placement",
    form(
        {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {
                "pattern": rf"^\s*{NAME_PATTERN}(\s*,\s*{NAME_PATTERN})*\s*$",
                "not": {"enum": sorted(YAML_WORDS)},
            },
            "additionalProperties": {
                "description": "Where the component lives: a placement such as 0-7, all or 0-7:0-3; or a mapping.",
                "anyOf": [{"$ref": "#/$defs/placement"}, {"$ref": "#/$defs/component"}],
            },
        },
        f"mapping of names to placements or {COMPONENT.link}",
    ),
    "The components and their placements. A key may name several components, separated by commas.",
    "{actor: 0-7}",
)
LAYOUT_KEY = Key(
    "layout",
    nested(LAYOUT, "layout"),
    "Trainer and engines by numbers, instead of placements or beside them.",
    "{actor_num_gpus_per_node: 8}",
)
AUTO_SCHEDULER = Key("auto_scheduler", switch(), "true: the same as placement_mode: auto.", "true")
PLACEMENT_MODE = Key(
    "placement_mode",
    choice("collocated", "disaggregated", "hybrid", "auto"),
    "Insist on a mode: a job that does not have it is refused. "
    "With every mode but hybrid, parallel sizes decide how many GPUs an engine has.",
    "collocated",
    "none: placements are taken as written",
)
PROGRAMS = Key(
    "programs",
    form(
        {
            "type": "object",
            "propertyNames": {"pattern": rf"^{NAME_PATTERN}$"},
            "additionalProperties": {"type": ["string", "null"], "pattern": program().schema()["pattern"]},
        },
        "mapping of names to `module:Name`",
    ),
    "Programs by the name or the role of their component, for components without a mapping of their own: "
    "worker classes, and for the role rollout functions that return an engine.",
    "{actor: my_job:Actor, rollout: my_job:make_engine}",
)
NODE_ORDER = Key(
    "node_order",
    text({"type": "string", "pattern": r"^(address|name|label:.*)$"}),
    "Order of live nodes after the head: address, name or label:KEY.",
    "label:rack",
    "address",
)
CLUSTER = Section(
    "the cluster section",
    "Where every component lives.",
    (NUM_NODES, COMPONENT_PLACEMENT, LAYOUT_KEY, NODE_GROUPS, AUTO_SCHEDULER, PLACEMENT_MODE, NODE_ORDER, PROGRAMS),
    "The cluster section",
    pattern={"anyOf": [_given(COMPONENT_PLACEMENT), _given(LAYOUT_KEY)]},
)


# The rest of a job file -------------------------------------------------------------------------

_LIKE = "1; for inference the actor's, for critic_inference the critic's"
MODEL_TP = Key("tensor_model_parallel_size", integer(1), "GPUs that share each tensor.", "8", _LIKE)
MODEL_CP = Key("context_parallel_size", integer(1), "GPUs that share each sequence.", "2", _LIKE)
MODEL_PP = Key("pipeline_model_parallel_size", integer(1), "Pipeline stages.", "2", _LIKE)
MODEL_SIZES = Section(
    "model",
    "The model. Roost reads its parallel sizes; all other keys are the job's own.",
    (MODEL_TP, MODEL_CP, MODEL_PP),
    "Parallel sizes of a model",
    is_open=True,
    is_own=True,
)
ENGINE_TP = Key("tensor_parallel_size", integer(1), "GPUs that share each tensor of an engine.", "2", "1")
ENGINE_PP = Key("pipeline_parallel_size", integer(1), "Pipeline stages of an engine.", "2", "1")
ENGINE_SIZES = Section(
    "rollout",
    "The rollout engines. Roost reads their parallel sizes; all other keys are the job's own.",
    (ENGINE_TP, ENGINE_PP),
    "Parallel sizes of engines",
    is_open=True,
    is_own=True,
)
MODEL = Key(
    "model",
    nested(MODEL_SIZES),
    "The model of the component. Roost reads its parallel sizes.",
    "{tensor_model_parallel_size: 8}",
    can_be_null=False,
)
ROLE_SECTION = Section(
    "the section of a component",
    "Settings of a component. Roost reads the parallel sizes of its model; all other keys are the job's own.",
    (MODEL,),
    "Section of a component",
    is_open=True,
    is_own=True,
)
RECOMPUTE_LOGPROBS = Key("recompute_logprobs", switch(), "Whether inference recomputes log-probabilities.", "true")
ALGORITHM = Section(
    "algorithm",
    "The algorithm. All keys but those below are the job's own.",
    (RECOMPUTE_LOGPROBS,),
    "The algorithm section",
    is_open=True,
    is_own=True,
)

RUN = Key(
    "run",
    form(
        {"type": ["string", "object", "array"], "pattern": program().schema()["pattern"]},
        program().words,
    ),
    "Function that 'roost run' calls with the cluster and the plan. A mapping or a list under this key is the job's own.",
    "my_job:main",
)
RUN_PROGRAM = Key(RUN.name, program(), RUN.about, RUN.example)
MODEL_ROLES = ("actor", "critic", "inference", "critic_inference")
"""Roles whose parallel sizes stand under ``model`` of their section."""
JOB = Section(
    "the job",
    "A job file. Roost reads the keys below; all others are the job's own.",
    (
        Key(
            "cluster",
            nested(CLUSTER, "cluster"),
            "Where every component lives.",
            "{component_placement: {actor: 0-7}}",
            required=True,
        ),
        RUN,
        Key("rollout", nested(ENGINE_SIZES), ENGINE_SIZES.about, "{tensor_parallel_size: 2}", can_be_null=False),
        *(
            Key(
                role,
                nested(ROLE_SECTION),
                f"Settings of the component with the name or the role {role}. Roost reads its parallel sizes.",
                "{model: {tensor_model_parallel_size: 8}}",
                can_be_null=False,
            )
            for role in MODEL_ROLES
        ),
        Key("algorithm", nested(ALGORITHM), ALGORITHM.about, "{recompute_logprobs: true}", can_be_null=False),
    ),
    "Job file",
    is_open=True,
)

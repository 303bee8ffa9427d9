"""Convert a verl configuration to a job file: a component per role, on the accelerators of its resource pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from roost.cli.importing.configs import Settings
from roost.cli.importing.parts import (
    Chunk,
    Imported,
    Left,
    Placed,
    complain,
    raise_found,
    write_left,
    write_placed,
    write_sizes,
)
from roost.cli.inputs import read_cluster
from roost.cli.writing import Writer
from roost.errors import counted

__all__ = ["import_verl"]

_ROLLOUT = "actor_rollout_ref.rollout"
_MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_PLACING = {
    "ulysses_sequence_parallel_size": "Sequence parallelism inside the trainer, which moves no process",
    "expert_parallel_size": "Expert parallelism inside an engine or trainer, which moves no process",
    "expert_model_parallel_size": "Expert parallelism inside an engine or trainer, which moves no process",
    "expert_tensor_parallel_size": "Expert parallelism inside an engine or trainer, which moves no process",
    "gpu_memory_utilization": "Memory of an engine: declare memory_gib of the component to have it checked",
    "free_cache_engine": "Trainer and engines are moved out of the way by calls: TrainGroup.offload, RolloutManager.offload",
    "param_offload": "Trainer and engines are moved out of the way by calls: TrainGroup.offload, RolloutManager.offload",
    "optimizer_offload": "Trainer and engines are moved out of the way by calls: TrainGroup.offload, RolloutManager.offload",
    "grad_offload": "Trainer and engines are moved out of the way by calls: TrainGroup.offload, RolloutManager.offload",
}
_POOL = ("nnodes", "n_gpus_per_node")


@dataclass(frozen=True)
class _Pool:
    """A resource pool: the same number of accelerators on each of its nodes."""

    name: str
    nodes: int
    per_node: int
    path: str
    chunks: tuple[Chunk, ...] = ()

    @property
    def total(self) -> int:
        return self.nodes * self.per_node


def import_verl(words: Sequence[str], cluster: str = "") -> Imported:
    """Return the job file of a verl configuration.

    Args:
        words: A file, overrides (``trainer.nnodes=2``), or both, optionally after the program.
        cluster: The value of ``--cluster``; empty: the smallest cluster that fits.

    Raises:
        UsageError: With all invalid values (U140), unresolved values (U142) and contradictions (U141).
    """
    settings = Settings.read(words)
    left = Left()
    pools = _pools(settings)
    raise_found(settings.findings)
    cluster = cluster or _machines(list(pools.values()))
    pools = _spread(pools, cluster, settings)
    raise_found(settings.findings)
    placed, sizes, remarks = _components(settings, pools)
    raise_found(settings.findings)
    writer = Writer()
    total = sum(pool.total for pool in pools.values())
    writer.comment(f"From a configuration of verl, for {counted(total, 'GPU')}: --cluster {cluster}")
    for remark in [*remarks, *_remarks(settings)]:
        writer.comment(f"- {remark}")
    last = max(first + count for pool in pools.values() for first, count in pool.chunks)
    writer.key("cluster").key("num_nodes", _nodes_up_to(last, cluster), depth=1)
    write_placed(writer, placed)
    write_sizes(writer, sizes)
    _collect_left(settings, left)
    write_left(writer, left)
    return Imported(writer.text(), cluster)


# Pools ------------------------------------------------------------------------------------------


def _pools(settings: Settings) -> dict[str, _Pool]:
    pools = {"trainer": _Pool("trainer", settings.integer("trainer.nnodes", 1),
                              settings.integer("trainer.n_gpus_per_node", 8), "trainer")}  # fmt: skip
    rollout = _rollout_pool(settings)
    if rollout is not None:
        pools["rollout"] = rollout
    section = _reward_section(settings)
    if settings.boolean(f"{section}.enable_resource_pool") and settings.boolean(f"{section}.enable"):
        nodes, each = (settings.integer(f"{section}.{key}", 0, 0) for key in _POOL)
        if not nodes or not each:
            fix = ("say how many", f"{section}.nnodes=1 {section}.n_gpus_per_node=8")
            settings.clash(
                f"{section}.enable_resource_pool is true, and the pool has no GPUs", f"{section}.nnodes", fix
            )
        pools["reward"] = _Pool("reward", nodes, each, section)
    return pools


def _rollout_pool(settings: Settings) -> _Pool | None:
    """Return the pool of engines with accelerators of their own; ``None`` if they share the trainer's."""
    path = "rollout" if settings.has("rollout.nnodes") or settings.has("rollout.n_gpus_per_node") else _ROLLOUT
    nodes, each = settings.integer(f"{path}.nnodes", 1 if path == "rollout" else 0, 0), 8
    for other in (_ROLLOUT, "rollout"):
        if settings.has(f"{other}.n_gpus_per_node"):
            each = settings.integer(f"{other}.n_gpus_per_node", 8, 0)
    inner = settings.integer(f"{_ROLLOUT}.nnodes", 0, 0)
    if path == "rollout" and inner and inner != nodes:
        fix = ("make them the same", f"{_ROLLOUT}.nnodes={nodes}")
        settings.clash(f"rollout.nnodes is {nodes}, and {_ROLLOUT}.nnodes is {inner}", f"{_ROLLOUT}.nnodes", fix)
    settings.assumed.pop(f"{_ROLLOUT}.nnodes", None)
    hybrid = "actor_rollout_ref.hybrid_engine"
    is_hybrid = settings.boolean(hybrid, not nodes)
    is_separate = settings.text("trainer.v1.trainer_mode").startswith("separate")
    if not is_hybrid and not nodes:
        fix = ("say which GPUs they have", "rollout.nnodes=1 rollout.n_gpus_per_node=8")
        settings.clash(f"{hybrid} is false, so engines have GPUs of their own, and none are said", hybrid, fix)
    if is_hybrid and nodes and settings.has(hybrid) and not is_separate:
        fixes = ((f"engines of their own: {hybrid}=false", ""), ("or no nodes for them", f"{path}.nnodes=0"))
        settings.clash(
            f"{hybrid} is true, and {path}.nnodes gives engines {counted(nodes, 'node')} of their own", hybrid, *fixes
        )
    if nodes and not each:
        settings.clash(f"{path}.nnodes is {nodes}, and n_gpus_per_node is 0", f"{path}.n_gpus_per_node")
    return _Pool("rollout", nodes, each, path) if nodes else None


def _reward_section(settings: Settings) -> str:
    return "reward.reward_model" if settings.has("reward.reward_model") else "reward_model"


def _machines(pools: list[_Pool]) -> str:
    """Return the smallest cluster: separate nodes for each pool."""
    sizes = [pool.per_node for pool in pools for _ in range(pool.nodes)]
    return "+".join(f"{len(list(run))}x{size}" for size, run in groupby(sizes))


def _spread(pools: dict[str, _Pool], cluster: str, settings: Settings) -> dict[str, _Pool]:
    """Return the pools with their accelerators: each pool gets the first nodes with enough free ones."""
    topology = read_cluster(cluster)
    starts, free = [], []
    total = 0
    for node in topology.nodes:
        starts.append(total)
        free.append(node.num_accelerators)
        total += node.num_accelerators
    taken = [0] * len(free)
    spread = {}
    for pool in pools.values():
        hosts = [i for i, room in enumerate(free) if room - taken[i] >= pool.per_node][: pool.nodes]
        if len(hosts) < pool.nodes:
            message = (
                f"the {pool.name} pool wants {counted(pool.nodes, 'node')} with {counted(pool.per_node, 'GPU')} free, "
                f"and {cluster} has {len(hosts)} of them left"
            )
            fix = ("the least that fits", f"--cluster {_machines(list(pools.values()))}")
            settings.findings.append(complain("U141", message, settings.tree.find(f"{pool.path}.nnodes"), [fix]))
            continue
        chunks = tuple((starts[i] + taken[i], pool.per_node) for i in hosts)
        for i in hosts:
            taken[i] += pool.per_node
        spread[pool.name] = _Pool(pool.name, pool.nodes, pool.per_node, pool.path, chunks)
    return spread


def _nodes_up_to(last: int, cluster: str) -> int:
    """Return the number of nodes that contain the first ``last`` accelerators."""
    count = 0
    for node in read_cluster(cluster).nodes:
        if last <= 0:
            break
        last -= node.num_accelerators
        count += 1
    return count


# Roles ------------------------------------------------------------------------------------------


def _components(
    settings: Settings, pools: dict[str, _Pool]
) -> tuple[list[Placed], dict[str, dict[str, int]], list[str]]:
    trainer = pools["trainer"]
    remarks: list[str] = []
    sizes: dict[str, dict[str, int]] = {}
    names = ["actor"]
    sizes["actor"] = _megatron(settings, "actor_rollout_ref.actor", trainer)
    if settings.boolean("algorithm.use_kl_in_reward") or settings.boolean("actor_rollout_ref.actor.use_kl_loss"):
        if settings.integer("actor_rollout_ref.model.lora_rank", 0, 0):
            remarks.append("With LoRA the reference is the trainer without its adapters: no component of its own.")
        else:
            names.append("ref")
            sizes["ref"] = _megatron(settings, "actor_rollout_ref.ref", trainer)
    estimator = settings.text("algorithm.adv_estimator", "gae")
    if settings.boolean("critic.enable", estimator == "gae"):
        names.append("critic")
        sizes["critic"] = _megatron(settings, "critic", trainer)
        if not settings.has("algorithm.adv_estimator") and not settings.has("critic.enable"):
            remarks.append("algorithm.adv_estimator is not said: verl's default, gae, has a critic.")
    section = _reward_section(settings)
    has_reward = settings.boolean(f"{section}.enable")
    if has_reward and "reward" not in pools:
        names.append("reward")
    shares = _shares(len(names), "rollout" not in pools)
    notes = {"actor": "the trainer", "ref": "the reference policy", "critic": "", "reward": "the reward model"}
    placed = [Placed(name, trainer.chunks, note=notes[name], share=shares[0]) for name in names if name != "reward"]
    engines = pools.get("rollout", trainer)
    per_process, members = _engines(settings, _ROLLOUT, engines, sizes, "rollout")
    count = engines.total // (per_process * members)
    note = f"{counted(count, 'engine')} of {counted(per_process * members, 'GPU')}"
    note += "" if "rollout" in pools else ", on the trainer's (hybrid engine)"
    placed.append(Placed("rollout", engines.chunks, per_process, members, note, share=shares[1]))
    if has_reward:
        home = pools.get("reward", trainer)
        per_process, members = 1, 1
        if settings.has(f"{section}.rollout.tensor_model_parallel_size"):
            per_process, members = _engines(settings, f"{section}.rollout", home, sizes, "reward")
        share = None if "reward" in pools else shares[0]
        placed.append(Placed("reward", home.chunks, per_process, members, notes["reward"], share=share))
    if "rollout" not in pools:
        remarks.append("verl runs the roles of a pool in one process per GPU; here each role has processes of its own.")
    if shares[0] is not None:
        remarks.append("gpu_share: verl has none. These are Roost's usual ones, shared out evenly.")
    return placed, sizes, remarks


def _shares(trainers: int, has_engines: bool) -> tuple[float | None, float | None]:
    """Return the share of each role of the trainer's pool, and of the engines; ``None`` if they share nothing."""
    if not has_engines:
        return (None, None) if trainers == 1 else (math.floor(1000 / trainers) / 1000, None)
    return math.floor(800 / trainers) / 1000, 0.2


def _megatron(settings: Settings, section: str, pool: _Pool) -> dict[str, int]:
    """Return the parallel sizes of a Megatron role; none for FSDP."""
    if not settings.has(f"{section}.megatron"):
        return {}
    found = {key: settings.integer(f"{section}.megatron.{key}", 1) for key in _MEGATRON}
    for key in _MEGATRON:
        settings.assumed.pop(f"{section}.megatron.{key}", None)
    replica = math.prod(found.values())
    if pool.total % replica:
        said = " x ".join(str(size) for size in found.values() if size > 1)
        message = f"{section}.megatron makes model copies of {replica} GPUs ({said}), and the pool has {pool.total}"
        fixes = (
            "a pool that is a multiple",
            f"trainer.nnodes={math.ceil(pool.total / replica) * replica // pool.per_node or 1}",
        )
        settings.clash(message, f"{section}.megatron", fixes)
    return {key: size for key, size in found.items() if size > 1}


def _engines(
    settings: Settings, section: str, pool: _Pool, sizes: dict[str, dict[str, int]], name: str
) -> tuple[int, int]:
    """Return the number of GPUs of a process, and of processes of an engine."""
    default = 2 if section == _ROLLOUT else 1
    tensor = settings.integer(f"{section}.tensor_model_parallel_size", default)
    engine = settings.tree.find(f"{section}.name")
    if engine is not None and engine.text == "hf":  # the hf engine has no tensor parallelism
        tensor = 1
    pipeline = settings.integer(f"{section}.pipeline_model_parallel_size", 1)
    copies = settings.integer(f"{section}.data_parallel_size", 1)
    for key in ("pipeline_model_parallel_size", "data_parallel_size"):
        settings.assumed.pop(f"{section}.{key}", None)
    size = tensor * pipeline * copies
    sizes[name] = {"tensor_parallel_size": tensor} | ({"pipeline_parallel_size": pipeline} if pipeline > 1 else {})
    fits = pool.per_node % size == 0 if size <= pool.per_node else size % pool.per_node == 0 and pool.total % size == 0
    if fits:
        each = min(size, pool.per_node)
        return each, size // each
    most = max(n for n in range(1, min(size, pool.per_node) + 1) if pool.per_node % n == 0)
    message = (
        f"{section}: engines of {counted(size, 'GPU')} do not fit {counted(pool.nodes, 'node')} of {pool.per_node}"
    )
    settings.clash(
        message,
        f"{section}.tensor_model_parallel_size",
        ("for example", f"{section}.tensor_model_parallel_size={most}"),
    )
    return 1, 1


# What is left over ------------------------------------------------------------------------------


def _remarks(settings: Settings) -> list[str]:
    remarks = []
    assumed = ", ".join(f"{path} {value}" for path, value in settings.assumed.items() if value)
    if assumed:
        remarks.append(f"Not said, so verl's defaults: {assumed}.")
    if settings.composed_of:
        remarks.append(
            f"Hydra composes it of {', '.join(settings.composed_of)}, which were not read: what they change, "
            "say after --, or import the composed file (outputs/…/.hydra/config.yaml)."
        )
    if settings.text("trainer.device") == "npu":
        remarks.append("trainer.device is npu: give the machines as, for example, --cluster 2x8:Ascend/910B.")
    return remarks


def _collect_left(settings: Settings, left: Left) -> None:
    settings.used.update(("trainer.device",))
    if settings.program:
        left.add("The program", " ".join(settings.program))
    for removed in settings.removed:
        left.add("Removed by the command line", f"~{removed}")
    for path, tree in settings.leaves():
        key = path.rpartition(".")[2]
        if path in settings.used:
            continue
        if key in _POOL and isinstance(tree.value, int) and tree.value > 0:
            left.add("Pools that Roost knows nothing about: place what lives there yourself", path)
            settings.used.add(path)
        elif key in _PLACING:
            left.add(_PLACING[key], path)
            settings.used.add(path)
    for section, keys in settings.left().items():
        left.add("Not about placement", f"{section}: {', '.join(keys)}")

"""Read the numbers of slime's flags that decide about placement, and find contradictions."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from roost.cli.importing.flags import CommandFlags
from roost.cli.importing.parts import Left, complain
from roost.errors import ConfigError, Finding

__all__ = ["EngineGroup", "Numbers", "read_numbers"]

_GPUS_PER_NODE = 8
"""GPUs per node without a flag: slime's default."""


@dataclass(frozen=True)
class EngineGroup:
    """Engines of one size and worker type."""

    num_gpus: int
    size: int
    kind: str = "regular"
    model: str = ""

    @property
    def is_placeholder(self) -> bool:
        """Whether its GPUs are only reserved."""
        return self.kind == "placeholder"


@dataclass(frozen=True)
class Numbers:
    """The numbers of the flags that decide about placement."""

    nodes: int
    per_node: int
    node_size: int
    rollout: int | None
    engine: int
    pipeline: int
    is_colocated: bool
    trains_only: bool
    generates_only: bool
    is_external: bool
    is_async: bool
    critic: int | None
    """Number of GPUs of the critic; 0: it shares the trainer's GPUs; ``None``: there is no critic."""
    groups: tuple[EngineGroup, ...]

    @property
    def actor(self) -> int:
        """Number of GPUs of the trainer."""
        return self.nodes * self.per_node


def read_numbers(flags: CommandFlags, left: Left) -> Numbers:
    """Return the numbers. Invalid values and contradictions are added to the findings of the flags."""
    found = flags.findings
    nodes = flags.integer("--actor-num-nodes", 1, 0) or 0
    per_node = flags.integer("--actor-num-gpus-per-node", 8, 0) or 0
    node_size = flags.integer("--num-gpus-per-node")
    rollout = flags.integer("--rollout-num-gpus", None, 0)
    engine = flags.integer("--rollout-num-gpus-per-engine", 1) or 1
    pipeline = flags.integer("--sglang-pp-size") or flags.integer("--sglang-pipeline-parallel-size") or 1
    is_colocated, generates_only = flags.switch("--colocate"), flags.switch("--debug-rollout-only")
    loads = flags.has("--load-debug-rollout-data")
    trains_only = flags.switch("--debug-train-only") or loads
    addresses = flags.has("--rollout-external-engine-addrs")
    is_external = flags.switch("--rollout-external") or addresses
    is_async = any(os.path.basename(word).startswith("train_async") for word in flags.program)
    if addresses:
        left.add("Engines that run elsewhere are reached by address at run time", "--rollout-external-engine-addrs")
    if loads:
        left.add("Saved rollouts are loaded by the trainer", "--load-debug-rollout-data")

    def clash(message: str, *fixes: tuple[str, str]) -> None:
        found.append(complain("U141", message, fixes=fixes))

    if trains_only and generates_only:
        what = "--load-debug-rollout-data" if loads else "--debug-train-only"
        clash(f"{what} and --debug-rollout-only leave nothing to run", ("keep one of the two", ""))
    if is_external and generates_only:
        message = "--debug-rollout-only has no trainer, and the engines run elsewhere: nothing is left to place"
        clash(
            message,
            ("let slime start the engines", "--rollout-num-gpus 8"),
            ("or train", "without --debug-rollout-only"),
        )
    if is_colocated and is_async:
        fix = ("give the engines GPUs of their own", "--rollout-num-gpus 8, without --colocate")
        clash("train_async.py generates while it trains, and --colocate has no GPUs that are free then", fix)
    if node_size is not None and per_node > node_size:
        fix = ("as many as the trainer has on one", f"--num-gpus-per-node {per_node}")
        clash(f"the trainer has {per_node} GPUs on a node, and --num-gpus-per-node is {node_size}", fix)
    has_engines = not trains_only and not is_external
    groups: tuple[EngineGroup, ...] = ()
    if flags.has("--sglang-config"):
        groups = _read_groups(flags, engine)
        for other in ("--prefill-num-servers", "--rollout-external", "--rollout-external-engine-addrs"):
            if other in flags.values:
                clash(f"--sglang-config and {other} both say what engines there are", ("keep one of the two", ""))
        rollout = _sum(groups, rollout, flags)
    prefill = flags.integer("--prefill-num-servers")
    if prefill is not None and not groups:
        if is_external:
            clash("--prefill-num-servers is for engines that slime starts", ("leave it out", ""))
        groups = _prefill_groups(prefill, rollout or (nodes * per_node if is_colocated else 0), engine, clash)
    if has_engines and rollout is None and not is_colocated:
        fixes = (
            ("say how many GPUs the engines have", "--rollout-num-gpus 8"),
            ("or share the trainer's", "--colocate"),
        )
        clash("nothing says where engines live: neither --rollout-num-gpus nor --colocate is there", *fixes)
    critic = _read_critic(flags, left, nodes, per_node)
    shared = nodes * per_node + (critic or 0) if is_colocated else 0
    for group in (groups or (EngineGroup(shared if rollout is None else rollout, engine),)) if has_engines else ():
        if group.num_gpus % group.size and not group.is_placeholder:
            fits = group.num_gpus // group.size * group.size or group.size
            message = f"{group.num_gpus} GPUs do not make engines of {group.size}"
            clash(message, ("a number that does", f"--rollout-num-gpus {fits}"))
    if generates_only and not is_external:
        if rollout is None and is_colocated:
            rollout = nodes * per_node
        is_colocated, critic = False, None
    return Numbers(
        nodes, per_node, node_size or max(_GPUS_PER_NODE, per_node), rollout, engine, pipeline, is_colocated,
        trains_only, generates_only, is_external, is_async, critic,
        groups if has_engines else (),
    )  # fmt: skip


def _read_critic(flags: CommandFlags, left: Left, nodes: int, per_node: int) -> int | None:
    """Return the number of GPUs of the critic; 0: it shares the trainer's GPUs; ``None``: there is no critic.

    slime releases with flags for its size give it the GPUs after the trainer's; in others it shares them.
    """
    is_ppo = flags.text("--advantage-estimator") == "ppo" if "--advantage-estimator" in flags.values else False
    wanted = flags.switch("--use-critic") or is_ppo
    if "--advantage-estimator" in flags.values:
        flags.used.discard("--advantage-estimator")
    own = [flag for flag in ("--critic-num-nodes", "--critic-num-gpus-per-node") if flags.has(flag)]
    own_nodes = flags.integer("--critic-num-nodes", nodes, 0)
    own_per_node = flags.integer("--critic-num-gpus-per-node", per_node, 0)
    if not wanted:
        for flag in own:
            left.add("There is no critic (--advantage-estimator ppo, or --use-critic, makes one)", flag)
        return None
    return (own_nodes or 0) * (own_per_node or 0) if own else 0


def _read_groups(flags: CommandFlags, default: int) -> tuple[EngineGroup, ...]:
    """Return the server groups of a ``--sglang-config`` file."""
    from roost.source import Fields, load_tree

    path = flags.text("--sglang-config")
    if path is None:
        return ()
    findings: list[Finding] = []
    groups: list[EngineGroup] = []
    try:
        tree = load_tree(path)
    except ConfigError as error:
        flags.findings += error.findings
        return ()
    for model in Fields(tree, findings, "the SGLang configuration").entries("sglang"):
        fields = Fields(model, findings, "a model")
        size = fields.integer("num_gpus_per_engine", 1, default) or default
        is_frozen = not fields.boolean("update_weights", model.get("model_path") is None)
        name = (fields.text("name") or "model") if is_frozen else ""
        key = "engine_groups" if model.get("server_groups") is None else "server_groups"
        for entry in fields.entries(key):
            group = Fields(entry, findings, "a server group")
            count = group.integer("num_gpus", 1, 0) or 0
            own = group.integer("num_gpus_per_engine", 1, size) or size
            groups.append(EngineGroup(count, own, group.text("worker_type") or "regular", name))
    flags.findings += findings
    return tuple(groups)


def _sum(groups: tuple[EngineGroup, ...], rollout: int | None, flags: CommandFlags) -> int | None:
    total = sum(group.num_gpus for group in groups)
    if groups and rollout is not None and total != rollout:
        message = f"the groups of --sglang-config have {total} GPUs together, and --rollout-num-gpus is {rollout}"
        flags.findings.append(complain("U141", message, fixes=[("as many", f"--rollout-num-gpus {total}")]))
    return total if groups else rollout


def _prefill_groups(servers: int, rollout: int, engine: int, clash: Callable[..., None]) -> tuple[EngineGroup, ...]:
    rest = rollout - servers * engine
    if rest <= 0:
        most = max(0, rollout // engine - 1)
        message = f"--prefill-num-servers {servers} of {engine} GPUs leave none of {rollout} for decoding"
        clash(message, ("fewer", f"--prefill-num-servers {most}"))
        return ()
    return (EngineGroup(servers * engine, engine, "prefill"), EngineGroup(rest, engine, "decode"))

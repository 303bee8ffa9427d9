"""Convert slime's flags to a job file, with slime's arithmetic for trainer, critic and engines."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import replace

from roost.cli.importing.flags import CommandFlags
from roost.cli.importing.parts import (
    Imported,
    Left,
    Placed,
    complain,
    raise_found,
    write_left,
    write_placed,
    write_sizes,
)
from roost.cli.importing.slime_numbers import EngineGroup, Numbers, read_numbers
from roost.cli.writing import Writer
from roost.errors import counted

__all__ = ["import_slime"]

_PARALLEL = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
_CORE = (
    "--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus", "--rollout-num-gpus-per-engine",
    "--num-gpus-per-node", "--colocate", "--debug-train-only", "--debug-rollout-only", "--critic-num-nodes",
    "--critic-num-gpus-per-node",
)  # fmt: skip
"""Flags for which a typing error gets a suggestion, because they decide about placement."""
_ENGINES = "Settings of the SGLang engines and their router: give them to the engine that you start"
_OFFLOAD = "Trainer and engines are moved out of the way by calls: TrainGroup.offload, RolloutManager.offload"
_EXPERTS = "Parallel sizes inside the trainer, which change nothing about where its processes live"
_WEIGHTS = "Roost chooses the weight transport of each engine by where it lives"
_OTHERS = "Not about placement"
_REASONS = (
    ("--sglang-", _ENGINES), ("--router-", _ENGINES), ("--use-slime-router", _ENGINES), ("--slime-router", _ENGINES),
    ("--offload", _OFFLOAD), ("--no-offload", _OFFLOAD), ("--release-train", _OFFLOAD),
    ("--expert-", _EXPERTS), ("--virtual-pipeline", _EXPERTS), ("--sequence-parallel", _EXPERTS),
    ("--num-layers-per-virtual", _EXPERTS), ("--decoder-last-pipeline", _EXPERTS),
    ("--update-weight", _WEIGHTS),
)  # fmt: skip


def import_slime(words: Sequence[str], cluster: str = "") -> Imported:
    """The job file of a slime command line.

    Args:
        words: Its flags; the program before them may be there.
        cluster: The machines, where the user says them.

    Raises:
        UsageError: With every flag that is wrong (U140) and all that contradict each other (U141).
    """
    flags = CommandFlags.parse(words)
    left = Left()
    numbers = read_numbers(flags, left)
    raise_found(flags.findings)
    sizes = _sizes(flags, numbers)
    raise_found(flags.findings)
    is_by_numbers = not numbers.critic and not any(group.model for group in numbers.groups)
    placed = [] if is_by_numbers else _placed(numbers)
    total = _total(numbers)
    num_nodes = max(1, math.ceil(total / numbers.node_size))
    writer = Writer()
    cluster = cluster or f"{num_nodes}x{numbers.node_size}"
    writer.comment(f"From the flags of slime, for {counted(total, 'GPU')}: --cluster {cluster}")
    writer.comment(
        "slime counts GPUs by node address; Roost has the head first, then addresses (docs/how-to/clusters.md)."
    )
    writer.key("cluster").key("num_nodes", num_nodes, depth=1)
    if is_by_numbers:
        _write_layout(writer, numbers, "--num-gpus-per-node" in flags.values)
    else:
        write_placed(writer, placed)
    write_sizes(writer, sizes)
    _collect_left(flags, left)
    write_left(writer, left)
    return Imported(writer.text(), cluster)


# Deciding ---------------------------------------------------------------------------------------


def _sizes(flags: CommandFlags, numbers: Numbers) -> dict[str, dict[str, int]]:
    trainer = {flag.replace("-", "_"): flags.integer(f"--{flag}", 1) or 1 for flag in _PARALLEL}
    replica = math.prod(trainer.values())
    if not numbers.generates_only and numbers.actor % replica:
        said = " x ".join(f"{key.split('_')[0]} {size}" for key, size in trainer.items() if size > 1)
        message = f"the trainer has {counted(numbers.actor, 'GPU')}, no multiple of one model copy ({said} = {replica})"
        fits = math.ceil(numbers.actor / replica) * replica
        flags.findings.append(complain("U141", message, fixes=[("for example", f"{fits} GPUs")]))
    tensor = flags.integer("--sglang-tp-size") or flags.integer("--sglang-tensor-parallel-size")
    if tensor is not None and tensor * numbers.pipeline != numbers.engine:
        message = f"--rollout-num-gpus-per-engine is {numbers.engine}, and the engines' own sizes make {tensor * numbers.pipeline}"
        flags.findings.append(complain("U141", message, fixes=[("leave the engines' own size out", "")]))
    if numbers.engine % numbers.pipeline:
        message = f"an engine of {numbers.engine} GPUs has no {numbers.pipeline} pipeline stages"
        flags.findings.append(complain("U141", message))
    sections: dict[str, dict[str, int]] = {"actor": {}}
    if not numbers.generates_only and replica > 1:
        sections["actor"] = {key: size for key, size in trainer.items() if size > 1}
        if numbers.critic is not None:
            sections["critic"] = dict(sections["actor"])
    if numbers.trains_only or numbers.is_external:
        return sections
    engines = {"tensor_parallel_size": max(1, numbers.engine // numbers.pipeline)}
    if numbers.pipeline > 1:
        engines["pipeline_parallel_size"] = numbers.pipeline
    sections["rollout"] = engines if numbers.engine > 1 or numbers.groups else {}
    for name, group in zip(_names(numbers.groups), numbers.groups, strict=True):
        if not group.is_placeholder:
            sections[name] = engines | {"tensor_parallel_size": max(1, group.size // numbers.pipeline)}
    return sections


def _names(groups: Sequence[EngineGroup]) -> list[str]:
    """Component names of groups: as a layout names them; models that are not trained have their own."""
    names: list[str] = []
    for index, group in enumerate(groups):
        stem = group.model if group.model not in ("actor", "critic", "rollout") else f"{group.model}-engine"
        name = stem or (f"rollout-{index}" if index else "rollout")
        names.append(name if name not in names else f"{name}-{index}")
    return names


def _rollout(numbers: Numbers) -> tuple[int, int]:
    """Where the engines' GPUs begin, and how many they are."""
    if numbers.trains_only or numbers.is_external:
        return 0, 0
    trainers = numbers.actor + (numbers.critic or 0)
    if numbers.generates_only:
        return 0, numbers.rollout or 0
    if numbers.is_colocated:
        return 0, trainers if numbers.rollout is None else numbers.rollout
    return trainers, numbers.rollout or 0


def _total(numbers: Numbers) -> int:
    trainers = numbers.actor + (numbers.critic or 0)
    if numbers.generates_only and not numbers.is_external:
        trainers = 0
    first, count = _rollout(numbers)
    return max(trainers, first + count)


def _placed(numbers: Numbers) -> list[Placed]:
    """Components with their GPUs, where a layout of numbers cannot say it."""
    placed: list[Placed] = []
    train, generate = (0.8, 0.2) if numbers.is_colocated else (1.0, 1.0)
    if not numbers.generates_only:
        share = train if numbers.critic != 0 else train / 2
        placed.append(Placed("actor", ((0, numbers.actor),), note="the trainer", share=share))
        if numbers.critic:
            note = "behind the trainer, as its own flags say"
            placed.append(Placed("critic", ((numbers.actor, numbers.critic),), note=note, share=share))
        elif numbers.critic == 0:
            placed.append(Placed("critic", ((0, numbers.actor),), note="beside the trainer", share=share))
    first, count = _rollout(numbers)
    groups = numbers.groups or ((EngineGroup(count, numbers.engine),) if count else ())
    for name, group in zip(_names(groups), groups, strict=True):
        each = min(group.size, numbers.node_size)
        component = Placed(
            name, ((first, group.num_gpus),), each, group.size // each, _about(group), share=generate,
            role="rollout" if not group.model and name != "rollout" else "",
        )  # fmt: skip
        if group.is_placeholder:
            component = replace(component, per_process=1, members=1, placeholder=True)
        placed.append(component)
        first += group.num_gpus
    return placed


def _about(group: EngineGroup) -> str:
    if group.is_placeholder:
        return ""
    kind = "" if group.kind == "regular" else f"{group.kind}: "
    frozen = ", whose weights stay as they are" if group.model else ""
    return f"{kind}{group.num_gpus // group.size} engines of {counted(group.size, 'GPU')}{frozen}"


# Writing ----------------------------------------------------------------------------------------


def _write_layout(writer: Writer, numbers: Numbers, is_node_size_said: bool) -> None:
    _first, count = _rollout(numbers)
    has_no_engines = not numbers.trains_only and not numbers.is_external and numbers.rollout == 0
    is_shared = numbers.is_colocated and not has_no_engines
    mode = "disaggregated" if not is_shared else "hybrid" if count > numbers.actor else "collocated"
    notes = {
        "disaggregated": "engines have GPUs of their own",
        "collocated": "--colocate: engines are on the trainer's GPUs",
        "hybrid": "--colocate: engines begin where the trainer does, and go on beyond it",
    }
    writer.key("layout", depth=1).key("mode", mode, notes[mode], depth=2)
    if not numbers.generates_only or numbers.is_external:
        writer.key("actor_num_nodes", numbers.nodes, depth=2)
        writer.key("actor_num_gpus_per_node", numbers.per_node, depth=2)
    if count and not (is_shared and count == numbers.actor):
        writer.key("rollout_num_gpus", count, depth=2)
    if count and numbers.engine > 1:
        writer.key("rollout_num_gpus_per_engine", numbers.engine, depth=2)
    if numbers.critic == 0:
        writer.key("use_critic", True, "on the trainer's GPUs", depth=2)
    if numbers.trains_only:
        writer.key("debug_train_only", True, depth=2)
    if numbers.generates_only:
        writer.key("debug_rollout_only", True, depth=2)
    if numbers.is_external or has_no_engines:
        note = "--rollout-num-gpus 0: a router, and no engines here" if has_no_engines else ""
        writer.key("external_engines", True, note, depth=2)
    if numbers.is_async:
        writer.key("async_training", True, "train_async.py", depth=2)
    if is_node_size_said:
        writer.key("num_gpus_per_node", numbers.node_size, "checked against the machines", depth=2)
    if count and numbers.groups:
        writer.key("rollout_groups", depth=2)
        for group in numbers.groups:
            size = "placeholder: true" if group.is_placeholder else f"num_gpus_per_engine: {group.size}"
            writer.raw(f"      - {{num_gpus: {group.num_gpus}, {size}}}", _about(group))


def _collect_left(flags: CommandFlags, left: Left) -> None:
    if flags.program:
        left.add("The program", " ".join(flags.program))
    for flag, shown in flags.left():
        near = difflib.get_close_matches(flag, _CORE, n=1, cutoff=0.9)
        if near:
            fix = [("did you mean", near[0])]
            flags.findings.append(complain("U140", f"{flag} is not a known flag of slime", fixes=fix))
        reason = next((reason for start, reason in _REASONS if flag.startswith(start)), _OTHERS)
        left.add(reason, shown)
    for flag in sorted(flags.repeated & flags.used):
        left.add("Given more than once; the last value was used", flag)
    raise_found(flags.findings)

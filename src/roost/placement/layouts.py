"""The arithmetic of layouts: which accelerators trainer, critic and engines get, and which share of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.errors import Finding, Fix, Place, PlacementError, shown
from roost.placement.engines import EngineGroup, EngineShare, NodeSizes, cut_engines

__all__ = ["EngineShare", "Layout", "resolve_layout"]

COLOCATED_SHARES = {"actor": 0.8, "rollout": 0.2}
"""Role → share of an accelerator that trainer and engines have in common."""

OWN_SHARES = {"actor": 1.0, "rollout": 1.0}
"""Role → share of an accelerator that a role has for itself."""

MAX_ACCELERATORS = 2**24
"""Larger numbers are typing errors."""

_SLACK = 1e-6
_GROUP_KEYS = ("num_gpus", "num_gpus_per_engine", "placeholder")


@dataclass(frozen=True)
class Layout:
    """The accelerators of trainer, critic and engines, as positions in the stable order of one reservation.

    Attributes:
        num_accelerators: Number of accelerators to reserve.
        rollout_offset: First position of the rollout.
        actor: Positions of the actor.
        rollout: Positions of the rollout engines.
        critic: Positions of the critic: those of the actor, or none.
        shares: Role → fraction that it takes of each of its accelerators. Roles without accelerators are left out.
        engines: The engines, in order.
    """

    num_accelerators: int
    rollout_offset: int
    actor: range
    rollout: range
    critic: range = range(0)
    shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    engines: tuple[EngineShare, ...] = ()


def resolve_layout(
    actor_num_nodes: int,
    actor_num_gpus_per_node: int,
    rollout_num_gpus: int = 0,
    *,
    colocate: bool = False,
    debug_train_only: bool = False,
    debug_rollout_only: bool = False,
    external_engines: bool = False,
    async_training: bool = False,
    rollout_num_gpus_per_engine: int = 1,
    use_critic: bool = False,
    num_gpus_per_actor: float | None = None,
    num_gpus_per_critic: float | None = None,
    num_gpus_per_rollout_engine: float | None = None,
    num_gpus_per_node: int | Sequence[int] | None = None,
    rollout_groups: Sequence[Any] | None = None,
) -> Layout:
    """Return the accelerators that a job reserves, and the positions of each role.

    Args:
        actor_num_nodes: Nodes of the trainer.
        actor_num_gpus_per_node: Accelerators of the trainer on each of its nodes.
        rollout_num_gpus: Accelerators of all rollout engines together; with ``colocate``, 0 means as many as the
            trainer has.
        colocate: Trainer and engines share accelerators.
        debug_train_only: Train from saved rollouts; no engines.
        debug_rollout_only: Generate only; no trainer.
        external_engines: Engines run elsewhere and are reached by address.
        async_training: Generation and training at the same time.
        rollout_num_gpus_per_engine: Accelerators of one engine.
        use_critic: A critic on the actor's accelerators.
        num_gpus_per_actor: Fraction of an accelerator that an actor takes. Default: 0.8 with ``colocate``,
            else 1; half of it with a critic.
        num_gpus_per_critic: The same for the critic, with the same default.
        num_gpus_per_rollout_engine: Fraction of each of its accelerators that an engine takes. Default:
            0.2 with ``colocate``, else 1.
        num_gpus_per_node: Accelerators of every node, or a list with those of each node. It is used to check that no
            engine straddles nodes; ``None``: no check.
        rollout_groups: Several groups of engines instead of one: mappings or objects with ``num_gpus``,
            ``num_gpus_per_engine`` (default ``rollout_num_gpus_per_engine``) and ``placeholder``
            (reserved, and nothing is started). Together they have all accelerators of the rollout;
            ``rollout_num_gpus`` may be left out, and may include placeholders or not.

    Raises:
        PlacementError: With every problem.
    """
    findings: list[Finding] = []
    _check_count("actor_num_nodes", actor_num_nodes, findings)
    _check_count("actor_num_gpus_per_node", actor_num_gpus_per_node, findings)
    _check_count("rollout_num_gpus", rollout_num_gpus, findings)
    _check_count("rollout_num_gpus_per_engine", rollout_num_gpus_per_engine, findings, 1)
    if isinstance(num_gpus_per_node, (list, tuple)):
        for size in num_gpus_per_node:
            _check_count("num_gpus_per_node", size, findings)
    elif num_gpus_per_node is not None:
        _check_count("num_gpus_per_node", num_gpus_per_node, findings, 1)
    given = {"actor": num_gpus_per_actor, "critic": num_gpus_per_critic, "rollout": num_gpus_per_rollout_engine}
    for role, value in given.items():
        if value is not None:
            _check_share(_share_key(role), value, findings)
    if debug_train_only and debug_rollout_only:
        message = "debug_train_only and debug_rollout_only exclude each other: nothing would be left to run"
        place = Place("debug_rollout_only")
        findings.append(Finding("P401", message, place, fixes=(Fix("keep one of the two"),)))
    if colocate and async_training:
        message = "async training needs accelerators that are free while the trainer works: colocate has none"
        fix = Fix("give the rollout its own", "colocate: false, with rollout_num_gpus of its own")
        findings.append(Finding("P402", message, Place("async_training"), fixes=(fix,)))
    has_numbers = all(finding.code != "P403" for finding in findings)
    groups = _read_groups(rollout_groups, rollout_num_gpus_per_engine, findings) if has_numbers else []
    if any(finding.code == "P403" for finding in findings):
        raise PlacementError(findings)

    actor = actor_num_nodes * actor_num_gpus_per_node
    if rollout_groups is not None:
        rollout = sum(group.num_gpus for group in groups)
        placeholders = sum(group.num_gpus for group in groups if group.placeholder)
        if rollout_num_gpus not in (0, rollout, rollout - placeholders):
            findings.append(_other_sum(rollout, rollout_num_gpus))
    else:
        rollout = rollout_num_gpus or (actor if colocate else 0)
        groups = [EngineGroup(0, rollout, rollout_num_gpus_per_engine)]
    if debug_train_only or (external_engines and debug_rollout_only):
        total, offset = actor, 0
    elif external_engines:
        total, offset = actor, actor
    elif debug_rollout_only:
        total, offset = rollout, 0
    elif colocate:
        total, offset = max(actor, rollout), 0
    else:
        total, offset = actor + rollout, actor
    has_engines = not debug_train_only and not external_engines
    rollout_share = range(offset, offset + rollout) if has_engines else range(offset, offset)
    actor_share = range(0) if debug_rollout_only else range(actor)
    engines: tuple[EngineShare, ...] = ()
    if _check_total(total, actor_share, rollout_share, num_gpus_per_node, findings) and has_engines:
        nodes = NodeSizes(num_gpus_per_node, total) if num_gpus_per_node is not None else None
        engines = cut_engines(groups, offset, nodes, findings)
    positions = {"actor": actor_share, "critic": actor_share if use_critic else range(0), "rollout": rollout_share}
    shares = _shares(colocate, use_critic, given, positions)
    _check_sums(positions, shares, given, findings)
    if findings:
        raise PlacementError(findings)
    return Layout(total, offset, actor_share, rollout_share, positions["critic"], shares, engines)


# Reading ----------------------------------------------------------------------------------------


def _check_count(name: str, value: object, findings: list[Finding], minimum: int = 0) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= MAX_ACCELERATORS
    if not is_count:
        upper = f" to {MAX_ACCELERATORS:,}" if isinstance(value, int) and value > minimum else " up"
        message = f"{name} is a whole number from {minimum}{upper}, not {shown(value)}"
        findings.append(Finding("P403", message, Place(name)))


def _check_share(name: str, value: object, findings: list[Finding]) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        message = f"{name} is a number above 0 and at most 1, not {shown(value)}"
        findings.append(Finding("P403", message, Place(name)))


def _read_groups(groups: Any, default_size: int, findings: list[Finding]) -> list[EngineGroup]:
    if groups is None:
        return []
    if isinstance(groups, (str, Mapping)) or not isinstance(groups, Sequence):
        message = f"rollout_groups is a list of groups, not {shown(groups)}"
        findings.append(Finding("P403", message, Place("rollout_groups")))
        return []
    read = []
    for index, group in enumerate(groups):
        name = f"rollout_groups.{index}"
        if isinstance(group, Mapping):
            for key in group:
                if key not in _GROUP_KEYS:
                    rule = "known keys: " + ", ".join(_GROUP_KEYS)
                    findings.append(Finding("P403", f"{name} has no {shown(key)}", Place(name), rule=rule))
            entry = {key: group.get(key) for key in _GROUP_KEYS}
        else:
            entry = {key: getattr(group, key, None) for key in _GROUP_KEYS}
        is_placeholder = bool(entry["placeholder"])
        count, size = entry["num_gpus"], entry["num_gpus_per_engine"]
        if size is None:
            size = 1 if is_placeholder else default_size
        before = len(findings)
        _check_count(f"{name}.num_gpus", count, findings)
        _check_count(f"{name}.num_gpus_per_engine", size, findings, 1)
        if len(findings) == before:
            read.append(EngineGroup(index, count or 0, size, is_placeholder, False))
    return read


def _share_key(role: str) -> str:
    return "num_gpus_per_rollout_engine" if role == "rollout" else f"num_gpus_per_{role}"


# Checking ---------------------------------------------------------------------------------------


def _shares(
    colocate: bool, use_critic: bool, given: Mapping[str, float | None], positions: Mapping[str, range]
) -> dict[str, float]:
    """Return the share of each role that has accelerators."""
    usual = dict(COLOCATED_SHARES if colocate else OWN_SHARES)
    usual["critic"] = usual["actor"] = usual["actor"] / 2 if use_critic else usual["actor"]
    shares = {}
    for role, share in given.items():
        if positions[role]:
            shares[role] = float(usual[role] if share is None else share)
    return shares


def _check_total(
    total: int, actor: range, rollout: range, sizes: int | Sequence[int] | None, findings: list[Finding]
) -> bool:
    """Return whether the nodes have enough accelerators; if their sizes are unknown, whether the total is plausible."""
    there = MAX_ACCELERATORS if sizes is None or isinstance(sizes, int) else sum(sizes)
    if total <= there:
        return True
    is_shared = bool(actor and rollout and actor[0] == rollout[0])
    parts = [f"{len(share):,} for the {role}" for role, share in (("actor", actor), ("rollout", rollout)) if share]
    text = (", shared with " if is_shared else " + ").join(parts)
    message = f"the layout wants {total:,} GPUs ({text}), and there are {there:,}"
    fixes = []
    if len(parts) > 1 and not is_shared:
        if max(len(actor), len(rollout)) <= there:
            fixes.append(Fix("share them", "colocate: true"))
        if len(actor) < there:
            fixes.append(Fix("fewer engines", f"rollout_num_gpus: {there - len(actor)}"))
    key = "rollout_num_gpus" if rollout and len(actor) <= there else "actor_num_gpus_per_node"
    findings.append(Finding("P410", message, Place(key), fixes=tuple(fixes)))
    return False


def _check_sums(
    positions: Mapping[str, range],
    shares: Mapping[str, float],
    given: Mapping[str, float | None],
    findings: list[Finding],
) -> None:
    """Check that shares add up to 1 at most, at each position where the roles on an accelerator change."""
    worst: tuple[float, list[str], int] = (0.0, [], 0)
    for at in sorted({share[0] for share in positions.values() if share}):
        here = [role for role in shares if at in positions[role]]
        total = sum(shares[role] for role in here)
        if total > worst[0]:
            worst = (total, here, at)
    total, here, at = worst
    if total <= 1 + _SLACK:
        return
    text = " + ".join(f"{role} {shares[role]:g}" for role in here)
    left = round(1 - sum(shares[role] for role in here if role != here[0]), 4)
    key = _share_key(next((role for role in reversed(here) if given[role] is not None), here[0]))
    fixes = (Fix("what the others leave", f"{_share_key(here[0])}: {left:g}"),) if left > 0 else ()
    message = f"shares add up to {total:g} on GPU {at}: {text}"
    rule = "the shares of one GPU add up to 1 at most"
    findings.append(Finding("P408", message, Place(key), rule=rule, fixes=fixes))


def _other_sum(groups: int, written: int) -> Finding:
    return Finding(
        "P409",
        f"rollout_groups have {groups} GPUs together, and rollout_num_gpus is {written}",
        Place("rollout_num_gpus"),
        rule="the groups are all of the rollout's GPUs",
        fixes=(Fix("leave it out, or", f"rollout_num_gpus: {groups}"),),
    )

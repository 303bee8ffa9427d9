"""Colocate, dis-agg and debug layouts: how many accelerators, and whose they are."""

from __future__ import annotations

from dataclasses import dataclass

from roost.errors import Finding, Fix, PlacementError, shown

__all__ = ["Layout", "resolve_layout"]


@dataclass(frozen=True)
class Layout:
    """Shares of one reservation, as positions in the stable order.

    Attributes:
        num_accelerators: How many to reserve.
        rollout_offset: Where the rollout's share begins.
        actor: Positions of the actor (and of a critic, which shares them).
        rollout: Positions of the rollout engines.
    """

    num_accelerators: int
    rollout_offset: int
    actor: range
    rollout: range


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
) -> Layout:
    """How many accelerators a job reserves, and which positions are whose.

    Args:
        actor_num_nodes: Nodes of the trainer.
        actor_num_gpus_per_node: Its accelerators on each.
        rollout_num_gpus: Accelerators of all rollout engines together.
        colocate: Trainer and engines share accelerators.
        debug_train_only: Train from saved rollouts; no engines.
        debug_rollout_only: Generate only; no trainer.
        external_engines: Engines run elsewhere and are reached by address.
        async_training: Generation and training at the same time.

    Raises:
        PlacementError: With every contradiction.
    """
    findings = []
    numbers = {
        "actor_num_nodes": actor_num_nodes,
        "actor_num_gpus_per_node": actor_num_gpus_per_node,
        "rollout_num_gpus": rollout_num_gpus,
    }
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            findings.append(Finding("P403", f"{name} is a whole number from 0 up, not {shown(value)}"))
    if debug_train_only and debug_rollout_only:
        message = "debug_train_only and debug_rollout_only exclude each other: nothing would be left to run"
        findings.append(Finding("P401", message, fixes=(Fix("keep one of the two"),)))
    if colocate and async_training:
        message = "async training needs accelerators that are free while the trainer works: colocate has none"
        fix = Fix("give the rollout its own", "colocate: false, with rollout_num_gpus of its own")
        findings.append(Finding("P402", message, fixes=(fix,)))
    if findings:
        raise PlacementError(findings)

    actor = actor_num_nodes * actor_num_gpus_per_node
    rollout = rollout_num_gpus
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
    rollout_share = range(offset, total)
    if debug_train_only or external_engines:
        rollout_share = range(offset, offset)
    elif colocate:
        rollout_share = range(rollout or total)
    actor_share = range(0) if debug_rollout_only else range(min(actor, total))
    return Layout(total, offset, actor_share, rollout_share)

"""How the weights of a plan's trainer get to its engines, before anything is known of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from roost.errors import PlacementError
from roost.placement import Placement, PlacementMode
from roost.plan.plan import ENGINE, TRAINER, ComponentPlan, Plan
from roost.plan.shards import Location, Sharding, TensorShards
from roost.plan.transfer import TransferPlan, plan_transfer

__all__ = ["ranks_of", "weight_flow"]


def weight_flow(plan: Plan, rollout: str = "") -> TransferPlan | None:
    """Who of the trainer sends which share of the weights to whom of the engines.

    The model is one tensor, ``weights``, of as many bytes as both sides can cut evenly; with
    pipeline stages, one for each part that both sides keep together. So the shares are right, and
    the sizes mean nothing. Each accelerator is a rank, and a process without one is a rank too;
    each engine is a replica.

    Args:
        plan: The plan.
        rollout: The component that gets them; may be left out where there is only one.

    Returns:
        ``None`` where the plan does not say enough: no trainer, or several; engines that are not
        alike; sizes that do not fit; a trainer that may grow (auto).
    """
    live = [component for component in plan.components if not component.placeholder]
    trainers = [component for component in live if component.role == TRAINER]
    engines = [component for component in live if component.role == ENGINE and rollout in ("", component.name)]
    if len(trainers) != 1 or len(engines) != 1 or plan.mode is PlacementMode.AUTO:
        return None
    trainer, engine = _trainer(trainers[0]), _engine(engines[0])
    if trainer is None or engine is None:
        return None
    parts, units = lcm(trainer.pp, engine.pp), lcm(trainer.tp, engine.tp)
    names = ["weights"] if parts == 1 else [f"weights.{i}" for i in range(parts)]

    def with_tensors(side: Sharding) -> Sharding:
        stages = [i * side.pp // parts for i in range(parts)]
        tensors = [
            TensorShards(name, (units,), "uint8", 0, stage=stage) for name, stage in zip(names, stages, strict=True)
        ]
        return replace(side, tensors=tuple(tensors))

    try:
        return plan_transfer(with_tensors(trainer), with_tensors(engine))
    except PlacementError:
        return None


def ranks_of(component: ComponentPlan, process: int) -> range:
    """The ranks of a flow that a process of a component is."""
    first = sum(_width(placement) for placement in component.placements[:process])
    return range(first, first + _width(component.placements[process]))


def _width(placement: Placement) -> int:
    return max(1, len(placement.accelerators))


def _locations(placements: Sequence[Placement]) -> tuple[Location, ...]:
    return tuple((p.cluster_node_rank, local) for p in placements for local in (p.accelerators or (-1,)))


def _trainer(component: ComponentPlan) -> Sharding | None:
    locations = _locations(component.placements)
    tp, pp = component.tensor_parallel, component.pipeline_parallel
    dp, rest = divmod(len(locations), tp * pp)
    return None if rest or not dp else Sharding((), tp, pp, dp, "tp-dp-pp", locations)


def _engine(component: ComponentPlan) -> Sharding | None:
    widths = {_width(placement) for placement in component.placements}
    if len(widths) > 1 or component.world_size % component.processes_per_engine:
        return None
    tp, pp = component.tensor_parallel, component.pipeline_parallel
    width = widths.pop() * component.processes_per_engine
    if tp * pp == 1:  # the job does not say: what an engine has is one tensor-parallel group
        tp = width
    if tp * pp != width:
        return None
    dp = component.world_size // component.processes_per_engine
    return Sharding((), tp, pp, dp, "tp-pp-dp", _locations(component.placements))

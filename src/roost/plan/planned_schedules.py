"""The transfer schedules of a plan, made before anything is known of the model.

The trainer holds one tensor per pipeline stage, cut into equal parts over its tensor-parallel ranks. So shares of
bytes are right, and numbers of bytes mean nothing. The first process of each engine receives all tensors whole and can
map memory of all its accelerators, as :class:`TorchEngine` and :class:`VllmEngine` do. Other engines may get more of
their bytes through host memory.
"""

from __future__ import annotations

from typing import NamedTuple

from roost.placement import Placement, PlacementMode
from roost.plan.plan import ENGINE, TRAINER, ComponentPlan, Plan
from roost.plan.schedule import Receiver, Sender, TransferSchedule
from roost.plan.shards import Location, Sharding, TensorShards
from roost.plan.transport import BytesByTransport, WeightTransport

__all__ = ["PlannedSchedule", "bytes_by_transport", "plan_schedules"]


class PlannedSchedule(NamedTuple):
    """A schedule, and the processes that it is for.

    Attributes:
        schedule: The schedule. Senders are the ranks of the trainer.
        trainer: Component name of the trainer.
        receivers: Component name and rank of each receiver: the first process of each engine.
    """

    schedule: TransferSchedule
    trainer: str
    receivers: tuple[tuple[str, int], ...]


def plan_schedules(plan: Plan) -> tuple[PlannedSchedule, ...]:
    """Return the schedules of a plan: one for the engines that join broadcasts, one for all others.

    Weight sync splits engines in the same way. Within a schedule, senders that are equally near take turns over all
    engines.

    Returns:
        An empty tuple if the plan does not determine them: there is no trainer, or several; the trainer's parallel
        sizes do not fit its number of processes; or the trainer may grow (placement mode ``auto``).
    """
    live = [component for component in plan.components if not component.placeholder]
    trainers = [component for component in live if component.role == TRAINER]
    if len(trainers) != 1 or plan.mode is PlacementMode.AUTO:
        return ()
    trainer = trainers[0]
    source = _source(trainer)
    if source is None:
        return ()
    near: list[tuple[ComponentPlan, Placement]] = []
    far: list[tuple[ComponentPlan, Placement]] = []
    for component in live:
        if component.role != ENGINE or not component.transports:
            continue
        if component.world_size % component.processes_per_engine:
            continue
        for members in component.engines:
            is_far = component.transports[members[0].rank] is WeightTransport.BROADCAST
            (far if is_far else near).append((component, members[0]))
    return tuple(_schedule(trainer, source, engines) for engines in (near, far) if engines)


def bytes_by_transport(plan: Plan) -> dict[str, tuple[BytesByTransport, ...]]:
    """Return by component the bytes of each rollout process; all processes of an engine have those of the engine."""
    found: dict[str, list[BytesByTransport]] = {}
    for planned in plan.weight_schedules:
        for (name, rank), sizes in zip(planned.receivers, planned.schedule.bytes_by_transport(), strict=True):
            component = plan.component(name)
            members = component.processes_per_engine
            of_component = found.setdefault(name, [{}] * component.world_size)
            of_component[rank : rank + members] = [sizes] * members
    return {name: tuple(of_component) for name, of_component in found.items()}


def _schedule(
    trainer: ComponentPlan, source: Sharding, engines: list[tuple[ComponentPlan, Placement]]
) -> PlannedSchedule:
    tensors = tuple(TensorShards(tensor.name, tensor.shape, tensor.dtype) for tensor in source.tensors)
    locations = tuple(_location(first) for _, first in engines)
    reachable = tuple(first.accelerators for _, first in engines)
    target = Sharding(tensors, dp=len(engines), order="tp-pp-dp", locations=locations, reachable=reachable)
    senders = tuple(
        Sender(node, frozenset([(node, local)]) if local >= 0 else frozenset()) for node, local in source.locations
    )
    receivers = tuple(
        Receiver(
            first.cluster_node_rank,
            component.transports[first.rank],
            frozenset((first.cluster_node_rank, local) for local in first.accelerators),
        )
        for component, first in engines
    )
    schedule = TransferSchedule(source, target, senders, receivers)
    return PlannedSchedule(schedule, trainer.name, tuple((component.name, first.rank) for component, first in engines))


def _source(trainer: ComponentPlan) -> Sharding | None:
    tp, pp = trainer.tensor_parallel, trainer.pipeline_parallel
    dp, rest = divmod(trainer.world_size, tp * pp)
    if rest or not dp:
        return None
    tensors = tuple(TensorShards(f"stage {stage}", (tp,), "uint8", 0, stage=stage) for stage in range(pp))
    return Sharding(tensors, tp, pp, dp, "tp-dp-pp", tuple(map(_location, trainer.placements)))


def _location(placement: Placement) -> Location:
    return placement.cluster_node_rank, placement.local_accelerator_rank

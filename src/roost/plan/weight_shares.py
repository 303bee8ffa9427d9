"""Which share of an engine's weights goes by which transport.

An engine's transport in the plan is the best that its place allows. What the trainer holds on accelerators that the
engine does not have still comes another way, since nothing is gathered before: see :func:`used_transport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from roost.errors import PlacementError
from roost.placement import Placement, PlacementMode
from roost.plan.plan import ENGINE, TRAINER, ComponentPlan, Plan
from roost.plan.shards import Sharding, TensorShards
from roost.plan.transfer import plan_transfer
from roost.plan.transport import NEAR, Shares, WeightTransport, used_transport

__all__ = ["transport_shares"]


def transport_shares(plan: Plan) -> dict[str, tuple[Shares, ...]]:
    """Return the shares of each process of each rollout component; processes of one engine have the same.

    It is what engines get that take whole tensors in their first process and, of what comes by CUDA IPC, parts of
    tensors: :class:`TorchEngine` and :class:`VllmEngine`. Others may get more of it through host memory.

    Returns:
        No entry for a component whose shares cannot be told: there is no trainer, or several; the trainer's sizes
        do not fit; or the trainer may grow (auto).
    """
    live = [component for component in plan.components if not component.placeholder]
    trainers = [component for component in live if component.role == TRAINER]
    if len(trainers) != 1 or plan.mode is PlacementMode.AUTO:
        return {}
    source = _trainer(trainers[0])
    engines = [c for c in live if c.role == ENGINE and c.transports and c.world_size % c.processes_per_engine == 0]
    if source is None or not engines:
        return {}
    found: dict[str, list[Shares]] = {}
    near: list[tuple[str, int]] = []
    firsts: list[Placement] = []
    for component in engines:
        found[component.name] = [{transport: Fraction(1)} for transport in component.transports]
        for members in component.engines:
            first = members[0]
            if component.transports[first.rank] is not WeightTransport.BROADCAST:
                near.append((component.name, first.rank))
                firsts.append(first)
    if near:
        size = {component.name: component.processes_per_engine for component in engines}
        try:
            of_engines = _shares_of(source, found, near, firsts)
        except PlacementError:
            return {}
        for (name, rank), shares in zip(near, of_engines, strict=True):
            found[name][rank : rank + size[name]] = [shares] * size[name]
    return {name: tuple(shares) for name, shares in found.items()}


def _shares_of(
    source: Sharding, planned: Mapping[str, list[Shares]], near: list[tuple[str, int]], firsts: list[Placement]
) -> list[Shares]:
    """The shares of engines that are near the trainer, as weight sync sends to them: all in one transfer."""
    tensors = tuple(TensorShards(tensor.name, tensor.shape, tensor.dtype) for tensor in source.tensors)
    locations = tuple((first.cluster_node_rank, first.local_accelerator_rank) for first in firsts)
    reachable = tuple(first.accelerators for first in firsts)
    engines = Sharding(tensors, dp=len(firsts), order="tp-pp-dp", locations=locations, reachable=reachable)
    flow = plan_transfer(source, engines)
    counts: list[dict[WeightTransport, int]] = [{} for _ in firsts]
    for piece in flow.pieces:
        for route in piece.routes:
            for target, replica in route.pairs():
                name, rank = near[target]
                sender = source.locations[source.rank_of(piece.source_tp, piece.source_stage, replica)]
                first = firsts[target]
                is_same = sender[1] >= 0 and sender[1] in first.accelerators
                kind = next(iter(planned[name][rank]))
                if kind in NEAR:
                    kind = used_transport(kind, sender[0] == first.cluster_node_rank, is_same)
                counts[target][kind] = counts[target].get(kind, 0) + piece.nbytes
    return [_fractions(count) for count in counts]


def _fractions(counts: Mapping[WeightTransport, int]) -> Shares:
    total = sum(counts.values()) or 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0].value))
    return {transport: Fraction(count, total) for transport, count in ordered}


def _trainer(component: ComponentPlan) -> Sharding | None:
    tp, pp = component.tensor_parallel, component.pipeline_parallel
    dp, rest = divmod(component.world_size, tp * pp)
    if rest or not dp:
        return None
    tensors = tuple(TensorShards(f"stage {stage}", (tp,), "uint8", 0, stage=stage) for stage in range(pp))
    locations = tuple((p.cluster_node_rank, p.local_accelerator_rank) for p in component.placements)
    return Sharding(tensors, tp, pp, dp, "tp-dp-pp", locations)

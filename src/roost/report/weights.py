"""Where the weights of a rollout process come from, and where a trainer process sends them."""

from __future__ import annotations

from fractions import Fraction
from math import prod

from roost.plan import Plan, Process, TransferPlan
from roost.plan.weights import ranks_of, weight_flow
from roost.ranks import format_ranks

__all__ = ["weight_lines"]

_WIDTH = 60
"""How much of a long list of ranks is shown."""


def weight_lines(plan: Plan, process: Process) -> list[str]:
    """What there is to say of a process's weights; nothing where the plan does not tell."""
    lines = []
    if process.component.role == "rollout":
        flow = weight_flow(plan, process.component.name)
        lines = [_sources(flow, process)] if flow is not None else []
    elif process.component.role == "actor":
        for component in plan.components:
            flow = weight_flow(plan, component.name) if component.role == "rollout" else None
            if flow is not None:
                lines.append(_targets(flow, plan, process, component.name))
    return lines


def _sources(flow: TransferPlan, process: Process) -> str:
    sizes: dict[str, int] = {}
    for rank in ranks_of(process.component, process.placement.rank):
        for move in flow.for_target(rank):
            sizes[move.link] = sizes.get(move.link, 0) + prod(stop - start for start, stop in move.box)
    total = sum(sizes.values())
    places = _places(flow, process)
    return ", ".join(f"{_share(sizes[link], total)} from {places[link]}" for link in places if link in sizes)


def _targets(flow: TransferPlan, plan: Plan, process: Process, rollout: str) -> str:
    width = flow.target.world_size // plan.component(rollout).world_size
    receivers: dict[str, set[int]] = {}
    for rank in ranks_of(process.component, process.placement.rank):
        for move in flow.for_source(rank):
            receivers.setdefault(move.link, set()).add(move.rank // width)
    places = _places(flow, process)
    texts = [f"to {rollout}[{_ranks(receivers[link])}] on {places[link]}" for link in places if link in receivers]
    return ", ".join(texts) or f"none to {rollout}: other ranks are as near"


def _places(flow: TransferPlan, process: Process) -> dict[str, str]:
    noun = process.placement.accelerator_type.noun
    on_accelerators = all(local >= 0 for side in (flow.source, flow.target) for _, local in side.locations[:1])
    node = f"other {noun}s of the node" if on_accelerators else "the same node"
    return {"same": f"the same {noun}", "node": node, "network": "other nodes"}


def _share(part: int, total: int) -> str:
    return "all" if part == total else str(Fraction(part, total))


def _ranks(ranks: set[int]) -> str:
    text = format_ranks(sorted(ranks))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"

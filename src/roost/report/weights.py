"""The weights of one process in words: which trainer ranks send them, or which engines receive them."""

from __future__ import annotations

from roost.plan import Plan, Process
from roost.plan.planned_schedules import PlannedSchedule
from roost.plan.routes import DISTANCES, Distance
from roost.plan.transport import share_text
from roost.ranks import format_ranks

__all__ = ["weight_lines"]

_MAX_LENGTH = 60
"""Characters of a list of ranks that are shown."""


def weight_lines(plan: Plan, process: Process) -> list[str]:
    """Return lines about the weights of a process; none if the plan has no schedule for it."""
    name, rank, size = process.component.name, process.placement.rank, process.component.processes_per_engine
    schedules = plan.weight_schedules
    if schedules and name == schedules[0].trainer:
        return _targets(plan, process)
    first = rank - rank % size
    for planned in schedules:
        if (name, first) in planned.receivers:
            text = _sources(planned, planned.receivers.index((name, first)), process)
            return [text if size == 1 else f"{name}[{first}] receives for the engine: {text}"]
    return []


def _sources(planned: PlannedSchedule, receiver: int, process: Process) -> str:
    """Return such as ``1/2 from the same GPU, 1/2 from other nodes``."""
    sizes: dict[Distance, int] = {}
    for entry in planned.schedule.entries:
        if entry.receiver == receiver:
            sizes[entry.distance] = sizes.get(entry.distance, 0) + entry.nbytes
    total = sum(sizes.values())
    places = _places(planned, process)
    return ", ".join(
        f"{_share(sizes[distance], total)} from {places[distance]}" for distance in DISTANCES if distance in sizes
    )


def _targets(plan: Plan, process: Process) -> list[str]:
    """Return a line for each component that receives weights, such as ``to rollout[0,2] on the same GPU``."""
    receivers: dict[str, dict[tuple[int, str], set[int]]] = {}
    for planned in plan.weight_schedules:
        places = _places(planned, process)
        for name, _ in planned.receivers:
            receivers.setdefault(name, {})
        for entry in planned.schedule.entries:
            if entry.sender == process.placement.rank:
                name, rank = planned.receivers[entry.receiver]
                key = (DISTANCES.index(entry.distance), places[entry.distance])
                receivers[name].setdefault(key, set()).add(rank)
    return [
        ", ".join(f"to {name}[{_ranks(ranks)}] on {place}" for (_, place), ranks in sorted(by_place.items()))
        or f"none to {name}: other ranks are as near"
        for name, by_place in sorted(receivers.items())
    ]


def _places(planned: PlannedSchedule, process: Process) -> dict[Distance, str]:
    noun = process.placement.accelerator_type.noun
    sides = (planned.schedule.source, planned.schedule.target)
    on_accelerators = all(local >= 0 for side in sides for _, local in side.locations[:1])
    node = f"other {noun}s of the node" if on_accelerators else "the same node"
    return {"same": f"the same {noun}", "node": node, "network": "other nodes"}


def _share(part: int, total: int) -> str:
    return "all" if part == total else share_text(part, total)


def _ranks(ranks: set[int]) -> str:
    text = format_ranks(sorted(ranks))
    return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"

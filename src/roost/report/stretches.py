"""Changed processes as few stretches of consecutive ranks that change in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from roost.placement import Placement
from roost.plan.diff import PLACE, Details, ProcessChange

__all__ = ["Stretch", "stretches_of"]

MOST_BY_NODE = 16
"""If there are more stretches, those whose places continue one another are joined across unequal nodes."""

_IMPLIED_BY_A_MOVE = frozenset(
    (*PLACE, "NODE_RANK", "NODE_LOCAL_RANK", "NODE_LOCAL_WORLD_SIZE", "visible accelerators", "vendor", "node group")
)
"""Details that follow from a move. The JSON has them; tables do not show them."""

_SIDES = ("before", "after")


@dataclass(frozen=True)
class Stretch:
    """Consecutive ranks of a component that change in the same way.

    Attributes:
        first: The first change.
        last: The last change.
        changes: The changes on the first node. The other nodes have equal ones.
        shown: What changes for all of them, beside their place.
        node_ends: For stretches across unequal nodes, whose places follow one another: the last accelerator of each
            node, before and after. ``None`` for a side that stays on one node.
    """

    first: ProcessChange
    last: ProcessChange
    changes: tuple[ProcessChange, ...]
    shown: Details
    node_ends: Mapping[str, int | None] | None = None

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.last.rank - self.first.rank + 1


def stretches_of(changes: Sequence[ProcessChange]) -> list[Stretch]:
    """Return all changes as few stretches."""
    by_node = _equal_nodes(changes)
    return by_node if len(by_node) <= MOST_BY_NODE else _sequences(by_node)


def _equal_nodes(changes: Iterable[ProcessChange]) -> list[Stretch]:
    """Join the ranks of one node, and then consecutive nodes with equal changes."""
    found: list[Stretch] = []
    shape_before: object = None
    for _, grouped in groupby(enumerate(changes), key=lambda item: _key(item[0], item[1])):
        run = tuple(change for _, change in grouped)
        shown = _shown(run[0])
        shape = (
            run[0].sign,
            run[0].component,
            tuple((_hardware(change.before), _hardware(change.after)) for change in run),
            tuple(shown.items()),
        )
        if found and shape_before == shape and _is_next_node(found[-1].last, run[0]):
            found[-1] = Stretch(found[-1].first, run[-1], found[-1].changes, shown)
        else:
            found.append(Stretch(run[0], run[-1], run, shown))
        shape_before = shape
    return found


def _key(index: int, change: ProcessChange) -> tuple[Any, ...]:
    """Return a key that is equal for consecutive ranks on one node that change in the same way."""
    nodes = (_node(change.before), _node(change.after))
    return change.sign, change.component, change.rank - index, nodes, tuple(_shown(change).items())


def _node(placement: Placement | None) -> int | None:
    return placement.cluster_node_rank if placement is not None else None


def _hardware(placement: Placement | None) -> object:
    if placement is None:
        return None
    return placement.local_accelerator_rank >= 0, placement.local_hardware_ranks


def _shown(change: ProcessChange) -> Details:
    """Return the details that are shown beside the place of a process."""
    details = change.details
    if not details or not change.is_moved:
        return details
    if details.keys() <= _IMPLIED_BY_A_MOVE:
        return {}
    return {what: pair for what, pair in details.items() if what not in _IMPLIED_BY_A_MOVE}


def _is_next_node(last: ProcessChange, first: ProcessChange) -> bool:
    """Return whether a run starts with the next rank, on the next node of each plan."""
    if first.rank != last.rank + 1:
        return False
    for side in _SIDES:
        before, after = getattr(last, side), getattr(first, side)
        if before is not None and after.cluster_node_rank != before.cluster_node_rank + 1:
            return False
    return True


# Sequences -----------------------------------------------------------------------------------


def _sequences(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Join stretches if each side continues with the next accelerator of its node, or the first of the next node."""
    found: list[Stretch] = []
    ends: dict[str, int | None] = {}
    for stretch in stretches:
        last = found[-1] if found else None
        own = {side: _end_of_node(stretch, side) for side in _SIDES}
        joined = None
        if last is not None and _can_follow(last, stretch):
            joined = {side: _joined_end(last, stretch, side, (ends[side], own[side])) for side in _SIDES}
        if last is None or joined is None or -1 in joined.values():
            found.append(stretch)
            ends = own
        else:
            found[-1] = Stretch(last.first, stretch.last, last.changes, last.shown, joined)
            ends = joined
    return found


def _can_follow(last: Stretch, stretch: Stretch) -> bool:
    """Return whether the next ranks change in the same way, and all have consecutive accelerators."""
    mine, other = last.first, stretch.first
    return (
        (mine.sign, mine.component, mine.is_moved) == (other.sign, other.component, other.is_moved)
        and other.rank == last.last.rank + 1
        and last.shown == stretch.shown
        and all(_is_consecutive(part, side) for part in (last, stretch) for side in _SIDES)
    )


def _is_consecutive(stretch: Stretch, side: str) -> bool:
    """Return whether each process has the accelerators after those of the previous process."""
    if getattr(stretch.first, side) is None:
        return True
    given = [rank for change in stretch.changes for rank in getattr(change, side).accelerators]
    return bool(given) and given == list(range(given[0], given[0] + len(given)))


def _end_of_node(stretch: Stretch, side: str) -> int | None:
    """Return the last accelerator of a stretch's nodes; ``None`` if it is on one node."""
    first: Placement | None = getattr(stretch.first, side)
    last: Placement = getattr(stretch.last, side)
    if first is None or first.cluster_node_rank == last.cluster_node_rank:
        return None
    given: tuple[int, ...] = getattr(stretch.changes[-1], side).accelerators
    return given[-1] if given else None


def _joined_end(last: Stretch, stretch: Stretch, side: str, ends: tuple[int | None, int | None]) -> int | None:
    """Return the last accelerator of the joined stretch's nodes; -1 if the stretches cannot be joined."""
    before, after = getattr(last.last, side), getattr(stretch.first, side)
    if before is None:
        return None
    known = {end for end in ends if end is not None}
    start, stop = after.accelerators[0], before.accelerators[-1]
    if after.cluster_node_rank == before.cluster_node_rank:
        is_next = start == stop + 1
    else:
        is_next = start == 0 and after.cluster_node_rank == before.cluster_node_rank + 1
        known.add(stop)
    if not is_next or len(known) > 1:
        return -1
    return known.pop() if known else None

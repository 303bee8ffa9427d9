"""A transfer plan: which rank sends which part of which tensor to which rank, from one sharding to another.

Both sides describe what their ranks hold. Every element that a target rank holds gets exactly one sender: a rank on
the same accelerator if there is one, else on the same node, else any. Equally near ranks take turns.

The plan is symbolic: a part stands for all replicas of a (tensor-parallel rank, pipeline stage) pair, and replicas are
ranges. Its size depends on the description of the model, not on the number of ranks.
:meth:`TransferPlan.for_target` and :meth:`TransferPlan.for_source` give the transfers of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

from roost.errors import Finding, Fix, PlacementError, counted, did_you_mean
from roost.plan.routes import DISTANCES, Distance, Route, SenderSelector
from roost.plan.shards import ITEM_BYTES, Interval, Sharding, TensorShards, check_side, intervals_of

__all__ = ["Sharding", "TensorShards", "TransferPlan", "plan_transfer"]

_Box = tuple[Interval, ...]
_RouteKey = tuple[tuple[int, ...], int, int, int]
"""Tensor-parallel ranks of the source, their stage, tensor-parallel rank of the target, its stage."""

_MAX_SUGGESTIONS = 20
"""For how many missing tensors a similar name is searched."""


class TensorPart(NamedTuple):
    """A part of a tensor that one class of ranks sends to another.

    Attributes:
        tensor: Name of the tensor.
        source_tp: Tensor-parallel rank of the senders.
        source_stage: Pipeline stage of the senders.
        target_tp: Tensor-parallel rank of the receivers.
        target_stage: Pipeline stage of the receivers.
        box: (start, stop) in each dimension of the full tensor.
        nbytes: Size for one receiver.
        routes: Which replicas send to which. Parts with the same senders and receivers share this object.
    """

    tensor: str
    source_tp: int
    source_stage: int
    target_tp: int
    target_stage: int
    box: _Box
    nbytes: int
    routes: tuple[Route, ...]


class Move(NamedTuple):
    """A part of a tensor between two ranks, seen from one of them.

    Attributes:
        tensor: Name of the tensor.
        rank: The other rank: the sender for a target rank, the receiver for a source rank.
        box: (start, stop) in each dimension of the full tensor.
        distance: ``"same"`` accelerator, same ``"node"``, or ``"network"``.
    """

    tensor: str
    rank: int
    box: _Box
    distance: Distance


@dataclass(frozen=True)
class TransferPlan:
    """Which rank sends what to which rank; made by :func:`plan_transfer`.

    Attributes:
        source: The sending side.
        target: The receiving side.
        parts: The parts that are sent, for all replicas at once; tensors are in the target's order.
    """

    source: Sharding
    target: Sharding
    parts: tuple[TensorPart, ...]

    @property
    def bytes_by_distance(self) -> dict[str, int]:
        """Bytes over all receivers, by ``"same"``, ``"node"`` and ``"network"``."""
        totals: dict[str, int] = dict.fromkeys(DISTANCES, 0)
        for part, nbytes in self.bundles:
            for route in part.routes:
                totals[route.distance] += nbytes * len(route)
        return totals

    @property
    def total_bytes(self) -> int:
        """Bytes that all receivers get, at any distance."""
        return sum(self.bytes_by_distance.values())

    @property
    def cross_accelerator_share(self) -> float:
        """Share of all bytes that leave their accelerator; 0 if there are no bytes."""
        by_distance = self.bytes_by_distance
        total = sum(by_distance.values())
        return (total - by_distance["same"]) / total if total else 0.0

    def for_target(self, rank: int) -> list[Move]:
        """Return what a target rank receives; the ``rank`` of each move is the sender.

        Raises:
            PlacementError: If the target has no such rank.
        """
        tp, stage, dp = self.target.coordinates(rank)
        moves = []
        for part in self._by_target.get((tp, stage), ()):
            for route in part.routes:
                replica = route.source_of(dp)
                if replica is not None:
                    sender = self.source.rank_of(part.source_tp, part.source_stage, replica)
                    moves.append(Move(part.tensor, sender, part.box, route.distance))
        return moves

    def for_source(self, rank: int) -> list[Move]:
        """Return what a source rank sends; the ``rank`` of each move is the receiver.

        Raises:
            PlacementError: If the source has no such rank.
        """
        tp, stage, dp = self.source.coordinates(rank)
        return [
            Move(part.tensor, self.target.rank_of(part.target_tp, part.target_stage, replica), part.box, route.distance)
            for part in self._by_source.get((tp, stage), ())
            for route in part.routes
            for replica in route.targets_of(dp)
        ]

    def summary(self) -> list[str]:
        """Return a few lines for people."""
        by_distance, total = self.bytes_by_distance, self.total_bytes
        tensors = counted(len(self.target.tensors), "tensor")
        lines = [f"{tensors}, {_size(total)} to {counted(self.target.world_size, 'rank')}"]
        words: dict[Distance, str] = {
            "same": "on the same accelerator",
            "node": "inside a node",
            "network": "over the network",
        }
        lines += [
            f"{words[distance]}: {_size(by_distance[distance])} ({by_distance[distance] / total:.1%})"
            for distance in DISTANCES
            if by_distance[distance]
        ]
        if total:
            lines.append(f"between accelerators: {self.cross_accelerator_share:.1%}")
        sent = self._sent_across()
        if sent:
            rank = max(sent, key=lambda rank: (sent[rank], -rank))
            mean = sum(sent.values()) / self.source.world_size
            lines.append(f"busiest sender: rank {rank}, {_size(sent[rank])} ({sent[rank] / mean:.1f} x the mean)")
        return lines

    def _sent_across(self) -> dict[int, int]:
        """Return by source rank the bytes that it sends to other accelerators."""
        sent: dict[int, int] = {}
        for part, nbytes in self.bundles:
            for route in part.routes:
                if route.distance != "same":
                    for _, replica in route.pairs():
                        rank = self.source.rank_of(part.source_tp, part.source_stage, replica)
                        sent[rank] = sent.get(rank, 0) + nbytes
        return sent

    @cached_property
    def bundles(self) -> list[tuple[TensorPart, int]]:
        """One part for all parts with the same senders and receivers, and the bytes of all of them together."""
        bundles: dict[tuple[int, int, int], tuple[TensorPart, int]] = {}
        for part in self.parts:
            key = (part.source_tp, part.source_stage, id(part.routes))
            first, nbytes = bundles.get(key, (part, 0))
            bundles[key] = (first, nbytes + part.nbytes)
        return list(bundles.values())

    @cached_property
    def _by_target(self) -> dict[tuple[int, int], list[TensorPart]]:
        found: dict[tuple[int, int], list[TensorPart]] = {}
        for part in self.parts:
            found.setdefault((part.target_tp, part.target_stage), []).append(part)
        return found

    @cached_property
    def _by_source(self) -> dict[tuple[int, int], list[TensorPart]]:
        found: dict[tuple[int, int], list[TensorPart]] = {}
        for part in self.parts:
            found.setdefault((part.source_tp, part.source_stage), []).append(part)
        return found


def plan_transfer(source: Sharding, target: Sharding) -> TransferPlan:
    """Decide which rank of the source sends what to which rank of the target.

    The senders do not depend on the order of the tensors: two processes that describe the same
    sides make the same plan.

    Raises:
        PlacementError: If the source cannot serve the target; with all problems.
    """
    return _plan(source, target)


def _plan(source: Sharding, target: Sharding) -> TransferPlan:
    findings = [*check_side(source, "source"), *check_side(target, "target"), *_check_pair(source, target)]
    if findings:
        raise PlacementError(findings)
    held = {tensor.name: tensor for tensor in source.tensors}
    layouts: dict[object, list[_Cut]] = {}
    cuts_of = []
    for wanted in target.tensors:
        have = held[wanted.name]
        key = (wanted.shape, wanted.dtype, *(field for t in (have, wanted) for field in (t.dim, t.slices, t.stage)))
        if key not in layouts:
            layouts[key] = list(_cut(have, source.tp, wanted, target.tp))
        cuts_of.append((wanted.name, layouts[key]))
    selector = SenderSelector(source, target)
    keys = sorted({cut.key for cuts in layouts.values() for cut in cuts})
    routes = {key: selector.routes(*key) for key in keys}
    parts = [
        TensorPart(name, source_tp, cut.key[1], cut.key[2], cut.key[3], cut.box, cut.nbytes, of_tp)
        for name, cuts in cuts_of
        for cut in cuts
        for source_tp, of_tp in routes[cut.key]
    ]
    return TransferPlan(source, target, tuple(parts))


class _Cut(NamedTuple):
    """A box that some source ranks hold and a target rank needs. Tensors with the same layout share it."""

    box: _Box
    nbytes: int
    key: _RouteKey


def _cut(have: TensorShards, source_tp: int, want: TensorShards, target_tp: int) -> Iterator[_Cut]:
    """Yield the boxes that each tensor-parallel rank of the target needs."""
    holders = _holders(have, source_tp)
    wanted = intervals_of(want, target_tp)
    for tp in range(target_tp):
        for interval, tps in holders:
            box = [(0, extent) for extent in want.shape]
            if have.dim is not None:
                box[have.dim] = interval
            if want.dim is not None:
                start, stop = box[want.dim]
                box[want.dim] = (max(start, wanted[tp][0]), min(stop, wanted[tp][1]))
            if all(start < stop for start, stop in box):
                nbytes = prod(stop - start for start, stop in box) * ITEM_BYTES[want.dtype]
                yield _Cut(tuple(box), nbytes, (tps, have.stage, tp, want.stage))


def _holders(have: TensorShards, tp: int) -> list[tuple[Interval, tuple[int, ...]]]:
    """Return the cut dimension as intervals, each with the tensor-parallel ranks that hold all of it."""
    if have.dim is None:
        return [((0, 0), tuple(range(tp)))]
    intervals = intervals_of(have, tp)
    edges = sorted({edge for interval in intervals for edge in interval})
    found: list[tuple[Interval, tuple[int, ...]]] = []
    for start, stop in pairwise(edges):
        tps = tuple(i for i, (first, last) in enumerate(intervals) if first <= start and stop <= last)
        if found and found[-1][1] == tps:
            start = found.pop()[0][0]
        found.append(((start, stop), tps))
    return found


def _check_pair(source: Sharding, target: Sharding) -> Iterator[Finding]:
    """Yield a finding for everything in which the two sides do not match."""
    held = {tensor.name: tensor for tensor in source.tensors}
    wanted = {tensor.name: tensor for tensor in target.tensors}
    yield from _missing(wanted, held, "target", "source")
    yield from _missing(held, wanted, "source", "target")
    for name, want in wanted.items():
        have = held.get(name)
        if have is None:
            continue
        if have.shape != want.shape:
            message = f"{name}: its shape is {have.shape} in the source and {want.shape} in the target"
            yield Finding("S102", message, rule="both sides give the full shape, not that of a shard")
        if have.dtype != want.dtype:
            message = f"{name}: its dtype is {have.dtype} in the source and {want.dtype} in the target"
            yield Finding("S103", message, rule="weights are cast before they are sent")


def _missing(names: Iterable[str], known: Iterable[str], here: str, there: str) -> Iterator[Finding]:
    known = set(known)
    lost = [name for name in names if name not in known]
    free = sorted(known.difference(names)) if lost else []
    for i, name in enumerate(lost):
        near = did_you_mean(name, free) if i < _MAX_SUGGESTIONS else None
        fixes = (Fix("did you mean", near),) if near else ()
        yield Finding("S101", f"{name}: the {here} has this tensor, and the {there} does not", fixes=fixes)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{nbytes:,.0f} B"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"

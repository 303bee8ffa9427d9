"""Which rank sends which part of which tensor to whom, when weights go from one side to another.

Both sides describe what their ranks hold. The plan gives every element that a destination rank
holds exactly one sender: one on the same accelerator where there is one, else one on the same
node, else any; those that are equally near take turns.

It is symbolic: a piece stands for all replicas of a (tensor-parallel rank, pipeline stage) pair,
and replicas are ranges. So it stays as small as the model's description, whatever the number of
ranks; :meth:`TransferPlan.for_target` and :meth:`TransferPlan.for_source` spell it out for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

from roost.errors import Finding, Fix, PlacementError, counted, did_you_mean
from roost.plan.routes import LINKS, Link, Route, Router
from roost.plan.shards import ITEM_BYTES, Sharding, Span, TensorShards, check_side, spans_of

__all__ = ["Sharding", "TensorShards", "TransferPlan", "plan_transfer"]

_Box = tuple[Span, ...]
_RouteKey = tuple[tuple[int, ...], int, int, int]
"""Source tps that hold it, their stage, destination tp, its stage."""

_GUESSES = 20
"""For how many missing tensors a similar name is looked for."""


@dataclass(frozen=True)
class Piece:
    """A part of a tensor on its way from one class of ranks to another.

    Attributes:
        tensor: Its name.
        source_tp: Tensor-parallel rank that sends it.
        source_stage: Pipeline stage that sends it.
        target_tp: Tensor-parallel rank that gets it.
        target_stage: Pipeline stage that gets it.
        box: (start, stop) in each dimension of the full tensor.
        nbytes: Its size, for one destination.
        routes: Which replicas get it from which. Pieces that go the same way share this object.
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
        tensor: Its name.
        rank: The other rank: who sends it, or who gets it.
        box: (start, stop) in each dimension of the full tensor.
        link: ``"same"`` accelerator, same ``"node"``, or ``"network"``.
    """

    tensor: str
    rank: int
    box: _Box
    link: Link


@dataclass(frozen=True)
class TransferPlan:
    """Who sends what to whom; made by :func:`plan_transfer`.

    Attributes:
        source: The side that sends.
        target: The side that gets.
        pieces: What is sent, for all replicas at once; tensors in the target's order.
    """

    source: Sharding
    target: Sharding
    pieces: tuple[Piece, ...]

    @property
    def bytes_by_link(self) -> dict[str, int]:
        """Bytes over all destinations, by ``"same"``, ``"node"`` and ``"network"``."""
        totals: dict[str, int] = dict.fromkeys(LINKS, 0)
        for piece, nbytes in self._flows:
            for route in piece.routes:
                totals[route.link] += nbytes * len(route)
        return totals

    @property
    def total_bytes(self) -> int:
        """Bytes that all destinations get, from wherever."""
        return sum(self.bytes_by_link.values())

    @property
    def cross_accelerator_share(self) -> float:
        """The part of all bytes that goes from one accelerator to another; 0 where there are none."""
        by_link = self.bytes_by_link
        total = sum(by_link.values())
        return (total - by_link["same"]) / total if total else 0.0

    def for_target(self, rank: int) -> list[Move]:
        """Everything that a destination rank gets; ``rank`` of each is the sender's.

        Raises:
            PlacementError: Where the target has no such rank.
        """
        tp, stage, dp = self.target.coordinates(rank)
        moves = []
        for piece in self._by_target.get((tp, stage), ()):
            for route in piece.routes:
                replica = route.source_of(dp)
                if replica is not None:
                    sender = self.source.rank_of(piece.source_tp, piece.source_stage, replica)
                    moves.append(Move(piece.tensor, sender, piece.box, route.link))
        return moves

    def for_source(self, rank: int) -> list[Move]:
        """Everything that a source rank sends; ``rank`` of each is the receiver's.

        Raises:
            PlacementError: Where the source has no such rank.
        """
        tp, stage, dp = self.source.coordinates(rank)
        return [
            Move(piece.tensor, self.target.rank_of(piece.target_tp, piece.target_stage, replica), piece.box, route.link)
            for piece in self._by_source.get((tp, stage), ())
            for route in piece.routes
            for replica in route.targets_of(dp)
        ]

    def summary(self) -> list[str]:
        """A few lines for people."""
        by_link, total = self.bytes_by_link, self.total_bytes
        tensors = counted(len(self.target.tensors), "tensor")
        lines = [f"{tensors}, {_size(total)} to {counted(self.target.world_size, 'rank')}"]
        words = {"same": "on the same accelerator", "node": "inside a node", "network": "over the network"}
        lines += [
            f"{words[link]}: {_size(by_link[link])} ({by_link[link] / total:.1%})" for link in LINKS if by_link[link]
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
        """Bytes that each source rank sends to other accelerators."""
        sent: dict[int, int] = {}
        for piece, nbytes in self._flows:
            for route in piece.routes:
                if route.link != "same":
                    for _, replica in route.pairs():
                        rank = self.source.rank_of(piece.source_tp, piece.source_stage, replica)
                        sent[rank] = sent.get(rank, 0) + nbytes
        return sent

    @cached_property
    def _flows(self) -> list[tuple[Piece, int]]:
        """A piece for all that go the same way, and the bytes of them all."""
        flows: dict[tuple[int, int, int], tuple[Piece, int]] = {}
        for piece in self.pieces:
            key = (piece.source_tp, piece.source_stage, id(piece.routes))
            first, nbytes = flows.get(key, (piece, 0))
            flows[key] = (first, nbytes + piece.nbytes)
        return list(flows.values())

    @cached_property
    def _by_target(self) -> dict[tuple[int, int], list[Piece]]:
        found: dict[tuple[int, int], list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault((piece.target_tp, piece.target_stage), []).append(piece)
        return found

    @cached_property
    def _by_source(self) -> dict[tuple[int, int], list[Piece]]:
        found: dict[tuple[int, int], list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault((piece.source_tp, piece.source_stage), []).append(piece)
        return found


def plan_transfer(source: Sharding, target: Sharding) -> TransferPlan:
    """Decides who sends what to whom.

    The senders do not depend on the order of the tensors: two processes that describe the same
    sides make the same plan.

    Raises:
        PlacementError: With everything that keeps the one side from serving the other.
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
        key = (wanted.shape, wanted.dtype, *(part for t in (have, wanted) for part in (t.dim, t.slices, t.stage)))
        if key not in layouts:
            layouts[key] = list(_cut(have, source.tp, wanted, target.tp))
        cuts_of.append((wanted.name, layouts[key]))
    router = Router(source, target)
    keys = sorted({cut.key for cuts in layouts.values() for cut in cuts})
    routes = {key: router.routes(*key) for key in keys}
    pieces = [
        Piece(name, source_tp, cut.key[1], cut.key[2], cut.key[3], cut.box, cut.nbytes, way)
        for name, cuts in cuts_of
        for cut in cuts
        for source_tp, way in routes[cut.key]
    ]
    return TransferPlan(source, target, tuple(pieces))


class _Cut(NamedTuple):
    """A box that some source ranks hold and a destination needs; tensors of one layout share it."""

    box: _Box
    nbytes: int
    key: _RouteKey


def _cut(have: TensorShards, source_tp: int, want: TensorShards, target_tp: int) -> Iterator[_Cut]:
    """The boxes that each tensor-parallel rank of the destination needs."""
    holders = _holders(have, source_tp)
    wanted = spans_of(want, target_tp)
    for tp in range(target_tp):
        for span, tps in holders:
            box = [(0, extent) for extent in want.shape]
            if have.dim is not None:
                box[have.dim] = span
            if want.dim is not None:
                start, stop = box[want.dim]
                box[want.dim] = (max(start, wanted[tp][0]), min(stop, wanted[tp][1]))
            if all(start < stop for start, stop in box):
                nbytes = prod(stop - start for start, stop in box) * ITEM_BYTES[want.dtype]
                yield _Cut(tuple(box), nbytes, (tps, have.stage, tp, want.stage))


def _holders(have: TensorShards, tp: int) -> list[tuple[Span, tuple[int, ...]]]:
    """The cut dimension as spans, each with the tensor-parallel ranks that hold all of it."""
    if have.dim is None:
        return [((0, 0), tuple(range(tp)))]
    spans = spans_of(have, tp)
    edges = sorted({edge for span in spans for edge in span})
    found: list[tuple[Span, tuple[int, ...]]] = []
    for start, stop in pairwise(edges):
        tps = tuple(i for i, (first, last) in enumerate(spans) if first <= start and stop <= last)
        if found and found[-1][1] == tps:
            start = found.pop()[0][0]
        found.append(((start, stop), tps))
    return found


def _check_pair(source: Sharding, target: Sharding) -> Iterator[Finding]:
    """What does not fit between the two sides."""
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
        near = did_you_mean(name, free) if i < _GUESSES else None
        fixes = (Fix("is it this one", near),) if near else ()
        yield Finding("S101", f"{name}: the {here} has it, and the {there} has not", fixes=fixes)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{nbytes:,.0f} B"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"

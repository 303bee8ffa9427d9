"""One side of a weight transfer: which rank holds which part of which tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from roost.errors import Finding, Fix, PlacementError, counted, shown

__all__ = ["ITEM_BYTES", "Interval", "Location", "Sharding", "TensorShards", "check_side", "intervals_of"]

Interval = tuple[int, int]
"""Start, and end (exclusive)."""

Location = tuple[int, int]
"""Node rank, and accelerator on that node; -1 for a process without an accelerator."""

ITEM_BYTES = {
    name: size
    for size, names in {
        1: "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
        2: "int16 uint16 float16 bfloat16",
        4: "int32 uint32 float32",
        8: "int64 uint64 float64 complex64",
        16: "complex128",
    }.items()
    for name in names.split()
}
"""Bytes of one element, by dtype name."""

_AXES = ("tp", "pp", "dp")


@dataclass(frozen=True)
class TensorShards:
    """One tensor, and how the ranks of one side shard it.

    Attributes:
        name: Its name, the same on both sides.
        shape: Its full shape.
        dtype: Name of its element type, such as ``"bfloat16"``.
        dim: The dimension that is cut across tensor-parallel ranks. ``None``: every rank has the whole tensor.
        slices: (start, stop) along ``dim`` for each tensor-parallel rank. Empty: equal parts. Ranks may hold the
            same slice, slices may overlap, and a rank may hold nothing.
        stage: The pipeline stage that holds it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dim: int | None = None
    slices: tuple[Interval, ...] = ()
    stage: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "slices", tuple((start, stop) for start, stop in self.slices))


@dataclass(frozen=True)
class Sharding:
    """One side: its tensors, its parallel sizes, and where its ranks are.

    Attributes:
        tensors: The tensors that it holds.
        tp: Tensor-parallel size.
        pp: Pipeline stages.
        dp: Number of replicas.
        order: The axes of a rank number, from the fastest varying to the slowest. Megatron uses ``"tp-dp-pp"``,
            engines use ``"tp-pp-dp"``.
        locations: (node rank, accelerator on the node) of each rank, or (node rank, -1) for a
            process without one. Empty: unknown; every distance counts as network.
        reachable: For each rank, the accelerators of its node that it can map, beside its own. Empty: none.
    """

    tensors: tuple[TensorShards, ...]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    order: str = "tp-dp-pp"
    locations: tuple[Location, ...] = ()
    reachable: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        object.__setattr__(self, "locations", tuple((node, local) for node, local in self.locations))
        object.__setattr__(self, "reachable", tuple(map(tuple, self.reachable)))

    @property
    def world_size(self) -> int:
        """Number of its ranks."""
        return self.tp * self.pp * self.dp

    def rank_of(self, tp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """Return the rank with these coordinates.

        Raises:
            PlacementError: If a coordinate is out of range (S109).
        """
        at = {"tp": tp, "pp": pp, "dp": dp}
        for axis, index in at.items():
            if not 0 <= index < getattr(self, axis):
                raise PlacementError([Finding("S109", f"{axis} is {getattr(self, axis)}: there is no {axis} {index}")])
        return sum(at[axis] * stride for axis, stride in self._strides.items())

    def replicas(self, tp: int, pp: int) -> range:
        """Return the ranks that hold the same data, one for each replica."""
        first, step = self.rank_of(tp, pp), self._strides["dp"]
        return range(first, first + step * self.dp, step)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return tp, pp and dp of a rank; the inverse of :meth:`rank_of`.

        Raises:
            PlacementError: If there is no such rank (S109).
        """
        if not 0 <= rank < self.world_size:
            message = f"there are {counted(self.world_size, 'rank')}, and no rank {rank}"
            raise PlacementError([Finding("S109", message)])
        tp, pp, dp = (rank // self._strides[axis] % getattr(self, axis) for axis in _AXES)
        return tp, pp, dp

    def gathered(self, size: int) -> Sharding:
        """Return this side after an all-gather within groups of ``size`` consecutive tensor-parallel ranks.

        Raises:
            PlacementError: If ``size`` does not divide ``tp``, or the slices of a group are not contiguous (S109).
        """
        findings = list(check_side(self, "source"))
        if not findings and (not _is_size(size) or self.tp % size):
            fits = ", ".join(str(n) for n in range(1, self.tp + 1) if self.tp % n == 0)
            message = f"{self.tp} tensor-parallel ranks cannot gather in groups of {shown(size)}"
            findings.append(Finding("S109", message, rule="the group divides tp", fixes=(Fix("one of", fits),)))
        if findings:
            raise PlacementError(findings)
        merged: dict[tuple[Interval, ...], tuple[Interval, ...] | None] = {}
        tensors = []
        for tensor in self.tensors:
            if tensor.dim is not None:
                intervals = intervals_of(tensor, self.tp)
                if intervals not in merged:
                    merged[intervals] = _merge(intervals, size)
                if (slices := merged[intervals]) is None:
                    message = f"{tensor.name}: parts of a group of {size} ranks are not contiguous: {shown(intervals)}"
                    findings.append(Finding("S109", message, rule="the slices that a group gathers are contiguous"))
                    continue
                tensor = replace(tensor, slices=slices)
            tensors.append(tensor)
        if findings:
            raise PlacementError(findings)
        return replace(self, tensors=tuple(tensors))

    @cached_property
    def _strides(self) -> dict[str, int]:
        """By how much the rank grows with each axis."""
        strides, stride = {}, 1
        for axis in self.order.split("-"):
            strides[axis] = stride
            stride *= int(getattr(self, axis))
        return strides


def intervals_of(tensor: TensorShards, tp: int) -> tuple[Interval, ...]:
    """Return the interval along the cut dimension that each tensor-parallel rank holds."""
    if tensor.slices or tensor.dim is None:
        return tensor.slices
    part = tensor.shape[tensor.dim] // tp
    return tuple((i * part, (i + 1) * part) for i in range(tp))


def _merge(intervals: tuple[Interval, ...], size: int) -> tuple[Interval, ...] | None:
    """Return one slice for each rank after a gather in groups; ``None`` if a slice would have a hole."""
    merged: list[Interval] = []
    for first in range(0, len(intervals), size):
        group = [interval for interval in intervals[first : first + size] if interval[0] < interval[1]] or [(0, 0)]
        whole = (min(start for start, _ in group), max(stop for _, stop in group))
        if next(_holes(group, *whole), None):
            return None
        merged += [whole] * size
    return tuple(merged)


def _holes(intervals: Iterable[Interval], start: int, stop: int) -> Iterator[Interval]:
    """Yield the parts of start … stop that no interval covers."""
    for first, last in sorted(intervals):
        if first >= last:
            continue
        if first > start:
            yield start, min(first, stop)
        start = max(start, last)
        if start >= stop:
            return
    if start < stop:
        yield start, stop


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_side(side: Sharding, word: str) -> Iterator[Finding]:
    """Yield a finding for everything that is wrong with one side.

    Args:
        side: The side.
        word: ``"source"`` or ``"target"``, for the messages. Only a source must cover its tensors completely.
    """
    sizes = {axis: getattr(side, axis) for axis in _AXES}
    wrong = [axis for axis, size in sizes.items() if not _is_size(size)]
    for axis in wrong:
        yield Finding("S109", f"{word}: {axis} is {shown(sizes[axis])}", rule="sizes are integers from 1 up")
    if sorted(side.order.split("-")) != sorted(_AXES):
        fixes = (Fix("a trainer", "tp-dp-pp"), Fix("engines", "tp-pp-dp"))
        yield Finding("S109", f"{word}: {side.order!r} is not an order of tp, pp and dp", fixes=fixes)
    if wrong:
        return
    if side.locations and len(side.locations) != side.world_size:
        product = f"tp {side.tp} x pp {side.pp} x dp {side.dp}"
        message = (
            f"{word}: {counted(len(side.locations), 'location')} for {counted(side.world_size, 'rank')} ({product})"
        )
        yield Finding("S108", message, rule="one location per rank, or none at all")
    if side.reachable and len(side.reachable) != len(side.locations):
        message = f"{word}: {counted(len(side.reachable), 'entry')} of reachable for {counted(side.world_size, 'rank')}"
        yield Finding("S108", message, rule="one entry and one location per rank, or no entries at all")
    seen: set[str] = set()
    for tensor in side.tensors:
        if tensor.name in seen:
            yield Finding("S110", f"{word}: there are two tensors {tensor.name!r}", rule="names of tensors are unique")
        seen.add(tensor.name)
        yield from _check_tensor(tensor, side, word)


def _check_tensor(tensor: TensorShards, side: Sharding, word: str) -> Iterator[Finding]:
    at = f"{word}: {tensor.name}"
    if tensor.dtype not in ITEM_BYTES:
        rule = "dtypes: " + ", ".join(ITEM_BYTES)
        yield Finding("S104", f"{at}: unknown dtype {shown(tensor.dtype)}", rule=rule)
    if not 0 <= tensor.stage < side.pp:
        message = f"{at}: it is on stage {tensor.stage} of {counted(side.pp, 'pipeline stage')}"
        yield Finding("S109", message, rule="stages count from 0 to pp - 1")
    if any(extent < 0 for extent in tensor.shape):
        yield Finding("S107", f"{at}: {tensor.shape} is not a shape")
        return
    if tensor.dim is None:
        if tensor.slices:
            message = f"{at}: it has slices, but no dimension that is cut"
            yield Finding("S107", message, fixes=(Fix("name the dimension", "dim=0"),))
        return
    if not 0 <= tensor.dim < len(tensor.shape):
        message = f"{at}: {tensor.shape} has no dimension {tensor.dim}"
        yield Finding("S107", message, rule="dimensions count from 0")
        return
    extent = tensor.shape[tensor.dim]
    if not tensor.slices:
        if extent % side.tp:
            message = f"{at}: dimension {tensor.dim} of {tensor.shape} cannot be cut into {side.tp} equal parts"
            fixes = (Fix("give the slice of each rank", "slices=((0, …), …)"),)
            yield Finding("S106", message, rule="tp divides the dimension, or slices are given", fixes=fixes)
        return
    if len(tensor.slices) != side.tp:
        message = f"{at}: {counted(len(tensor.slices), 'slice')} for {counted(side.tp, 'tensor-parallel rank')}"
        yield Finding("S107", message, rule="one slice per tensor-parallel rank")
        return
    bad = [
        f"{interval} of tp {i}"
        for i, interval in enumerate(tensor.slices)
        if not 0 <= interval[0] <= interval[1] <= extent
    ]
    if bad:
        message = f"{at}: outside of 0 to {extent}, or reversed: {', '.join(bad[:4])}{', …' if len(bad) > 4 else ''}"
        yield Finding("S107", message, rule="a slice is (start, stop) inside its dimension")
    elif word == "source":
        holes = ", ".join(f"{start} to {stop}" for start, stop in _holes(tensor.slices, 0, extent))
        if holes:
            message = f"{at}: no rank holds {holes} of dimension {tensor.dim} (0 to {extent})"
            yield Finding("S105", message, rule="the source's slices cover the whole tensor")

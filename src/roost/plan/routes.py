"""Choose the sender for each receiver: the nearest rank that holds what it needs; equally near ranks take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from roost.plan.shards import Location, Sharding

__all__ = ["DISTANCES", "Distance", "Route", "SenderSelector"]

Distance = Literal["same", "node", "network"]
"""On the same accelerator, on the same node, or between nodes."""

DISTANCES: tuple[Distance, ...] = ("same", "node", "network")

_PERIODS = (1, 2, 4, 8, 16, 32, 64)
"""Periods in which regular placements repeat. Other placements need a few more routes."""

_Key = TypeVar("_Key", int, Location)

_Replica = tuple[int, int]
"""Tensor-parallel rank and replica of a rank whose pipeline stage is known from the context."""


@dataclass(frozen=True)
class Route:
    """An arithmetic series of replicas of the target, and the replicas of the source that send to them.

    Target replicas ``start, start + step, …`` (below ``stop``) receive from source replicas
    ``source, source + source_step, …``. With a ``source_step`` of 0, one source replica sends to all of them.
    """

    start: int
    stop: int
    step: int
    source: int
    source_step: int
    distance: Distance

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def targets(self) -> range:
        """The target replicas."""
        return range(self.start, self.stop, self.step)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (target replica, source replica) for each target replica."""
        for i, target in enumerate(self.targets):
            yield target, self.source + i * self.source_step

    def source_of(self, target: int) -> int | None:
        """Return the source replica that sends to a target replica; ``None`` if the replica is not on this route."""
        if target not in self.targets:
            return None
        return self.source + (target - self.start) // self.step * self.source_step

    def targets_of(self, source: int) -> range:
        """Return the target replicas that a source replica sends to on this route."""
        if self.source_step == 0:
            return self.targets if source == self.source else range(0)
        i, rest = divmod(source - self.source, self.source_step)
        return self.targets[i : i + 1] if rest == 0 and i >= 0 else range(0)


class _Pool:
    """Ranks at the same distance, which take turns."""

    def __init__(self) -> None:
        self.members: list[_Replica] = []
        self._turn = 0

    def take(self) -> _Replica:
        self._turn += 1
        return self.members[(self._turn - 1) % len(self.members)]


class _Holders:
    """All ranks that hold the same data, by place."""

    def __init__(self, source: Sharding, tps: Sequence[int], stage: int) -> None:
        self.anywhere = _Pool()
        self.on_node: dict[int, _Pool] = {}
        self.on_accelerator: dict[Location, _Pool] = {}
        self.anywhere.members = [(tp, dp) for dp in range(source.dp) for tp in tps]
        if not source.locations:
            return
        ranks = {tp: source.replicas(tp, stage) for tp in tps}
        for member in self.anywhere.members:
            location = source.locations[ranks[member[0]][member[1]]]
            _add(self.on_node, location[0], member)
            if location[1] >= 0:
                _add(self.on_accelerator, location, member)

    def nearest(self, location: Location | None, reachable: Sequence[int] = ()) -> tuple[_Pool, Distance]:
        if location is not None:
            for accelerator in (location[1], *reachable):
                if (location[0], accelerator) in self.on_accelerator:
                    return self.on_accelerator[location[0], accelerator], "same"
            if location[0] in self.on_node:
                return self.on_node[location[0]], "node"
        return self.anywhere, "network"


def _add(pools: dict[_Key, _Pool], key: _Key, member: _Replica) -> None:
    pool = pools.get(key)
    if pool is None:
        pool = pools[key] = _Pool()
    pool.members.append(member)


class SenderSelector:
    """Selects the nearest sender for each rank of the target.

    Equally near senders take turns over all target ranks, across their tensor-parallel ranks and stages. The result
    therefore depends on the order of the calls.
    """

    def __init__(self, source: Sharding, target: Sharding) -> None:
        self._source = source
        self._target = target
        self._holders: dict[tuple[tuple[int, ...], int], _Holders] = {}

    def routes(
        self, tps: tuple[int, ...], stage: int, target_tp: int, target_stage: int
    ) -> tuple[tuple[int, tuple[Route, ...]], ...]:
        """Return the routes to all replicas of a target rank, by tensor-parallel rank of the source.

        Args:
            tps: Tensor-parallel ranks of the source that hold the data.
            stage: Their pipeline stage.
            target_tp: Tensor-parallel rank of the target.
            target_stage: Its pipeline stage.
        """
        holders = self._holders.get((tps, stage))
        if holders is None:
            holders = self._holders[tps, stage] = _Holders(self._source, tps, stage)
        target = self._target
        chosen: dict[int, dict[Distance, list[tuple[int, int]]]] = {}
        for dp, rank in enumerate(target.replicas(target_tp, target_stage)):
            location = target.locations[rank] if target.locations else None
            pool, distance = holders.nearest(location, target.reachable[rank] if target.reachable else ())
            source_tp, source_dp = pool.take()
            chosen.setdefault(source_tp, {}).setdefault(distance, []).append((dp, source_dp))
        return tuple(
            (
                tp,
                tuple(
                    route
                    for distance in DISTANCES
                    if distance in by_distance
                    for route in self._compress(by_distance[distance], distance)
                ),
            )
            for tp, by_distance in sorted(chosen.items())
        )

    def _compress(self, pairs: list[tuple[int, int]], distance: Distance) -> list[Route]:
        """Return routes for (target, source) pairs: the fewest among the periods that are tried."""
        best = _series(pairs, distance)
        for period in (*_PERIODS[1:], self._source.dp):
            if len(best) <= period:
                continue
            phases: dict[int, list[tuple[int, int]]] = {}
            for pair in pairs:
                phases.setdefault(pair[0] % period, []).append(pair)
            found = [route for phase in phases.values() for route in _series(phase, distance)]
            best = min(best, found, key=len)
        return best


def _series(pairs: list[tuple[int, int]], distance: Distance) -> list[Route]:
    """Return the pairs as arithmetic series, each extended as far as possible."""
    routes = []
    first = 0
    while first < len(pairs):
        (start, source), last = pairs[first], first
        step, source_step = 1, 0
        if first + 1 < len(pairs):
            step, source_step = pairs[first + 1][0] - start, pairs[first + 1][1] - source
            expected = (start + step, source + source_step)
            while last + 1 < len(pairs) and pairs[last + 1] == expected:
                last += 1
                expected = (expected[0] + step, expected[1] + source_step)
        routes.append(Route(start, pairs[last][0] + 1, step, source, source_step, distance))
        first = last + 1
    return routes

"""Who of several ranks that hold the same thing sends it to whom: the nearest, in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from roost.plan.shards import Location, Sharding

__all__ = ["LINKS", "Link", "Route", "Router"]

Link = Literal["same", "node", "network"]
"""On the same accelerator, between those of a node, or between nodes."""

LINKS: tuple[Link, ...] = ("same", "node", "network")

_PERIODS = (1, 2, 4, 8, 16, 32, 64)
"""Patterns that the replicas of regular placements have; others cost a few more routes."""

_Key = TypeVar("_Key", int, Location)

Rank = tuple[int, int]
"""tp and dp; the stage is known where this is used."""


@dataclass(frozen=True)
class Route:
    """From which replicas of the source which replicas of the destination are served.

    Destination replicas ``start, start + step, …`` (below ``stop``) are served by source replicas
    ``source, source + source_step, …``; a ``source_step`` of 0 is one replica that serves them all.
    """

    start: int
    stop: int
    step: int
    source: int
    source_step: int
    link: Link

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def targets(self) -> range:
        """The destination replicas."""
        return range(self.start, self.stop, self.step)

    def pairs(self) -> Iterator[Rank]:
        """(destination replica, source replica) of each."""
        for i, target in enumerate(self.targets):
            yield target, self.source + i * self.source_step

    def source_of(self, target: int) -> int | None:
        """The replica that serves one of the destination; ``None`` where this route does not."""
        if target not in self.targets:
            return None
        return self.source + (target - self.start) // self.step * self.source_step

    def targets_of(self, source: int) -> range:
        """The destination replicas that a replica of the source serves on this route."""
        if self.source_step == 0:
            return self.targets if source == self.source else range(0)
        i, rest = divmod(source - self.source, self.source_step)
        return self.targets[i : i + 1] if rest == 0 and i >= 0 else range(0)


class _Pool:
    """Ranks that are equally good; they take turns."""

    def __init__(self) -> None:
        self.members: list[Rank] = []
        self._turn = 0

    def take(self) -> Rank:
        self._turn += 1
        return self.members[(self._turn - 1) % len(self.members)]


class _Reach:
    """All ranks that hold one thing, by where they are."""

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
            _put(self.on_node, location[0], member)
            if location[1] >= 0:
                _put(self.on_accelerator, location, member)

    def nearest(self, location: Location | None, reachable: Sequence[int] = ()) -> tuple[_Pool, Link]:
        if location is not None:
            for accelerator in (location[1], *reachable):
                if (location[0], accelerator) in self.on_accelerator:
                    return self.on_accelerator[location[0], accelerator], "same"
            if location[0] in self.on_node:
                return self.on_node[location[0]], "node"
        return self.anywhere, "network"


def _put(pools: dict[_Key, _Pool], key: _Key, member: Rank) -> None:
    pool = pools.get(key)
    if pool is None:
        pool = pools[key] = _Pool()
    pool.members.append(member)


class Router:
    """Gives each destination rank the nearest rank that holds what it needs.

    Those that are equally near take turns over all destinations, whatever tensor-parallel rank
    and stage these have. What it answers depends on the order in which it is asked.
    """

    def __init__(self, source: Sharding, target: Sharding) -> None:
        self._source = source
        self._target = target
        self._reach: dict[tuple[tuple[int, ...], int], _Reach] = {}

    def routes(
        self, tps: tuple[int, ...], stage: int, target_tp: int, target_stage: int
    ) -> tuple[tuple[int, tuple[Route, ...]], ...]:
        """The routes to all replicas of a destination, by tensor-parallel rank of the source.

        Args:
            tps: Tensor-parallel ranks that hold what is needed.
            stage: Their pipeline stage.
            target_tp: Tensor-parallel rank of the destination.
            target_stage: Its pipeline stage.
        """
        reach = self._reach.get((tps, stage))
        if reach is None:
            reach = self._reach[tps, stage] = _Reach(self._source, tps, stage)
        target = self._target
        chosen: dict[int, dict[Link, list[Rank]]] = {}
        for dp, rank in enumerate(target.replicas(target_tp, target_stage)):
            location = target.locations[rank] if target.locations else None
            pool, link = reach.nearest(location, target.reachable[rank] if target.reachable else ())
            source_tp, source_dp = pool.take()
            chosen.setdefault(source_tp, {}).setdefault(link, []).append((dp, source_dp))
        return tuple(
            (tp, tuple(route for link in LINKS if link in by_link for route in self._compress(by_link[link], link)))
            for tp, by_link in sorted(chosen.items())
        )

    def _compress(self, pairs: list[Rank], link: Link) -> list[Route]:
        """The pairs (destination, source) as few arithmetic series."""
        best = _series(pairs, link)
        for period in (*_PERIODS[1:], self._source.dp):
            if len(best) <= period:
                continue
            phases: dict[int, list[Rank]] = {}
            for pair in pairs:
                phases.setdefault(pair[0] % period, []).append(pair)
            found = [route for phase in phases.values() for route in _series(phase, link)]
            best = min(best, found, key=len)
        return best


def _series(pairs: list[Rank], link: Link) -> list[Route]:
    """The pairs as arithmetic series, each as long as it goes."""
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
        routes.append(Route(start, pairs[last][0] + 1, step, source, source_step, link))
        first = last + 1
    return routes

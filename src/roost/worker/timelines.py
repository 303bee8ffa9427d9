"""The calls of all ranks of all jobs, by one clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from roost.plan.states import Call, RankTimeline
from roost.worker.watch import WatchedJob, WatchedRank, Watcher

__all__ = ["collect_timelines"]

CLOCK_ROUNDS = 5
CLOCK_TIMEOUT_S = 2.0
CLOCK_TRIES = 3
"""How many ranks of a node are asked for its clock before it counts as silent."""


def collect_timelines(last_s: float, timeout_s: float = 30.0) -> tuple[list[RankTimeline], list[str]]:
    """The calls of the last seconds of every rank, and the ranks that did not answer, as ``group[rank]``.

    Times are those of this process's clock: the clock of each node is asked for, and how far it was off in
    the middle of the quickest round trip is taken off.
    """
    jobs = Watcher().refresh()
    timelines: list[RankTimeline] = []
    silent: list[str] = []
    for job in jobs:
        asked = _ask(job, last_s)
        offsets = _clock_offsets([rank for _, rank, ref in asked if ref is not None])
        refs = [ref for _, _, ref in asked if ref is not None]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()
        for group, rank, ref in asked:
            answer = _answer(ref) if ref in ready else None
            if answer is None:
                silent.append(f"{group}[{rank.last.rank}]")
                continue
            offset = offsets.get(rank.last.node_rank, 0.0)
            timelines.append(_timeline(job.namespace, group, rank, answer, offset))
    return timelines, silent


def _ask(job: WatchedJob, last_s: float) -> list[tuple[str, WatchedRank, Any]]:
    asked = []
    for group, (_, _, ranks) in job.groups.items():
        for rank in ranks:
            asked.append((group, rank, rank.handle.timeline.remote(last_s) if job.find(rank) else None))
    return asked


def _answer(ref: Any) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = ray.get(ref)
    except ray.exceptions.RayError:
        return None
    return answer


def _timeline(job: str, group: str, rank: WatchedRank, answer: dict[str, Any], offset_s: float) -> RankTimeline:
    calls = tuple(Call(name, start - offset_s, duration, error) for name, start, duration, error in answer["calls"])
    last = rank.last
    return RankTimeline(job, group, last.rank, last.node_rank, last.address, calls, bool(answer["lost"]), offset_s)


def _clock_offsets(ranks: Sequence[WatchedRank]) -> dict[int, float]:
    """How far the clock of each node is ahead of this process's, as far as its ranks answer."""
    by_node: dict[int, list[WatchedRank]] = {}
    for rank in ranks:
        by_node.setdefault(rank.last.node_rank, []).append(rank)
    offsets = {}
    for node, there in by_node.items():
        for rank in there[:CLOCK_TRIES]:
            offset = _clock_offset(rank.handle)
            if offset is not None:
                offsets[node] = offset
                break
    return offsets


def _clock_offset(handle: Any) -> float | None:
    quickest, offset = float("inf"), None
    for _ in range(CLOCK_ROUNDS):
        began = time.time()
        start = time.perf_counter()
        try:
            there = float(ray.get(handle.clock.remote(), timeout=CLOCK_TIMEOUT_S))
        except ray.exceptions.RayError:
            return offset
        trip = time.perf_counter() - start
        if trip < quickest:
            quickest, offset = trip, there - (began + trip / 2)
    return offset

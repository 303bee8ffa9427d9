"""Timelines: the recent calls of all ranks of all jobs, on the clock of this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray

from roost.plan.states import Call, RankTimeline
from roost.worker.watch import WatchedJob, WatchedRank, Watcher

__all__ = ["collect_timelines"]

logger = logging.getLogger("roost")

CLOCK_ROUNDS = 5
"""How often the clock of a node is read; the quickest round trip counts."""
CLOCK_TIMEOUT_S = 2.0
CLOCK_TRIES = 3
"""Number of ranks of a node that are asked for its clock until one answers."""


def collect_timelines(last_s: float, timeout_s: float = 30.0) -> tuple[list[RankTimeline], list[str]]:
    """Return the calls of every rank in the last seconds, and the names (``group[rank]``) of ranks that did not answer.

    Times are on this process's clock. The offset of a node's clock is measured in the middle of the quickest of
    :data:`CLOCK_ROUNDS` round trips, and subtracted.

    Args:
        last_s: Seconds to look back.
        timeout_s: Seconds to wait for the timelines.
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
            answer = _answer(ref) if ref is not None and ref in ready else None
            if answer is None:
                silent.append(f"{group}[{rank.last.rank}]")
                continue
            offset = offsets.get(rank.last.node_rank, 0.0)
            timelines.append(_timeline(job.namespace, group, rank, answer, offset))
    return timelines, silent


def _ask(job: WatchedJob, last_s: float) -> list[tuple[str, WatchedRank, Any]]:
    """Ask every rank for its timeline; return its group, the rank, and the reference (``None`` if it has no actor)."""
    asked = []
    for group, (_, _, ranks) in job.groups.items():
        for rank in ranks:
            asked.append((group, rank, rank.handle.timeline.remote(last_s) if job.find(rank) else None))
    return asked


def _answer(ref: ray.ObjectRef[Any]) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = ray.get(ref)
    except ray.exceptions.RayError as error:
        logger.debug("a rank did not give its timeline: %s", error)
        return None
    return answer


def _timeline(job: str, group: str, rank: WatchedRank, answer: dict[str, Any], offset_s: float) -> RankTimeline:
    calls = tuple(Call(name, start - offset_s, duration, error) for name, start, duration, error in answer["calls"])
    last = rank.last
    return RankTimeline(job, group, last.rank, last.node_rank, last.address, calls, bool(answer["lost"]), offset_s)


def _clock_offsets(ranks: Sequence[WatchedRank]) -> dict[int, float]:
    """Return the seconds by which the clock of each node is ahead of this process's; nodes that do not answer are left out."""
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
        except ray.exceptions.RayError as error:
            logger.debug("a rank did not give the clock of its node: %s", error)
            return offset
        trip = time.perf_counter() - start
        if trip < quickest:
            quickest, offset = trip, there - (began + trip / 2)
    return offset

"""Calls of ranks in the trace event format, which Perfetto and Chrome show.

A worker group is a process of the trace, and a rank is a thread. Events of a thread must be disjoint or nested, so
concurrent calls of a rank are spread over several threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from roost.errors import counted
from roost.plan.states import Call, RankTimeline

__all__ = ["trace_events"]

ROUNDING_US = 2
"""Calls that overlap by this many microseconds at most count as consecutive: times are rounded to microseconds."""


def trace_events(timelines: Sequence[RankTimeline]) -> dict[str, Any]:
    """Return the trace as plain data for JSON. Time 0 is the start of the first call, given in ``otherData``."""
    starts = [call.start_s for timeline in timelines for call in timeline.calls]
    first_s = min(starts, default=0.0)
    many_jobs = len({timeline.job for timeline in timelines}) > 1
    named: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    ordered = sorted(timelines, key=lambda timeline: (timeline.job, timeline.group, timeline.rank))
    for pid, ((job, group), found) in enumerate(groupby(ordered, key=lambda t: (t.job, t.group)), start=1):
        ranks = list(found)
        title = f"{job}: {group}" if many_jobs else group
        named.append(_metadata("process_name", pid, 0, {"name": title}))
        named.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        named.append(_metadata("process_labels", pid, 0, {"labels": counted(len(ranks), "rank")}))
        tid = 0
        for timeline in ranks:
            for number, lane in enumerate(_lanes(timeline.calls, first_s)):
                tid += 1
                name = f"{group}[{timeline.rank}] node {timeline.node_rank}" + (f" ({number + 1})" if number else "")
                named.append(_metadata("thread_name", pid, tid, {"name": name}))
                named.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
                events += [_event(call, timeline, start, end, pid, tid) for call, start, end in lane]
    events.sort(key=lambda event: (event["ts"], event["pid"], event["tid"]))
    offsets = {f"{t.job}: node {t.node_rank}": round(t.offset_s, 6) for t in ordered}
    return {
        "traceEvents": [*named, *events],
        "displayTimeUnit": "ms",
        "otherData": {"tool": "roost trace", "begins_at_unix_s": first_s, "clock_offsets_s": offsets},
    }


def _metadata(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _event(call: Call, timeline: RankTimeline, start: int, end: int, pid: int, tid: int) -> dict[str, Any]:
    is_ok = None if call.error is None else not call.error
    args: dict[str, Any] = {"rank": timeline.rank, "node": timeline.node_rank, "ok": is_ok}
    if timeline.address:
        args["address"] = timeline.address
    if call.error is None:
        args["running"] = True
    elif call.error:
        args["error"] = call.error
    event: dict[str, Any] = {
        "ph": "X", "cat": "call", "name": call.name, "ts": start, "dur": end - start, "pid": pid, "tid": tid, "args": args,
    }  # fmt: skip
    if call.error:
        event["cname"] = "terrible"
    return event


def _lanes(calls: Iterable[Call], first_s: float) -> list[list[tuple[Call, int, int]]]:
    """Return calls with start and end in microseconds, spread over as few lanes as possible without overlap.

    There is at least one lane, so that a rank without calls is shown too.
    """
    lanes: list[list[tuple[Call, int, int]]] = [[]]
    for call in sorted(calls, key=lambda call: call.start_s):
        start = max(0, round((call.start_s - first_s) * 1e6))
        end = start + max(0, round(call.duration_s * 1e6))
        lane = next((lane for lane in lanes if not lane or lane[-1][2] <= start + ROUNDING_US), None)
        if lane is None:
            lane = []
            lanes.append(lane)
        start = max(start, lane[-1][2]) if lane else start
        lane.append((call, start, max(start, end)))
    return lanes

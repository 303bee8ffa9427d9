"""Shared parts of the live views: the ranks on each accelerator, the worst ranks first, and their texts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roost.errors import printable
from roost.plan.states import STATES, AcceleratorStatus, JobStatus, RankStatus
from roost.ranks import format_ranks

__all__ = [
    "MARKS",
    "Member",
    "accelerators_of",
    "all_ranks",
    "crowds",
    "doing",
    "duration",
    "headline",
    "last_errors",
    "one_line",
    "tally",
    "usage_text",
    "worst_first",
]

MARKS = {"dead": "!", "silent": "?", "starting": "+", "busy": "*", "ready": ""}
"""The mark after a letter of the map, so that states differ without colours too."""

_WORST = {state: index for index, state in enumerate(STATES)}


def one_line(text: object) -> str:
    """Return text from a job in one line, with control characters spelled out."""
    return printable("".join(" " if c.isspace() else c for c in str(text)))


def duration(seconds: float) -> str:
    """Return such as ``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min`` or ``3 d 4 h``."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def doing(rank: RankStatus) -> str:
    """Return the state of a rank in words, with its call and for how long."""
    call = one_line(rank.call)
    if rank.state == "busy":
        others = f" and {rank.running - 1} more" if rank.running > 1 else ""
        return f"busy in {call}{others} for {duration(rank.since_s)}"
    if rank.state == "silent":
        was = f", was in {call}" if call else ""
        return f"silent for {duration(rank.since_s)}{was}"
    if rank.state == "dead":
        was = f", was in {call}" if call else ""
        return f"dead{was}" + (f": {one_line(rank.reason)}" if rank.reason else "")
    if rank.state == "starting" and rank.since_s:
        return f"starting for {duration(rank.since_s)}"
    return one_line(rank.state)


def accelerators_of(rank: RankStatus) -> str:
    """Return the accelerators of a rank, such as ``0-3``; ``-`` if it has none."""
    return format_ranks(rank.accelerators) if rank.accelerators else "-"


def usage_text(accelerator: AcceleratorStatus) -> str:
    """Return such as ``61.2 of 139.8 GiB, 97 % busy``; ``not known`` if the driver reports nothing."""
    if accelerator.used_gib is None or accelerator.memory_gib is None:
        return "not known"
    text = f"{accelerator.used_gib:.1f} of {accelerator.memory_gib:.1f} GiB"
    return text if accelerator.busy is None else f"{text}, {accelerator.busy:.0%} busy".replace("%", " %")


def headline(job: JobStatus) -> str:
    """Return the job's name, its nodes, its owner, and the time of this state."""
    owner = job.owner
    who = f"{owner.get('user', '?')} on {owner.get('host', '?')} since {owner.get('since', '?')}"
    seen = f", seen {time.strftime('%H:%M:%S', time.localtime(job.at))}" if job.at else ""
    return one_line(f"{job.namespace}: {job.machines}, {who}{seen}")


def tally(counts: dict[str, int]) -> str:
    """Return such as ``1 dead, 3 busy, 12 ready``."""
    return ", ".join(f"{count:,} {state}" for state, count in counts.items()) or "no ranks"


def all_ranks(job: JobStatus) -> Iterator[tuple[str, RankStatus]]:
    """Yield every rank, with the name of its worker group."""
    for group in job.groups:
        for rank in group.workers:
            yield group.name, rank


def worst_first(job: JobStatus) -> list[tuple[str, RankStatus]]:
    """Return all ranks by state, the worst first (see ``STATES``), and the longest in its state first."""
    return sorted(all_ranks(job), key=lambda pair: (_WORST.get(pair[1].state, 0), -pair[1].since_s))


def last_errors(job: JobStatus, limit: int) -> list[str]:
    """Return a line for the last error of each rank, the newest first, and a line if some are left out."""
    found = [(rank.last_error, name, rank.rank) for name, rank in all_ranks(job) if rank.last_error is not None]
    found.sort(key=lambda item: item[0].ago_s)
    lines = [
        f"{one_line(name)}[{rank}], {duration(error.ago_s)} ago in {one_line(error.call)}: {one_line(error.error)}"
        for error, name, rank in found[:limit]
    ]
    if len(found) > limit:
        lines.append(f"… and of {len(found) - limit:,} more ranks")
    return lines


@dataclass(frozen=True)
class Member:
    """The ranks of one worker group on one accelerator, or on one node without an accelerator."""

    group: str
    state: str
    count: int
    ranks: tuple[int, ...]


def crowds(job: JobStatus) -> dict[int, tuple[list[tuple[Member, ...]], tuple[Member, ...]]]:
    """Return by node rank the ranks on each accelerator, and the ranks without one.

    Several ranks of a group in one place have the worst of their states.
    """
    found: dict[int, dict[int, dict[str, list[RankStatus]]]] = {node.rank: {} for node in job.nodes}
    for name, rank in all_ranks(job):
        for place in rank.accelerators or (-1,):
            found.setdefault(rank.node_rank, {}).setdefault(place, {}).setdefault(name, []).append(rank)
    sizes = {node.rank: len(node.accelerators) for node in job.nodes}
    crowded = {}
    for node, places in found.items():
        size = max([sizes.get(node, 0), *(place + 1 for place in places)])
        cells = [_members(places.get(index, {})) for index in range(size)]
        crowded[node] = (cells, _members(places.get(-1, {})))
    return crowded


def _members(groups: dict[str, list[RankStatus]]) -> tuple[Member, ...]:
    return tuple(
        Member(name, _worst(ranks), len(ranks), tuple(r.rank for r in ranks)) for name, ranks in groups.items()
    )


def _worst(ranks: Sequence[RankStatus]) -> str:
    return min((rank.state for rank in ranks), key=lambda state: _WORST.get(state, 0))

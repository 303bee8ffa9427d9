"""What the parts of learning cost beside a floor, and where the time of a step goes."""

from __future__ import annotations

import gc
import io
import pickle
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.launching import Row
from benchmarks.routing import measure_router
from benchmarks.weights import measure_weights
from roost import Cluster, DataBuffer, Plan, Sample, SampleGroup
from roost.data.journaled_buffer import JournaledBuffer
from roost.testing import local_ray

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 20
MODES: dict[str, dict[str, Any]] = {
    "collocated": {"mode": "collocated"},
    "disaggregated": {"mode": "disaggregated"},
    "disaggregated, async": {"mode": "disaggregated", "async_training": True},
    "hybrid": {"mode": "hybrid", "rollout_num_gpus": 3},
}

REPEATS = 10
BATCH, BATCHES, SAMPLES, TOKENS = 64, 16, 8, 8
GROUPS_PER_S = 5_000
"""What the buffer must manage at least, in and out."""
JOURNAL_RATIO = 2.0
"""What a journal may cost at most, times the way through the buffer of another process."""

Batch = list[SampleGroup]
Trip = Callable[[Sequence[SampleGroup]], Batch]


def _batches() -> list[Batch]:
    def group(number: int) -> SampleGroup:
        samples = [
            Sample(list(range(TOKENS)), list(range(TOKENS)), [-0.5] * TOKENS, [3] * TOKENS, index, "stop", 1.0)
            for index in range(SAMPLES)
        ]
        return SampleGroup(f"group-{number}", {"prompt": number}, samples)

    return [[group(batch * BATCH + index) for index in range(BATCH)] for batch in range(BATCHES)]


def _through_nothing(groups: Sequence[SampleGroup]) -> Batch:
    return list(groups)


def _through_pickle(groups: Sequence[SampleGroup]) -> Batch:
    result: Batch = pickle.loads(pickle.dumps(groups, protocol=5))
    return result


def _buffered(batches: list[Batch], trip: Trip) -> None:
    buffer = DataBuffer(4 * BATCH)
    for batch in batches:
        buffer.put(trip(batch))
        taken = trip(buffer.take(BATCH))
        buffer.confirm([group.id for group in taken])


def _journaled(batches: list[Batch], trip: Trip) -> None:
    with tempfile.TemporaryDirectory() as folder:
        buffer = JournaledBuffer(4 * BATCH, f"{folder}/buffer.journal")
        for batch in batches:
            buffer.put(trip(batch))
            taken = trip(buffer.take(BATCH))
            buffer.confirm([group.id for group in taken])
        buffer.remove_journal()


def _queued(batches: list[Batch], trip: Trip) -> None:
    queue: deque[SampleGroup] = deque()
    for batch in batches:
        queue.extend(trip(batch))
        trip([queue.popleft() for _ in range(BATCH)])


def _best_s(runs: Sequence[Callable[[list[Batch], Trip], None]], batches: list[Batch], trip: Trip) -> list[float]:
    """Best seconds per batch of each run, measured in turn."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(REPEATS):
        for run, found in zip(runs, times, strict=True):
            gc.collect()
            start = time.perf_counter()
            run(batches, trip)
            found.append(time.perf_counter() - start)
    return [min(found) / BATCHES for found in times]


def measure_buffer() -> list[Row]:
    """Batches of 64 groups, put, taken and confirmed: as they are, and pickled on both ways, as between processes."""
    batches = _batches()
    rows = []
    for name, trip in (("put + take", _through_nothing), ("put + take, pickled both ways", _through_pickle)):
        plain_s, ours_s = _best_s((_queued, _buffered), batches, trip)
        per_s = BATCH / ours_s
        text = f"buffer: {name}, {BATCH} groups ({per_s:,.0f} groups/s)"
        rows.append(Row(text, ours_s, plain_s, f"≥ {GROUPS_PER_S:,} groups/s", per_s >= GROUPS_PER_S))
    without_s, with_s = _best_s((_buffered, _journaled), batches, _through_pickle)
    per_put_us = (with_s - without_s) / BATCH * 1e6
    text = f"buffer: the same with a journal ({per_put_us:,.0f} µs more per group put)"
    rows.append(Row(text, with_s, without_s, f"≤ {JOURNAL_RATIO:g}", with_s / without_s <= JOURNAL_RATIO))
    return rows


def measure_learning() -> list[Row]:
    """All comparisons."""
    return [*measure_buffer(), *measure_weights(), *measure_router()]


def measure_phases() -> dict[str, dict[str, float]]:
    """Mode of the GRPO example → milliseconds of each phase of a step; seconds of its start."""
    sys.path.insert(0, str(EXAMPLES))
    from grpo import loop

    found = {}
    for mode, layout in MODES.items():
        config = yaml.safe_load((EXAMPLES / "grpo.yaml").read_text(encoding="utf-8"))
        config["cluster"]["layout"].update(layout)
        config["grpo"]["steps"] = STEPS
        with local_ray("2x2"), Cluster(num_nodes=2) as cluster:
            plan = Plan.resolve(config, cluster)
            record = loop.learn(cluster, plan, loop.Settings.read(config), Console(file=io.StringIO()))
        seconds = dict(record.seconds)
        found[mode] = {"start": seconds.pop("start"), **{name: 1000 * s / STEPS for name, s in seconds.items()}}
    return found

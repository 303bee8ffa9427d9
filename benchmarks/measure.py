"""Time, growth, the floor, and peak memory."""

from __future__ import annotations

import gc
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import CASES, Run

ENOUGH_S = 0.5
"""A case is repeated until it has been measured for so long, and at least three times."""


def sizes_up_to(largest: int) -> list[int]:
    """8, 64, 512, … and the largest."""
    sizes = [8]
    while sizes[-1] * 8 < largest:
        sizes.append(sizes[-1] * 8)
    return sizes if largest <= 8 else [*sizes, largest]


def best_time_s(run: Run) -> float:
    """The shortest of several runs, with the garbage collector on as in real life."""
    times: list[float] = []
    gc.collect()
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < ENOUGH_S:
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
        del result
    return min(times)


def growth_exponent(sizes: Sequence[int], times: Sequence[float]) -> float | None:
    """The least-squares slope of log time over log size, for the three largest sizes."""
    points = [(math.log(n), math.log(t)) for n, t in zip(sizes, times, strict=True)][-3:]
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def peak_mib_in_child(case: str, accelerators: int) -> float:
    """Peak resident memory of a process of its own that does nothing but run a case once.

    Everything counts: interpreter, imports, topology, and the result while it is alive.
    """
    command = [sys.executable, "-m", "benchmarks", "--child", case, str(accelerators)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def run_once_and_print_peak(case: str, accelerators: int) -> None:
    """What the child does."""
    result = CASES[case].prepare(accelerators)()
    print(_peak_mib())
    del result


def _peak_mib() -> float:
    # Not ru_maxrss where it can be avoided: on Linux that begins with the parent's size.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024

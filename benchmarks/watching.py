"""What ``roost status --watch`` costs the job that it watches."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil
import ray

import roost
from benchmarks.launching import Pinged, Row
from roost.testing import local_ray

WORKERS = 8
REPEATS = 3
WINDOW_S = 12.0
MAX_SHARE = 0.01


def measure_watching() -> list[Row]:
    """CPU seconds per second of all workers and managers of an idle job, watched once a second and not watched."""
    with local_ray("1x8") as machines, roost.Cluster(num_nodes=1) as cluster:
        strategy = roost.PackedPlacementStrategy(0, WORKERS - 1)
        with Pinged.create_group().launch(cluster, strategy) as group:
            binding = group.binding
            pids = [found.pid for found in binding.attestations] if binding is not None else []
            pids.append(ray.get(cluster.managers.__ray_call__.remote(lambda _: os.getpid())))
            processes = [psutil.Process(pid) for pid in pids]
            time.sleep(3)
            plain, watched = [], []
            for _ in range(REPEATS):  # in turn: Ray's own idling differs from minute to minute
                plain.append(_busy_share(processes))
                watched.append(_watched_share(processes, machines.address))
    with_it, without = statistics.median(watched), statistics.median(plain)
    expected, is_met = f"< {MAX_SHARE:.0%} of a core more", with_it - without < MAX_SHARE
    return [Row(f"status --watch of {WORKERS} workers, CPU per s", with_it, without, expected, is_met)]


def _watched_share(processes: Sequence[psutil.Process], address: str) -> float:
    command = [sys.executable, "-m", "roost", "status", "--watch", "--address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as watching:
        if watching.stdout is not None:
            watching.stdout.readline()  # its first frame: it has joined, and found everybody
        share = _busy_share(processes)
        watching.terminate()
        watching.communicate()
    return share


def _busy_share(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds per second of processes, over a while."""
    before, start = _cpu_s(processes), time.perf_counter()
    time.sleep(WINDOW_S)
    return (_cpu_s(processes) - before) / (time.perf_counter() - start)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)

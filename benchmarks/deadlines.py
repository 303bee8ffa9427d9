"""By how much operations exceed their deadlines while an engine or a worker is stopped: ``python -m benchmarks.deadlines``."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

import roost
from roost.engines.handles import EngineHandle
from roost.rl.rollout import STOP_S
from roost.testing import local_ray

WORDS = 32
LIMIT_S = 0.5
JOB = {"cluster": {"num_nodes": 1, "component_placement": {"actor": "0", "rollout": "1-2"}}}


@dataclass(frozen=True)
class Overrun:
    """One operation: its deadline, how long it took, and how it ended."""

    name: str
    deadline_s: float
    took_s: float
    error: str


class Speaker(torch.nn.Module):
    """A language model that looks at one token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 8)
        self.head = torch.nn.Linear(8, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(ids))
        return logits


class Trainer(roost.TrainWorker):
    """Has the same model."""

    def init(self) -> None:
        self.model = Speaker()


class Idle(roost.Worker):
    """Answers."""

    def pid(self) -> int:
        return os.getpid()


def measure_deadlines() -> list[Overrun]:
    """Stop a worker, then an engine, and call what has to do with them."""
    with local_ray("1x4") as _, roost.Cluster(num_nodes=1) as cluster:
        return [*_of_workers(cluster), *_of_rollout(cluster)]


def _of_workers(cluster: roost.Cluster) -> list[Overrun]:
    group = Idle.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 1), name="idle")
    pids = group.pid().wait()
    os.kill(pids[1], signal.SIGSTOP)
    try:
        return [
            _measured("wait(timeout_s=3)", 3.0, lambda: group.pid().wait(timeout_s=3)),
            _measured("WorkerGroup.close()", 0.0, group.close),
        ]
    finally:
        _kill(pids[1])


def _of_rollout(cluster: roost.Cluster) -> list[Overrun]:
    plan = roost.Plan.resolve(JOB, cluster)
    engine = functools.partial(roost.TorchEngine, Speaker, context=64)
    rollout = roost.RolloutManager(cluster, plan, engine, sync_timeout_s=8.0, silence_limit_s=600.0)
    with roost.TrainGroup(cluster, Trainer, plan) as train:
        train.init()
        train.connect(rollout)
        train.update_weights()
        victim = rollout.engines[1]
        assert isinstance(victim, EngineHandle)
        pid = victim.group.states([victim.first])[0]["pid"]
        groups = [roost.SampleGroup(f"g{n}", {"seed": n}, [roost.Sample([n])]) for n in range(8)]
        generate = functools.partial(rollout.generate, groups, {"max_new_tokens": 4})
        os.kill(pid, signal.SIGSTOP)
        try:
            return [
                _measured("generate(timeout_s=5)", 5.0, lambda: generate(timeout_s=5.0)),
                _measured('update_weights("wait")', 8.0, lambda: train.update_weights("wait")),
                _measured('update_weights("abort")', 8.0, lambda: train.update_weights("abort")),
                _measured("pause(timeout_s=3)", 3.0, lambda: rollout.pause(timeout_s=3.0)),
                _measured("RolloutManager.close()", STOP_S, rollout.close),
            ]
        finally:
            _kill(pid)
            rollout.close()


def _measured(name: str, deadline_s: float, call: Callable[[], object]) -> Overrun:
    start, error = time.perf_counter(), ""
    try:
        call()
    except roost.RoostError as raised:
        error = f"{type(raised).__name__} {', '.join(raised.codes)}: {raised.findings[0].message}"
    return Overrun(name, deadline_s, time.perf_counter() - start, error)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    table = Table("operation", "deadline", "took", "over by", "error", title="One process is stopped by SIGSTOP")
    for row in measure_deadlines():
        over_s = row.took_s - row.deadline_s
        shown = f"{max(0.0, over_s):.2f} s" + (f" (> {LIMIT_S:g})" if over_s > LIMIT_S else "")
        table.add_row(row.name, f"{row.deadline_s:g} s", f"{row.took_s:.2f} s", shown, row.error)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

"""How long a person waits for ``roost plan``, beside what its imports alone would cost."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = "examples/collocated.yaml"
RUNS = 11
MAX_RATIO = 3.0

IMPORTS = [sys.executable, "-c", "import yaml, rich"]
PLAN = [sys.executable, "-m", "roost", "plan", EXAMPLE, "--cluster", "2x8"]


@dataclass(frozen=True)
class Startup:
    """Medians of interleaved runs; ``problem`` says why there are none."""

    imports_s: float = 0.0
    plan_s: float = 0.0
    problem: str = ""


def measure_startup() -> Startup:
    """Runs both commands in turn, so that a busy machine slows both."""
    for command in (IMPORTS, PLAN):  # once before, so that byte code is written and files are in memory
        done = _run(command)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return Startup(problem=f"{' '.join(command[1:])}: {lines[-1]}")
    times: dict[str, list[float]] = {"imports": [], "plan": []}
    for _ in range(RUNS):
        for name, command in (("imports", IMPORTS), ("plan", PLAN)):
            start = time.perf_counter()
            _run(command)
            times[name].append(time.perf_counter() - start)
    return Startup(statistics.median(times["imports"]), statistics.median(times["plan"]))


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # pytest and friends switch byte code off for their children, which would measure the compiler.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

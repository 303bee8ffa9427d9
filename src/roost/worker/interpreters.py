"""What must be set before the process of a worker starts: its interpreter, and variables that the loader reads."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

import ray

from roost.plan import Process

__all__ = ["interpreter_fault", "runtime_env_of"]

_BEFORE_START = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED")
"""Variables that must be set before the process starts. Ray starts the interpreter a second time for them."""


def runtime_env_of(process: Process) -> dict[str, Any]:
    """Return Ray's ``runtime_env`` of a worker; empty if it needs none."""
    env: dict[str, Any] = {}
    early = {key: value for key, value in process.environment.items() if key in _BEFORE_START}
    if early:
        env["env_vars"] = {
            key: f"{value}:${{{key}}}" if key != "PYTHONHASHSEED" else value for key, value in early.items()
        }
    if process.interpreter:
        env["py_executable"] = shlex.quote(process.interpreter)  # Ray starts it through a shell
    return env


def interpreter_fault(path: str) -> str:
    """Return why an interpreter of this node cannot run workers; empty if it can. Blocks for at most a minute."""
    if not os.access(path, os.X_OK) or os.path.isdir(path):
        return "does not exist, or is not executable"
    code = "import ray; print(ray.__version__)"
    try:
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not start: {error}"
    if done.returncode != 0:
        return f"cannot load Ray: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    found = done.stdout.split()[-1] if done.stdout.split() else "unknown"
    return "" if found == ray.__version__ else f"has Ray {found}, and the cluster has {ray.__version__}"

"""What runs on this machine, for tests that count what is left. A zombie counts as dead."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import ray

TIMEOUT_S = 240


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def alive(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if is_alive(pid)]


def wardens_of(workers: Iterable[int]) -> list[int]:
    """The processes that watch these workers."""
    wanted = {str(pid).encode() for pid in workers}
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"warden.py") for word in words) and wanted & set(words):
            found.append(int(name))
    return alive(found)


def ray_state() -> tuple[float, list[tuple[str, str]], int]:
    """What Ray counts: free GPUs, named actors, placement groups that hold something."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    groups = ray.util.placement_group_table().values()
    return (
        float(ray.available_resources().get("GPU", 0.0)),
        sorted((actor["namespace"], actor["name"]) for actor in actors),
        sum(group["state"] != "REMOVED" for group in groups),
    )


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)


def run_driver(
    script: str, folder: Path, namespace: str, *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a driver of its own on the Ray that RAY_ADDRESS names."""
    path = folder / "driver.py"
    path.write_text(script, encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(path), *arguments],
        env={**os.environ, "ROOST_NAMESPACE": namespace, **(variables or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

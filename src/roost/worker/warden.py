"""Ends the children of a worker when the worker is gone, however it went.

Runs as a small process of its own beside each worker (without Ray, without Roost): it remembers the
worker's descendants while it lives, and kills those that outlive it. A worker that is killed by
SIGKILL, or by the end of its job, cannot do that itself, and its engine processes would go on
holding the memory of their accelerators. It is no child of the worker: Ray kills those first.
"""

import contextlib
import os
import signal
import sys
import time

PERIOD_S = 0.5


def start_of(pid: int) -> str | None:
    """Start time of a process; ``None`` where it is gone, or only waits to be buried."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19] if fields[0] not in ("Z", "X") else None


def children_of(pid: int) -> list[int]:
    """The children of a process, of all its threads."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    except OSError:
        pass
    return found


def remember(root: int, known: dict[int, str]) -> None:
    """Adds all descendants of a process, and of those already known, with their start times."""
    todo = [root, *known]
    while todo:
        for child in children_of(todo.pop()):
            started = start_of(child)
            if child != os.getpid() and child not in known and started is not None:
                known[child] = started
                todo.append(child)


def bearers_of(marker: bytes) -> dict[int, str]:
    """Processes whose environment has a marker, with their start times."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    is_bearer = marker in file.read().split(b"\0")
            except OSError:
                continue
            started = start_of(int(name))
            if is_bearer and started is not None:
                found[int(name)] = started
    return found


def main(worker: int, marker: str) -> None:
    """Watches a process until it is gone; then ends what it left behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    born = start_of(worker)
    if os.fork():
        return
    known: dict[int, str] = {}
    while born is not None and start_of(worker) == born:
        remember(worker, known)
        time.sleep(PERIOD_S)
    known.update(bearers_of(f"ROOST_WORKER={marker}".encode()))
    for pid, started in known.items():
        if start_of(pid) == started:  # not a number that was given to somebody else since
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

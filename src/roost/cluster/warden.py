"""The warden: ends processes that must not outlive another process. It is a program of its own; see :mod:`guards`.

``warden.py worker PID MARKER RAYLET`` ends the worker PID when its raylet is gone. When the worker is gone, it ends the
worker's descendants and every process whose environment has ``ROOST_WORKER=MARKER``. A worker that is killed by
SIGKILL cannot do that itself, and its engine processes would go on holding the memory of their accelerators.

``warden.py driver PID FOLDER PACKAGE KEEP|REMOVE`` ends the Ray that the driver PID started, when the driver is gone:
children of the driver whose command names the session's FOLDER and Ray's PACKAGE, and their children. Ray's own agents
take about a minute to notice. With REMOVE, it removes the folder too.

The kernel gives the number of a process that has ended to another process. Therefore a process is known by its pid and
its start time here, and only a process with that start time is signalled.

It runs isolated, without Ray, Roost and other packages. It is no child of the process that it watches, since Ray kills
the children of a worker first.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping

PERIOD_S = 0.5
END_S = 10.0
"""Seconds to wait until killed processes have ended, before the folder is removed."""


def parent_and_start_of(pid: int) -> tuple[int, str] | None:
    """Return the parent and the start time of a process; ``None`` if it has ended, also if it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[1]), fields[19]) if fields[0] not in ("Z", "X") else None


def start_of(pid: int) -> str | None:
    """Return the start time of a process; ``None`` if it has ended, also if it is a zombie."""
    found = parent_and_start_of(pid)
    return found[1] if found else None


def children_of(pid: int, started: str) -> dict[int, str]:
    """Return the children of all threads of a process but this one, with their start times; empty if it has ended."""
    listed: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                listed += [int(word) for word in file.read().split()]
    except OSError:
        pass
    children = {}
    for child in listed:
        found = parent_and_start_of(child)
        if child != os.getpid() and found is not None and found[0] == pid:
            children[child] = found[1]
    # The process had this pid during all that was read above only if it still has it.
    return children if start_of(pid) == started else {}


def prune(known: dict[int, str]) -> None:
    """Remove the processes that have ended."""
    for pid, started in list(known.items()):
        if start_of(pid) != started:
            del known[pid]


def remember(pid: int, started: str, known: dict[int, str]) -> None:
    """Add all descendants of a process, and of the known processes, and remove known processes that have ended."""
    prune(known)
    todo = [(pid, started), *known.items()]
    while todo:
        for child, child_started in children_of(*todo.pop()).items():
            if known.get(child) != child_started:
                known[child] = child_started
                todo.append((child, child_started))


def bearers_of(marker: bytes) -> dict[int, str]:
    """Return the processes whose environment has a marker, with their start times."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            started = start_of(int(name))
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    is_bearer = marker in file.read().split(b"\0")
            except OSError:
                continue
            if is_bearer and started is not None and start_of(int(name)) == started:
                found[int(name)] = started
    return found


def end(known: Mapping[int, str]) -> None:
    """Kill processes; one whose pid belongs to another process by now is not touched."""
    for pid, started in known.items():
        handle = None
        with contextlib.suppress(AttributeError, OSError):  # kernels before 5.3 do not have it
            handle = os.pidfd_open(pid)
        try:
            if start_of(pid) != started:
                continue
            # The handle refers to the process whose start time was just read, so no other process can get the signal.
            if handle is not None:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
        finally:
            if handle is not None:
                os.close(handle)


def watch_worker(worker: int, marker: str, raylet: int) -> None:
    """Watch a worker until it or its raylet is gone; then end the worker and its descendants."""
    born, raylet_born = start_of(worker), start_of(raylet)
    known: dict[int, str] = {}
    if born is not None:
        remember(worker, born, known)  # before the fork: the parent of this process waits for that
    if os.fork():
        return
    while born is not None and start_of(worker) == born:
        remember(worker, born, known)
        if raylet_born is None or start_of(raylet) != raylet_born:
            end({worker: born})
            break
        time.sleep(PERIOD_S)
    known.update(bearers_of(f"ROOST_WORKER={marker}".encode()))
    end(known)


def watch_driver(driver: int, folder: str, package: str, removes: bool) -> None:
    """Watch a driver until it or its Ray is gone; then end the processes of that Ray that are left."""
    born = start_of(driver)
    known: dict[int, str] = {}

    def look() -> None:
        prune(known)
        for pid, started in children_of(driver, born or "").items():
            if _names(pid, folder, package):
                known[pid] = started
                known.update(children_of(pid, started))  # agents and workers of a raylet

    look()  # before the fork: the parent of this process waits until the Ray is watched
    if os.fork():
        return
    was_seen = bool(known)
    while born is not None and start_of(driver) == born:
        look()
        was_seen = was_seen or bool(known)
        has_ended = not os.path.isdir(folder) if removes else was_seen  # the driver has shut its Ray down
        if has_ended and not known:
            return
        time.sleep(PERIOD_S)
    end(known)  # what workers started is ended by the wardens of the workers
    if removes:
        deadline = time.monotonic() + END_S
        while known and time.monotonic() < deadline:
            time.sleep(0.05)
            prune(known)
        shutil.rmtree(folder, ignore_errors=True)


def _names(pid: int, *texts: str) -> bool:
    """Return whether the command of a process has all these texts."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return all(os.fsencode(text) in command for text in texts)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1] == "worker":
        watch_worker(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        watch_driver(int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5] == "REMOVE")

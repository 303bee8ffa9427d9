"""Processes of this node: their identity, their ancestors, and ending exactly the one that is meant."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

__all__ = ["ProcessFacts", "kill_if_same", "look_at", "raylet_of"]

SAME_S = 0.05
"""Largest difference of two readings of one process's start; the kernel counts starts in hundredths of a second."""


@dataclass(frozen=True)
class ProcessFacts:
    """A process, at one moment.

    Attributes:
        name: Its name, as the kernel has it.
        command: Its command line; empty if it is not readable.
        started: When it started, in seconds after the boot of its node. Tells it from a later process with its pid.
        is_alive: Whether it runs and has not begun to end.
    """

    name: str
    command: str
    started: float
    is_alive: bool

    def is_same(self, started: float) -> bool:
        """Return whether this is the process with a pid that started then."""
        return abs(self.started - started) <= SAME_S


def look_at(pid: int) -> ProcessFacts | None:
    """Return the facts of a process; ``None`` if there is none that is visible from here."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            started = _started(process)
            has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            try:
                words = process.cmdline()
            except psutil.AccessDenied:
                return ProcessFacts(process.name(), "", started, not has_ended)
            # A process that ends loses its memory, and with it its command line, before it becomes a zombie.
            return ProcessFacts(process.name(), " ".join(words).strip(), started, bool(words) and not has_ended)
    except psutil.Error:
        return None


def _started(process: psutil.Process) -> float:
    """Return when a process started, in seconds after boot.

    ``create_time`` adds the time of the boot, which moves when the clock of the node is set; without that, the value
    is the same for every reader at any time.
    """
    boot = psutil.boot_time()  # first: psutil before 7 adds the value that this call has stored
    return round(process.create_time() - boot, 2)


def kill_if_same(processes: Iterable[tuple[int, float]]) -> None:
    """Kill processes of this node by SIGKILL; pids that belong to other processes by now are passed over.

    Args:
        processes: The pid of each process, and its start as in :class:`ProcessFacts`.
    """
    for pid, started in processes:
        facts = look_at(pid)
        if facts is not None and facts.is_same(started):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended in the meantime
                psutil.Process(pid).kill()


def raylet_of(pid: int) -> int:
    """Return the pid of the raylet from which a process descends, or which it is; 0 if there is none."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.parents()]
        return next((one.pid for one in family if one.name() == "raylet"), 0)
    except psutil.Error:
        return 0

"""What the kernel says of a process of this node."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessFacts", "kill_if_same", "look_at"]

PF_EXITING = 0x4
"""A flag of a process that has begun to end: its memory goes before it does."""


@dataclass(frozen=True)
class ProcessFacts:
    """A process, at one moment.

    Attributes:
        name: The first letters of its name.
        parent: The process that started it, or took it over.
        started: When it began; tells it from another that has its number later.
        is_alive: Whether it runs, and has not begun to end.
    """

    name: str
    parent: int
    started: int
    is_alive: bool


def look_at(pid: int) -> ProcessFacts | None:
    """The facts of a process; nothing where there is none, or none that can be seen from here."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from its state on; a name may have anything in it
    is_alive = fields[0] not in ("Z", "X") and not int(fields[6]) & PF_EXITING
    return ProcessFacts(text.partition("(")[2].rpartition(")")[0], int(fields[1]), int(fields[19]), is_alive)


def kill_if_same(processes: Iterable[tuple[int, int]]) -> None:
    """Kill processes of this node by SIGKILL; those whose start time is another one are not meant, and live on.

    Args:
        processes: Process id and start time of each, as :func:`look_at` gives it.
    """
    for pid, started in processes:
        facts = look_at(pid)
        if facts is not None and facts.started == started:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

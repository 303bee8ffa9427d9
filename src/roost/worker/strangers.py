"""Processes that hold memory of accelerators and do not belong to this Ray.

A worker looks before any of the user's code runs: memory that a stranger holds is missing later, and
then the error names everybody but the stranger.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from roost.errors import Finding, Fix
from roost.hardware.accelerators import Holder
from roost.worker.processes import look_at

__all__ = ["Stranger", "find_strangers", "findings_of", "strangers_are_allowed"]

ALLOW = "ROOST_ALLOW_BUSY_GPUS"
"""Set to 1, strangers are let be."""
HELD_GIB = 1.0
"""What a stranger may hold: screens and monitors hold a little."""
MAX_NAMED = 16


@dataclass(frozen=True)
class Stranger:
    """A process that holds memory of an accelerator.

    Attributes:
        uuid: The accelerator.
        pid: The process.
        command: How it was called; empty where it cannot be seen from here.
        used_gib: How much it holds; ``None`` where the driver does not tell.
    """

    uuid: str
    pid: int
    command: str
    used_gib: float | None


def strangers_are_allowed() -> bool:
    """Whether the user wants to launch beside them."""
    return os.environ.get(ALLOW, "") not in ("", "0")


def find_strangers(holders: Iterable[Holder], own: Iterable[int] = ()) -> list[Stranger]:
    """Those of the holders that are neither in this Ray nor among some others.

    Processes that cannot be seen from here may be anybody, also of this job: a container counts its own.
    They are left out.
    """
    raylet = _raylet_of(os.getpid())
    known = {*own, os.getpid()}
    return [
        Stranger(holder.uuid, holder.pid, _command(holder.pid), holder.used_gib)
        for holder in holders
        if holder.pid not in known and _is_alive(holder.pid) and _raylet_of(holder.pid) != raylet
    ]


def findings_of(node_rank: int, strangers: Sequence[Stranger], names: Mapping[str, str]) -> list[Finding]:
    """What is wrong with them, for accelerators with these names."""
    many = [one for one in strangers if one.uuid in names and (one.used_gib is None or one.used_gib >= HELD_GIB)]
    rule = "the memory of an accelerator belongs to the components that the plan puts there"
    findings = []
    for one in many[:MAX_NAMED]:
        held = f"{one.used_gib:.1f} GiB" if one.used_gib is not None else "memory"
        message = f"node {node_rank}, {names[one.uuid]}: process {one.pid} ({one.command}) holds {held} of it"
        fixes = (Fix("end it, there", f"kill {one.pid}"), Fix("or launch beside it", f"{ALLOW}=1"))
        findings.append(Finding("W113", message, rule=rule, fixes=fixes))
    return findings


def _is_alive(pid: int) -> bool:
    """Whether it runs; one that has begun to end, such as a worker that was just killed, gives its memory back."""
    found = look_at(pid)
    return found is not None and found.is_alive


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:120]


def _raylet_of(pid: int) -> int:
    """The raylet that a process descends from; 0: none."""
    while pid > 1 and (found := look_at(pid)) is not None:
        if found.name == "raylet":
            return pid
        pid = found.parent
    return 0

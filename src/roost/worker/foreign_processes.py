"""Foreign processes: processes that hold memory of accelerators and do not belong to this Ray.

A worker looks for them before any of the user's code runs. Later their memory is missing, and the out-of-memory error
names every process but the foreign one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from roost.errors import Finding, Fix
from roost.hardware.accelerators import Holder
from roost.worker.processes import look_at, raylet_of

__all__ = ["ForeignProcess", "find_foreign_processes", "findings_of", "foreign_processes_are_allowed"]

ALLOW = "ROOST_ALLOW_BUSY_GPUS"
"""Set to 1 to launch although foreign processes hold GPU memory."""
HELD_GIB = 1.0
"""GiB that a foreign process may hold: desktops and monitoring tools hold a little."""
MAX_NAMED = 16
MAX_COMMAND = 120


@dataclass(frozen=True)
class ForeignProcess:
    """A foreign process on one accelerator.

    Attributes:
        uuid: UUID of the accelerator.
        pid: Process id.
        command: Its command line; empty if it is not readable.
        used_gib: GiB of the accelerator's memory that it holds; ``None`` if the driver does not say.
    """

    uuid: str
    pid: int
    command: str
    used_gib: float | None


def foreign_processes_are_allowed() -> bool:
    """Return whether the user wants to launch beside foreign processes."""
    return os.environ.get(ALLOW, "") not in ("", "0")


def find_foreign_processes(holders: Iterable[Holder], own: Iterable[int] = ()) -> list[ForeignProcess]:
    """Return the holders of accelerator memory that do not descend from this process's raylet.

    Processes that are not visible from here are left out: a container has its own pids, so they may belong to this job.

    Args:
        holders: The processes that the driver lists.
        own: Pids of processes outside Ray that belong to the job, such as the driver.
    """
    raylet = raylet_of(os.getpid())
    known = {*own, os.getpid()}
    found = []
    for holder in holders:
        facts = look_at(holder.pid) if holder.pid not in known else None
        # A process that has begun to end, such as a worker that was just killed, gives its memory back.
        if facts is not None and facts.is_alive and raylet_of(holder.pid) != raylet:
            found.append(ForeignProcess(holder.uuid, holder.pid, facts.command[:MAX_COMMAND], holder.used_gib))
    return found


def findings_of(node_rank: int, found: Sequence[ForeignProcess], names: Mapping[str, str]) -> list[Finding]:
    """Return a finding (W113) for each foreign process that holds too much.

    Args:
        node_rank: The node.
        found: Its foreign processes.
        names: The names of the accelerators that the plan uses, by UUID; others are passed over.
    """
    many = [one for one in found if one.uuid in names and (one.used_gib is None or one.used_gib >= HELD_GIB)]
    rule = "the memory of an accelerator belongs to the components that the plan puts there"
    findings = []
    for one in many[:MAX_NAMED]:
        held = f"{one.used_gib:.1f} GiB" if one.used_gib is not None else "memory"
        message = f"node {node_rank}, {names[one.uuid]}: process {one.pid} ({one.command}) holds {held} of it"
        fixes = (Fix("end it, on that node", f"kill {one.pid}"), Fix("or launch beside it", f"{ALLOW}=1"))
        findings.append(Finding("W113", message, rule=rule, fixes=fixes))
    return findings

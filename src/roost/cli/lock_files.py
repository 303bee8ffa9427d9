"""Locks at the command line: written by ``roost plan`` and ``roost run --relock``, replayed by ``roost run``."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from roost.cli.inputs import UsageError
from roost.cli.output import print_view
from roost.errors import ConfigError, Finding, Fix, RoostError, counted
from roost.topology import Topology

if TYPE_CHECKING:
    from roost.plan import Plan
    from roost.plan.lock_file import LockFile

__all__ = ["KeptPlan", "write_lock"]

_MOST_SHOWN = 20


def write_lock(
    path: str, plan: Plan, args: Namespace, machines: Any = None, findings: Iterable[Finding] = ()
) -> LockFile | None:
    """Writes the lock of a plan and says where; a plan with problems is not kept.

    Args:
        path: Where to.
        plan: The plan.
        args: What the command was given: the job file, the values of ``--set``.
        machines: The live cluster that it was resolved on.
        findings: What the plan's check found.
    """
    from roost.cli.files import write_file
    from roost.plan.lock_file import LockFile

    if any(finding.is_problem for finding in findings):
        sys.stdout.flush()
        print_view(f"{path} was not written: a plan with problems is not kept", sys.stderr)
        return None
    seen_from = os.path.dirname(os.path.abspath(path))
    job_file = os.path.relpath(os.path.abspath(args.job), seen_from)
    lock = LockFile.of(plan, machines, job_file, _hash_of(args.job), args.values)
    write_file(path, lock.to_json())
    known = ", with the UUIDs of its accelerators" if any(lock.uuids) else ""
    line = f"wrote {path}: {lock.topology.describe()}{known}, fingerprint {lock.fingerprint}"
    print_view(line, sys.stderr if getattr(args, "json", False) else sys.stdout)  # stdout is for the JSON alone
    return lock


class KeptPlan:
    """The plan of ``--lock``: as it was kept, or with ``--relock`` made anew."""

    def __init__(self, args: Namespace, lock: LockFile | None) -> None:
        self.args = args
        self.path: str = args.lock
        self.lock = lock

    @staticmethod
    def of(args: Namespace) -> KeptPlan | None:
        """What ``--lock`` names; ``None`` without it. The lock's job file and ``--set`` values become those of the command.

        Raises:
            UsageError: Where there is no such lock, or no job is named.
        """
        if args.relock and not args.lock:
            message = "--relock says to write a lock anew, and no --lock says which"
            raise UsageError([Finding("U131", message, fixes=(Fix("name it", "--lock job.lock.json --relock"),))])
        lock = _read(args) if args.lock else None
        if lock is not None:
            if args.job is None and lock.job_file:
                args.job = os.path.normpath(os.path.join(os.path.dirname(args.lock), lock.job_file))
            args.values = [*lock.settings, *(value for value in args.values if value not in lock.settings)]
        if args.job is None:
            fixes = (Fix("a job file", "roost run job.yaml"), Fix("or a lock", "roost run --lock job.lock.json"))
            raise UsageError([Finding("U131", "neither a job file is named nor a lock that knows one", fixes=fixes)])
        return KeptPlan(args, lock) if args.lock else None

    def plan(self, config: Any, machines: Any) -> Plan:
        """The plan to launch.

        Raises:
            RoostError: Where machines or job are not what they were, and there is no ``--relock``.
        """
        if self.args.relock or self.lock is None:
            return self._relock(config, machines)
        self._check_machines(self.lock, machines)
        self._check_job(self.lock, config)
        return self.lock.plan

    def _relock(self, config: Any, machines: Any) -> Plan:
        from roost.plan import Plan

        plan = Plan.resolve(config, machines)
        findings = plan.check()
        before = self.lock
        lock = write_lock(self.path, plan, self.args, machines, findings)
        if lock is not None:
            self.lock = lock
            if before is not None:
                _show_diff(f"{self.path} as it was", "now", before, lock)
        return plan

    def _check_machines(self, lock: LockFile, machines: Any) -> None:
        differences = lock.differences(machines)
        if differences:
            lines = [str(difference) for difference in differences]
            if len(lines) > _MOST_SHOWN:
                lines[_MOST_SHOWN:] = [f"… {len(lines) - _MOST_SHOWN:,} more"]
            raise RoostError(
                [
                    Finding(
                        "K201",
                        f"{self.path}: the machines are not those that it was made on",
                        context=tuple(lines),
                        rule="a lock is replayed on the machines that it was made on, in their order",
                        fixes=(Fix("resolve the job anew, and write the lock", "--relock"),),
                    )
                ]
            )
        further = Topology.of(machines).num_nodes - lock.topology.num_nodes
        if further > 0:
            print_view(f"{self.path} leaves {counted(further, 'further node')} alone")

    def _check_job(self, lock: LockFile, config: Any) -> None:
        """A job file may change in what places nothing; what it places is what was kept."""
        from roost.plan import Plan
        from roost.plan.lock_file import LockFile

        job = self.args.job
        if lock.is_of(_hash_of(job), self.args.values):
            return
        fixes = (Fix("resolve the job anew, and write the lock", "--relock"),)
        try:
            now = Plan.resolve(config, lock.topology)
        except RoostError as error:
            message = f"{job} has changed since {self.path} was made, and cannot be placed on its machines"
            raise RoostError([Finding("K202", message), *error.findings]) from None
        if not _show_diff(self.path, job, lock, LockFile(now, uuids=lock.uuids), is_quiet=True):
            print_view(f"{job} has changed since {self.path} was made; every process stays where it was")
            return
        message = f"{job} has changed since {self.path} was made, and places something else"
        raise RoostError([Finding("K202", message, fixes=fixes)])


def _show_diff(before_name: str, after_name: str, before: LockFile, after: LockFile, is_quiet: bool = False) -> bool:
    """Shows what changes; returns whether anything does. Quiet: says nothing where nothing changes."""
    from roost.plan.diff import diff_plans
    from roost.report.diff import draw_diff

    diff = diff_plans(before.plan, after.plan, before.uuids, after.uuids)
    if diff or not is_quiet:
        print_view(draw_diff(diff, before_name, after_name, after.topology.noun))
        print_view("")
    return bool(diff)


def _read(args: Namespace) -> LockFile | None:
    """The lock that is there; ``None`` where it is to be written anew and cannot be read."""
    from roost.plan.lock_file import LockFile

    if not os.path.exists(args.lock):
        if args.relock:
            return None
        fixes = (Fix("make it now", "--relock"), Fix("or before", f"roost plan … --lock {args.lock}"))
        raise UsageError([Finding("U132", f"there is no lock {args.lock}", fixes=fixes)])
    try:
        return LockFile.load(args.lock)
    except ConfigError as error:
        if not args.relock or not _is_broken(error.codes):
            raise
        print_view(f"{error.findings[0].message}; it is written anew")
        return None


def _is_broken(codes: Sequence[str]) -> bool:
    """Whether a lock is no loss: cut off, changed, or of an older Roost, but not of a newer Roost or something else."""
    return set(codes) <= {"C403", "C405", "C406"}


def _hash_of(job: str) -> str:
    from roost.plan.lock_file import text_hash

    try:
        with open(job, "rb") as file:
            return text_hash(file.read())
    except OSError as error:
        raise UsageError([Finding("C101", f"{job}: {error.strerror or error}")]) from None

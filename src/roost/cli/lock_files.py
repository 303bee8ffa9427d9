"""Lock files: ``roost plan`` and ``roost run --relock`` write them, ``roost run`` replays them."""

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

__all__ = ["LockedPlan", "write_lock"]

_MOST_SHOWN = 20


def write_lock(
    path: str, plan: Plan, args: Namespace, cluster: Any = None, findings: Iterable[Finding] = ()
) -> LockFile | None:
    """Write the lock file of a plan, and print its path.

    Args:
        path: The path.
        plan: The plan.
        args: Arguments of the command: the job file, and the values of ``--set``.
        cluster: The live cluster that the plan was resolved on.
        findings: Findings of the plan's check.

    Returns:
        The lock file; ``None`` if the plan has problems, in which case nothing is written.
    """
    from roost.cli.files import write_file
    from roost.plan.lock_file import LockFile

    if any(finding.is_problem for finding in findings):
        sys.stdout.flush()
        print_view(f"{path} was not written: a plan with problems is not saved", sys.stderr)
        return None
    seen_from = os.path.dirname(os.path.abspath(path))
    job_file = os.path.relpath(os.path.abspath(args.job), seen_from)
    lock = LockFile.of(plan, cluster, job_file, _hash_of(args.job), args.values)
    write_file(path, lock.to_json())
    known = ", with the UUIDs of its accelerators" if any(lock.uuids) else ""
    line = f"wrote {path}: {lock.topology.describe()}{known}, fingerprint {lock.fingerprint}"
    print_view(line, sys.stderr if getattr(args, "json", False) else sys.stdout)  # stdout has the JSON only
    return lock


class LockedPlan:
    """The plan of ``--lock``: as saved, or resolved again with ``--relock``."""

    def __init__(self, args: Namespace, lock: LockFile | None) -> None:
        self.args = args
        self.path: str = args.lock
        self.lock = lock

    @staticmethod
    def of(args: Namespace) -> LockedPlan | None:
        """Return the plan of ``--lock``; ``None`` without ``--lock``.

        The job file and the ``--set`` values of the lock file become those of the command.

        Raises:
            UsageError: If there is no such lock file (U132), or no job is given (U131).
        """
        if args.relock and not args.lock:
            message = "--relock needs --lock, the lock file to write"
            raise UsageError([Finding("U131", message, fixes=(Fix("name the file", "--lock job.lock.json --relock"),))])
        lock = _read(args) if args.lock else None
        if lock is not None:
            if args.job is None and lock.job_file:
                args.job = os.path.normpath(os.path.join(os.path.dirname(args.lock), lock.job_file))
            args.values = [*lock.settings, *(value for value in args.values if value not in lock.settings)]
        if args.job is None:
            fixes = (Fix("a job file", "roost run job.yaml"), Fix("or a lock file", "roost run --lock job.lock.json"))
            raise UsageError(
                [Finding("U131", "there is neither a job file nor a lock file that names one", fixes=fixes)]
            )
        return LockedPlan(args, lock) if args.lock else None

    def plan(self, config: Any, cluster: Any) -> Plan:
        """Return the plan to launch.

        Raises:
            RoostError: If the nodes (K201) or the job (K202) have changed, without ``--relock``.
        """
        if self.args.relock or self.lock is None:
            return self._relock(config, cluster)
        self._check_nodes(self.lock, cluster)
        self._check_job(self.lock, config)
        return self.lock.plan

    def _relock(self, config: Any, cluster: Any) -> Plan:
        from roost.plan import Plan

        plan = Plan.resolve(config, cluster)
        findings = plan.check()
        before = self.lock
        lock = write_lock(self.path, plan, self.args, cluster, findings)
        if lock is not None:
            self.lock = lock
            if before is not None:
                _show_diff(f"{self.path} as it was", "now", before, lock)
        return plan

    def _check_nodes(self, lock: LockFile, cluster: Any) -> None:
        differences = lock.differences(cluster)
        if differences:
            lines = [str(difference) for difference in differences]
            if len(lines) > _MOST_SHOWN:
                lines[_MOST_SHOWN:] = [f"… {len(lines) - _MOST_SHOWN:,} more"]
            raise RoostError(
                [
                    Finding(
                        "K201",
                        f"{self.path}: the nodes are not those that it was made for",
                        context=tuple(lines),
                        rule="a lock file is replayed on the nodes that it was made for, in their order",
                        fixes=(Fix("resolve the job again, and write the lock file", "--relock"),),
                    )
                ]
            )
        further = Topology.of(cluster).num_nodes - lock.topology.num_nodes
        if further > 0:
            print_view(f"{self.path} does not use {counted(further, 'additional node')}")

    def _check_job(self, lock: LockFile, config: Any) -> None:
        """Raise if the job file has changed in a way that moves a process. Other changes are allowed."""
        from roost.plan import Plan
        from roost.plan.lock_file import LockFile

        job = self.args.job
        if lock.is_of(_hash_of(job), self.args.values):
            return
        fixes = (Fix("resolve the job again, and write the lock file", "--relock"),)
        try:
            now = Plan.resolve(config, lock.topology)
        except RoostError as error:
            message = f"{job} has changed since {self.path} was made, and cannot be placed on its nodes"
            raise RoostError([Finding("K202", message), *error.findings]) from None
        if not _show_diff(self.path, job, lock, LockFile(now, uuids=lock.uuids), is_quiet=True):
            print_view(f"{job} has changed since {self.path} was made; every process stays where it was")
            return
        message = f"{job} has changed since {self.path} was made, and now places processes elsewhere"
        raise RoostError([Finding("K202", message, fixes=fixes)])


def _show_diff(before_name: str, after_name: str, before: LockFile, after: LockFile, is_quiet: bool = False) -> bool:
    """Print the differences, and return whether there are any. Quiet: print nothing if there are none."""
    from roost.plan.diff import diff_plans
    from roost.report.diff import draw_diff

    diff = diff_plans(before.plan, after.plan, before.uuids, after.uuids)
    if diff or not is_quiet:
        print_view(draw_diff(diff, before_name, after_name, after.topology.noun))
        print_view("")
    return bool(diff)


def _read(args: Namespace) -> LockFile | None:
    """Return the existing lock file; ``None`` if ``--relock`` will write it and it is missing or broken."""
    from roost.plan.lock_file import LockFile

    if not os.path.exists(args.lock):
        if args.relock:
            return None
        fixes = (Fix("write it now", "--relock"), Fix("or beforehand", f"roost plan … --lock {args.lock}"))
        raise UsageError([Finding("U132", f"there is no lock file {args.lock}", fixes=fixes)])
    try:
        return LockFile.load(args.lock)
    except ConfigError as error:
        if not args.relock or not _is_broken(error.codes):
            raise
        print_view(f"{error.findings[0].message}; it will be replaced")
        return None


def _is_broken(codes: Sequence[str]) -> bool:
    """Return whether a lock file may be replaced: truncated, changed, or from an older Roost.

    A lock file from a newer Roost may not, and neither may another kind of file.
    """
    return set(codes) <= {"C403", "C405", "C406"}


def _hash_of(job: str) -> str:
    from roost.plan.lock_file import text_hash

    try:
        with open(job, "rb") as file:
            return text_hash(file.read())
    except OSError as error:
        raise UsageError([Finding("C101", f"{job}: {error.strerror or error}")]) from None

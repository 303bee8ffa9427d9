"""``roost diff``: compare two plans."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roost.cli.inputs import Formatter, UsageError, import_modules, read_cluster, set_values
from roost.cli.output import print_json, print_view
from roost.errors import Finding, Fix, RoostError

if TYPE_CHECKING:
    from roost.plan import Plan
    from roost.topology import Topology

__all__ = ["add", "run"]

_DESCRIPTION = """\
Compares two plans, process by process: + added, ~ changed, - removed.

  roost diff job.lock.json job.yaml               does the job file place anything elsewhere?
  roost diff old.yaml new.yaml --cluster 2x8
  roost diff job.yaml job.yaml --cluster 2x8 --cluster 4x8     on other nodes
  roost diff job.yaml job.yaml --cluster 2x8 --set actor.model.tensor_model_parallel_size=8
  roost diff job.lock.json live                   does the running job match the lock file?

A and B are job files, lock files, plans (roost plan --json), or 'live': the running job. Job files are
resolved on --cluster (given twice: for A, and for B), or else on the nodes of the other side.

exit codes: 0 the same, 1 different, 2 errors.
"""
_LIVE = "live"
_ADDRESS = re.compile(r"(ray://.+|[\w.\[\]:-]+:[0-9]+)\Z", re.ASCII)
_FORMAT = re.compile(r'\s*\{\s*"format"\s*:\s*"([^"]*)')


@dataclass(frozen=True)
class _Side:
    """One of the two plans that are compared."""

    name: str
    plan: Plan
    uuids: tuple[tuple[str, ...], ...] = ()


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "diff", help="show what changes between two plans", description=_DESCRIPTION, formatter_class=Formatter
    )
    what = "a job file, a lock file, a plan, or live"
    parser.add_argument("before", metavar="A", help=what)
    parser.add_argument("after", metavar="B", help=what)
    parser.add_argument(
        "--cluster", action="append", default=[], metavar="CLUSTER",
        help="the nodes for job files: a text such as 2x8, or a cluster file; twice: for A and for B",
    )  # fmt: skip
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE",
                        help="import this module first; may be repeated")  # fmt: skip
    parser.add_argument("--set", dest="values", action="append", default=[], metavar="KEY=VALUE",
                        help="override a key of job file B; may be repeated")  # fmt: skip
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="the Ray cluster of live; default RAY_ADDRESS, else that of this user's job",
    )
    parser.add_argument("--namespace", metavar="NAME", help="the job, if several run on that Ray cluster")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, to stdout")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    try:
        import_modules(args.modules)
        before, after = _sides(args)
    except RoostError as error:  # like diff(1): 2 for errors, 1 for differences
        raise UsageError(error.findings) from error
    from roost.plan.diff import diff_plans

    diff = diff_plans(before.plan, after.plan, before.uuids, after.uuids)
    if args.json:
        print_json(diff.to_json())
    else:
        from roost.report.diff import draw_diff

        print_view(draw_diff(diff, before.name, after.name, after.plan.topology.noun))
    return 1 if diff else 0


def _sides(args: Namespace) -> tuple[_Side, _Side]:
    if len(args.cluster) > 2:
        raise UsageError(
            [
                Finding(
                    "U133", f"--cluster is given {len(args.cluster)} times; give it once, or once for A and once for B"
                )
            ]
        )
    clusters = [read_cluster(text) for text in args.cluster]
    read = [_read(args, name) for name in (args.before, args.after)]
    if args.values and read[1] is not None:
        raise UsageError([Finding("U133", f"--set changes job file B, but {args.after} is not a job file")])
    sides = []
    for index, name in enumerate((args.before, args.after)):
        side, other = read[index], read[1 - index]
        if side is None:
            topology = clusters[min(index, len(clusters) - 1)] if clusters else other.plan.topology if other else None
            values = args.values if index else []
            where = f" on {args.cluster[index]}" if len(clusters) == 2 else ""
            side = _Side(name + where + "".join(f", {value}" for value in values), _resolve(name, topology, values))
        sides.append(side)
    return sides[0], sides[1]


def _resolve(job: str, topology: Topology | None, values: list[str]) -> Plan:
    from roost.config import load_config
    from roost.plan import Plan

    if topology is None:
        fixes = (Fix("give a cluster", "--cluster 2x8"),)
        raise UsageError([Finding("U133", f"{job} is a job file, and there is no --cluster for it", fixes=fixes)])
    return Plan.resolve(set_values(load_config(job), values), topology)


def _read(args: Namespace, name: str) -> _Side | None:
    """Return the plan that an argument names; ``None`` for a job file, which is resolved later."""
    if name == _LIVE or (not os.path.exists(name) and _ADDRESS.match(name)):
        return _live(args, name)
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            saved = _FORMAT.match(file.read(400))
            if saved is None and not name.endswith(".lock.json"):
                return None
            rest = file.read()
    except OSError as error:
        raise UsageError([Finding("C101", f"{name}: {error.strerror or error}")]) from None
    if saved is not None and saved[1].startswith("roost.plan/"):
        from roost.plan import Plan

        return _Side(name, Plan.from_json(saved.string + rest))
    from roost.plan.lock_file import LockFile

    lock = LockFile.load(name)
    return _Side(name, lock.plan, lock.uuids)


def _live(args: Namespace, name: str) -> _Side:
    """Return the plan that the running job was launched with."""
    from roost.cli.live import joined

    if name != _LIVE:
        args = Namespace(address=name, namespace=args.namespace)
    with joined(args):
        import ray

        from roost.cluster.managers import MANAGERS, find_managers
        from roost.cluster.plans import live_plan

        named = ray.util.list_named_actors(all_namespaces=True)
        jobs = sorted(entry["namespace"] for entry in named if entry["name"] == MANAGERS)
        chosen = args.namespace or (jobs[0] if len(jobs) == 1 else "")
        managers = find_managers(chosen) if chosen else None
        if managers is None:
            message = (
                f"no job {chosen!r} is running"
                if chosen
                else "several jobs are running"
                if jobs
                else "no job is running"
            )
            rule = "jobs: " + ", ".join(jobs) if jobs else ""
            fixes = (Fix("choose one", f"--namespace {jobs[0]}"),) if jobs else ()
            raise UsageError([Finding("U134", message, rule=rule, fixes=fixes)])
        found = live_plan(managers)
    return _Side(f"live ({chosen})", found.plan, found.uuids)

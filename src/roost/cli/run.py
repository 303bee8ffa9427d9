"""``roost run``: plan, check, reserve, launch, run, close."""

from __future__ import annotations

import inspect
import os
import sys
from argparse import Namespace
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from roost.cli.inputs import Formatter, UsageError, add_inputs, as_usage, import_modules, read_cluster, read_config
from roost.cli.lock_files import LockedPlan
from roost.cli.output import print_notes, print_problems, print_view
from roost.cli.signals import ignore_stop_signals, one_stop_signal
from roost.config import Job, read_job
from roost.errors import Finding, Fix, counted
from roost.plan import Plan
from roost.rl.programs import FUNCTION, Program, load_programs
from roost.topology import Topology

if TYPE_CHECKING:
    from roost.rl.job import RunningJob

__all__ = ["add", "run"]

MAX_EMBEDDED_NODES = 16

_DESCRIPTION = """\
Plans a job, shows the map, reserves, launches, runs it, and closes everything.

  roost run job.yaml                    on the Ray cluster of RAY_ADDRESS, or on this machine
  roost run job.yaml --cluster 2x8      on an embedded Ray of two nodes with made-up accelerators
  roost run --lock job.lock.json        exactly as planned, or not at all

The job names its programs. Beside the placement of a component, 'worker: module:Class' names the
class of its workers, and 'engine: module:function' a function that returns an engine;
'cluster.programs' names them by component. All of them are started first. Then
'run: module:function' is called: with the running job if it takes one argument (job.train,
job.rollout, job.group(name)), with the cluster and the plan if it takes two, and with all values of
the job as the third. Without a function, every group whose class has a method 'run' is called once.
Modules are looked for beside the job file.

A lock file (roost plan … --lock FILE) is replayed: nothing is placed again. If the nodes or the job have
changed, the differences are shown and nothing is started. With --relock the job is resolved again, the
lock file is written, and the job runs.

SIGTERM and SIGINT (Ctrl-C) raise KeyboardInterrupt in the job's function. The job is then closed, and
the exit code is 143 or 130.
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "run", help="plan, launch and run a job", description=_DESCRIPTION, formatter_class=Formatter
    )
    parser.add_argument("job", metavar="JOB.yaml", nargs="?", help="the job file; default that of the lock file")
    add_inputs(parser, is_cluster_required=False)
    parser.add_argument("--lock", metavar="FILE", help="replay the plan of this lock file")
    parser.add_argument("--relock", action="store_true", help="resolve the job again, and write the lock file")
    parser.add_argument("--namespace", metavar="NAME", help="Ray namespace of the job, which is its name")
    parser.add_argument("--html", metavar="FILE", help="write a page of the plan that ran, which opens from disk")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    _look_beside(args.job or args.lock or "")
    import_modules(args.modules)
    locked = LockedPlan.of(args)
    resolve = locked.plan if locked else Plan.resolve
    _look_beside(args.job)
    with as_usage("C101"):
        config = read_config(args)
        topology = read_cluster(args.cluster) if args.cluster else None
    job = read_job(config)
    with as_usage("U103", "U104"):
        programs = load_programs(job, with_function=True)
    is_embedded = topology is not None and not os.environ.get("RAY_ADDRESS")
    if topology is not None:
        plan = resolve(job, topology)
        if not _show(plan):
            return 1
        _check_size(topology)
        _check_programs(plan, programs, job)
    with ExitStack() as stack:
        with one_stop_signal():
            if topology is not None and is_embedded:
                from roost.cluster.local_ray import local_ray

                print_view(f"\nstarting an embedded Ray: {topology.describe()}, all of it made up")
                stack.enter_context(local_ray(topology))
                stack.callback(ignore_stop_signals)
            from roost.cluster import Cluster

            cluster = stack.enter_context(Cluster(cluster_cfg=config, namespace=args.namespace))
            stack.callback(ignore_stop_signals)
        if locked is None or not is_embedded:  # the plan of an embedded Ray was resolved above
            plan = resolve(job, cluster)
        if topology is None and not _show(plan):
            return 1
        from roost.rl.job import RunningJob

        running = stack.enter_context(RunningJob(cluster, plan, job.tree.plain()))
        stack.callback(ignore_stop_signals)
        running.start(programs, job, on_start=_print_start)
        code = _call(programs.get(FUNCTION), running)
    if args.html:
        _write_page(args.html, args.job, plan)
    return code


def _write_page(path: str, job: str, plan: Plan) -> None:
    from roost.cli.files import write_file
    from roost.report.page import draw_page

    write_file(path, draw_page(plan, os.path.basename(job), plan.check()))
    print_view(f"\nwhere everything ran: {os.path.abspath(path)}")


def _look_beside(path: str) -> None:
    """Make modules in the folder of a file importable."""
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)


def _show(plan: Plan) -> bool:
    """Print the map and the findings, and return whether the plan can be launched."""
    from roost.report.terminal import draw_map

    findings = plan.check()
    print_view(draw_map(plan))
    print_notes(findings)
    return not print_problems(findings)


def _check_size(topology: Topology) -> None:
    if topology.num_nodes > MAX_EMBEDDED_NODES and not os.environ.get("RAY_ADDRESS"):
        message = f"an embedded Ray has at most {MAX_EMBEDDED_NODES} nodes, not {topology.num_nodes:,}"
        fixes = (Fix("plan it instead", "roost plan …"), Fix("or run it on a real one", "RAY_ADDRESS=… roost run …"))
        raise UsageError([Finding("U102", message, fixes=fixes)])


def _check_programs(plan: Plan, programs: dict[str, Program], job: Job) -> None:
    from roost.rl.job import assign_programs

    with as_usage("U107"):
        assign_programs(plan, programs, job)


def _print_start(name: str, count: int, noun: str) -> None:
    print_view(f"launched {name}: {counted(count, noun)}")


def _call(function: Program | None, running: RunningJob) -> int:
    """Call the function of the job, or the method ``run`` of each group that has one; return the exit code."""
    if function is not None:
        count = len(inspect.signature(function.value).parameters)
        arguments = (running.cluster, running.plan, running.config)[: max(2, count)] if count != 1 else (running,)
        code = function.value(*arguments)
        return code if isinstance(code, int) else 0
    groups = running.worker_groups
    calls = [(name, group.run()) for name, group in groups.items() if "run" in group.methods]
    for name, call in calls:
        values = call.wait()
        print_view(f"{name}.run(): {values if len(values) <= 8 else f'{len(values)} values'}")
    return 0

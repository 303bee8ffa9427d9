"""``roost run``: plan, check, reserve, launch, run, close."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from roost.cli.inputs import Formatter, UsageError, add_inputs, as_usage, import_modules, read_cluster, read_config
from roost.cli.lock_files import LockedPlan
from roost.cli.output import print_notes, print_problems, print_view
from roost.cli.signals import ignore_stop_signals, one_stop_signal
from roost.config import Job, read_job
from roost.errors import Finding, Fix, counted
from roost.plan import Plan
from roost.topology import Topology

__all__ = ["add", "run"]

MAX_EMBEDDED_NODES = 16

_DESCRIPTION = """\
Plans a job, shows the map, reserves, launches, runs it, and closes everything.

  roost run job.yaml                    on the Ray cluster of RAY_ADDRESS, or on this machine
  roost run job.yaml --cluster 2x8      on an embedded Ray of two nodes with made-up accelerators
  roost run --lock job.lock.json        exactly as planned, or not at all

The job names its program: 'run: module:function', called with the cluster and the plan (and with
all values of the job, where it takes a third argument), or 'worker: module:Class' beside the
placement of a component. Groups of such workers are launched first; the function finds them with
cluster.get_group(name). Without a function, every group whose class has a method 'run' is called
once. Modules are looked for beside the job file.

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
    programs = _load_programs(job)
    is_embedded = topology is not None and not os.environ.get("RAY_ADDRESS")
    if topology is not None:
        plan = resolve(job, topology)
        if not _show(plan):
            return 1
        _check_size(topology)
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
        code = _execute(job, programs, cluster, plan)
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


def _load_programs(job: Job) -> dict[str, Any]:
    """Load the function of the job (under ``""``) and the worker class of each component.

    Raises:
        UsageError: If the job names no program (U103), or a program cannot be loaded (U104).
    """
    wanted = {spec.name: spec.worker for spec in job.components if spec.worker and not spec.placeholder}
    if job.run:
        wanted[""] = job.run
    if not wanted:
        message = "the job names no program"
        fixes = (
            Fix("a function that is called with cluster and plan", "run: my_job:main"),
            Fix("or a worker class beside a placement", "actor: {placement: 0-7, worker: my_job:Actor}"),
        )
        raise UsageError([Finding("U103", message, fixes=fixes)])
    loaded, findings = {}, []
    for name, program in wanted.items():
        module, _, attribute = program.partition(":")
        try:
            loaded[name] = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a module may raise anything when it is loaded
            findings.append(Finding("U104", f"{program} cannot be loaded: {type(error).__name__}: {error}"))
    if findings:
        raise UsageError(findings)
    return loaded


def _execute(job: Job, programs: dict[str, Any], cluster: Any, plan: Plan) -> int:
    from roost.worker import GroupRequest

    function: Callable[..., Any] | None = programs.pop("", None)
    groups = {}
    for component in plan.components:
        if component.placeholder:
            cluster.reserve(component.accelerators)
    for name, cls in programs.items():
        groups[name] = GroupRequest(cls).launch(cluster, plan=plan, component=name)
        print_view(f"launched {name}: {counted(groups[name].world_size, 'worker')}")
    if function is not None:
        takes_config = len(inspect.signature(function).parameters) > 2
        code = function(cluster, plan, job.tree.plain()) if takes_config else function(cluster, plan)
        return code if isinstance(code, int) else 0
    calls = [(name, group.run()) for name, group in groups.items() if "run" in group.methods]
    for name, call in calls:
        values = call.wait()
        print_view(f"{name}.run(): {values if len(values) <= 8 else f'{len(values)} values'}")
    return 0

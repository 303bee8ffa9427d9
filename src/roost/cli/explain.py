"""``roost explain``: explain the place of one process."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from roost.cli.inputs import Formatter, add_inputs, as_usage, read_inputs
from roost.cli.output import print_problems, print_view
from roost.plan import Plan

__all__ = ["add", "run"]

_DESCRIPTION = """\
Explains one process: its place, the rule of the job file behind it, the processes on the same
accelerators, its weights, and its environment.

  roost explain job.yaml 'actor[3]' --cluster 2x8
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "explain", help="say where one process goes, and why", description=_DESCRIPTION,
        formatter_class=Formatter,
    )  # fmt: skip
    parser.add_argument("job", metavar="JOB.yaml", help="the job file")
    parser.add_argument("process", metavar="PROCESS", help="a component and a rank, such as 'actor[3]'")
    add_inputs(parser)
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    from roost.report.explain import explain_process

    config, topology = read_inputs(args)
    plan = Plan.resolve(config, topology)
    with as_usage("P205", "P206"):
        process = plan.process(args.process)
    print_view(explain_process(plan, process))
    return 1 if print_problems(plan.check()) else 0

"""``roost validate``: check a job file."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from roost.cli.inputs import Formatter, add_inputs, read_inputs
from roost.cli.output import print_notes, print_problems, print_view
from roost.plan import Plan

__all__ = ["add", "run"]

_DESCRIPTION = """\
Checks a job on a cluster and shows all problems at once, each with its place, the rule it breaks
and what to write instead. Prints one line if there are none.

  roost validate job.yaml --cluster 2x8
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "validate", help="show everything that is wrong", description=_DESCRIPTION,
        formatter_class=Formatter,
    )  # fmt: skip
    parser.add_argument("job", metavar="JOB.yaml", help="the job file")
    add_inputs(parser)
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    from roost.report.terminal import summary

    config, topology = read_inputs(args)
    plan = Plan.resolve(config, topology)
    findings = plan.check()
    print_notes(findings)
    if print_problems(findings):
        return 1
    print_view(f"{args.job}: launchable. {summary(plan)}")
    return 0

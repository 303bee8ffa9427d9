"""``roost plan``: where everything goes."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from roost.cli.inputs import Formatter, add_inputs, read_inputs
from roost.cli.output import print_notes, print_problems, print_view
from roost.plan import Plan

__all__ = ["add", "run"]

_DESCRIPTION = """\
Resolves a job on a cluster, without Ray and without a GPU, and shows a map of nodes and
accelerators, a table per component, and what is worth knowing.

  roost plan job.yaml --cluster 2x8
  roost plan job.yaml --cluster cluster.yaml --json > plan.json
  roost plan job.yaml --cluster 2x8 --set cluster.layout.mode=hybrid

In the map each component has a letter; an accelerator shows the letters of all components on it,
a number after a letter means so many processes, a dot means idle. Like nodes share a row.
"""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "plan", help="show where everything goes", description=_DESCRIPTION,
        formatter_class=Formatter,
    )  # fmt: skip
    parser.add_argument("job", metavar="JOB.yaml", help="the job file")
    add_inputs(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else, to stdout")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Runs the command; returns the exit code."""
    config, topology = read_inputs(args)
    plan = Plan.resolve(config, topology)
    findings = plan.check()
    if args.json:
        sys.stdout.write(plan.to_json())
    else:
        from roost.report.terminal import draw_plan

        print_view(draw_plan(plan))
        if any(not finding.is_problem for finding in findings):
            print_view("")
        print_notes(findings)
    return 1 if print_problems(findings) else 0

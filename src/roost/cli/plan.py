"""``roost plan``: resolve a job and show its plan."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from roost.cli.inputs import Formatter, add_inputs, read_inputs
from roost.cli.output import print_json, print_notes, print_problems, print_view
from roost.errors import Finding
from roost.plan import Plan

__all__ = ["add", "run"]

_DESCRIPTION = """\
Resolves a job on a cluster, without Ray and without a GPU, and shows a map of nodes and
accelerators, a table per component, and notes.

  roost plan job.yaml --cluster 2x8
  roost plan job.yaml --cluster cluster.yaml --json > plan.json
  roost plan job.yaml --cluster 2x8 --html plan.html --svg plan.svg
  roost plan job.yaml --cluster 2x8 --set cluster.layout.mode=hybrid
  roost plan job.yaml --cluster 2x8 --lock job.lock.json

In the map each component has a letter; an accelerator shows the letters of all components on it,
a number after a letter is the number of its processes, and a dot means idle. In large plans equal nodes
share a row.
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan", help="show where everything goes", description=_DESCRIPTION,
        formatter_class=Formatter,
    )  # fmt: skip
    parser.add_argument("job", metavar="JOB.yaml", help="the job file")
    add_inputs(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else, to stdout")
    parser.add_argument("--html", metavar="FILE", help="write an interactive page that opens from disk")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    parser.add_argument("--lock", metavar="FILE", help="save the plan, for roost run --lock and roost diff")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    config, topology = read_inputs(args)
    plan = Plan.resolve(config, topology)
    findings = plan.check()
    if args.json:
        print_json(plan.to_json())
    else:
        from roost.report.terminal import draw_plan

        print_view(draw_plan(plan))
        if any(not finding.is_problem for finding in findings):
            print_view("")
        print_notes(findings)
    _write_pictures(args, plan, findings)
    if args.lock:
        from roost.cli.lock_files import write_lock

        write_lock(args.lock, plan, args, findings=findings)
    return 1 if print_problems(findings) else 0


def _write_pictures(args: Namespace, plan: Plan, findings: Sequence[Finding]) -> None:
    """Write the files of ``--html`` and ``--svg``, and print their paths."""
    if not args.html and not args.svg:
        return
    from roost.cli.files import write_file

    if args.html:
        from roost.report.page import draw_page

        write_file(args.html, draw_page(plan, os.path.basename(args.job), findings))
    if args.svg:
        from roost.report.svg import draw_svg

        write_file(args.svg, draw_svg(plan))
    written = " and ".join(path for path in (args.html, args.svg) if path)
    print_view(f"wrote {written}", sys.stderr if args.json else sys.stdout)  # stdout has the JSON only

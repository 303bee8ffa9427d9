"""``roost trace``: write the calls of all ranks as a timeline for Perfetto."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace
from typing import Any

from roost.cli.files import write_file
from roost.cli.inputs import Formatter
from roost.cli.live import add_address, joined
from roost.cli.output import print_view
from roost.errors import counted

__all__ = ["add", "run"]

_DESCRIPTION = """\
Writes the calls of every rank of the running jobs as a timeline. Open it with https://ui.perfetto.dev
or chrome://tracing. Each worker keeps its last 1,000 calls.

  roost trace --out trace.json
  roost trace --out trace.json --last 60 --address 10.0.0.1:6379
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "trace", help="write a timeline of calls", description=_DESCRIPTION, formatter_class=Formatter
    )
    add_address(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--last",
        type=_seconds,
        default=float("inf"),
        metavar="SECONDS",
        help="only calls that ended within the last SECONDS",
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise ArgumentTypeError("a number of seconds, more than 0")
    return seconds


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    with joined(args):
        from roost.worker.timelines import collect_timelines

        timelines, silent = collect_timelines(args.last)
    from roost.report.trace import trace_events

    write_file(args.out, json.dumps(trace_events(timelines), separators=(",", ":")) + "\n")
    calls = sum(len(timeline.calls) for timeline in timelines)
    groups = len({(timeline.job, timeline.group) for timeline in timelines})
    print_view(
        f"{args.out}: {counted(calls, 'call')} of {counted(len(timelines), 'rank')} in {counted(groups, 'group')}"
    )
    cut = [f"{timeline.group}[{timeline.rank}]" for timeline in timelines if timeline.is_cut]
    if cut:
        print_view(f"older calls are missing, because a worker keeps its last 1,000: {_some(cut)}")
    if silent:
        print_view(f"not in the trace, because dead or silent: {_some(silent)}")
    return 0


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more

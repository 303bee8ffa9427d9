"""``roost status``: the jobs, worker groups and ranks on a Ray cluster, once or continuously."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from roost.cli.files import write_file
from roost.cli.inputs import Formatter, UsageError
from roost.cli.live import add_address, joined, ray_is_gone
from roost.cli.output import print_view
from roost.errors import Finding

if TYPE_CHECKING:
    from rich.text import Text

    from roost.plan.states import JobStatus
    from roost.worker.watch import Watcher

__all__ = ["add", "run"]

_DESCRIPTION = """\
Lists the running jobs, their worker groups, and for every rank its node, accelerators, process and state.

  roost status
  roost status --watch                      a map, refreshed in place; q ends it
  roost status --watch --interval 5 >> log  a frame every 5 seconds, as lines
  roost status --html status.html           the same as a page
  roost status --address 10.0.0.1:6379 --json
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("status", help="show what runs", description=_DESCRIPTION, formatter_class=Formatter)
    add_address(parser)
    parser.add_argument("--watch", action="store_true", help="refresh continuously, with a map; q or Ctrl-C ends it")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between frames (%(default)s)"
    )
    parser.add_argument("--count", type=_count, metavar="N", help="end --watch after N frames")
    parser.add_argument("--html", metavar="FILE", help="write a page; with --watch at every frame")
    parser.add_argument(
        "--json", action="store_true", help="print JSON, and nothing else; with --watch a line per frame"
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 86400:
        raise ArgumentTypeError("a number of seconds, from 0.1 up")
    return seconds


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ArgumentTypeError("a whole number, from 1 up")
    return number


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    if args.count is not None and not args.watch:
        raise UsageError([Finding("U121", "--count needs --watch: it is the number of frames to show")])
    with joined(args):
        from roost.worker.watch import Watcher

        if args.watch:
            _watch(args, Watcher(args.interval))
        else:
            _once(args, Watcher().look())
    return 0


def _once(args: Namespace, jobs: Sequence[JobStatus]) -> None:
    if args.html:
        _write_page(args, jobs)
    if args.json:
        sys.stdout.write(json.dumps(_as_json(jobs), indent=1) + "\n")
    elif args.html:
        print_view(f"wrote {args.html}")
    else:
        _list(jobs)


def _watch(args: Namespace, watcher: Watcher) -> None:
    from roost.cli.watching import watch_lines, watch_screen
    from roost.report.live import draw_jobs

    is_gone = ray_is_gone()
    seen: list[Text] = []  # the last frame with a job

    def look() -> Sequence[JobStatus]:
        if is_gone():
            raise EOFError
        jobs = watcher.look(timeout_s=max(0.5, min(5.0, args.interval)))
        if args.html:
            _write_page(args, jobs)
        return jobs

    def draw(width: int | None, height: int | None) -> Text:
        jobs = look()
        frame = draw_jobs(jobs, width, height)
        if jobs or not seen:
            seen[:] = [frame]
        return frame

    if args.json:
        watch_lines(lambda: json.dumps(_as_json(look()), separators=(",", ":")), args.interval, args.count)
    elif sys.stdout.isatty():
        watch_screen(draw, args.interval, args.count)
        for frame in seen:
            print_view(frame)  # the last frame stays on the terminal
    else:
        watch_lines(lambda: draw(None, None).plain + "\n", args.interval, args.count)
    if not args.json and is_gone():
        print_view("the watched Ray cluster has ended")


def _write_page(args: Namespace, jobs: Sequence[JobStatus]) -> None:
    from roost.report.live_page import draw_status_page

    write_file(args.html, draw_status_page(jobs, args.interval if args.watch else None))


def _as_json(jobs: Sequence[JobStatus]) -> dict[str, Any]:
    return {"jobs": [job.to_dict() for job in jobs]}


def _list(jobs: Sequence[JobStatus]) -> None:
    """Print a row for every rank."""
    from roost.report.columns import align
    from roost.report.live_parts import accelerators_of, doing, headline, last_errors, one_line

    if not jobs:
        print_view("no Roost job runs on this Ray")
    for job in jobs:
        print_view(headline(job))
        rows = [["  group", "rank", "node", "address", "accelerators", "process", "state"]]
        for group in job.groups:
            for worker in group.workers:
                state = f"{doing(worker)}  {one_line(worker.note)}".rstrip()
                rows.append(
                    [
                        f"  {one_line(group.name)}", str(worker.rank), str(worker.node_rank), worker.address or "-",
                        accelerators_of(worker), str(worker.pid or "-"), state,
                    ]
                )  # fmt: skip
        print_view(align(rows) if len(rows) > 1 else "  no groups")
        for line in last_errors(job, 20):
            print_view(f"  last error: {line}")

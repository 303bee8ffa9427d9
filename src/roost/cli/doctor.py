"""``roost doctor``: check that every node can run a job."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from roost.cli.inputs import Formatter
from roost.cli.live import add_address, joined
from roost.cli.output import print_view

__all__ = ["add", "run"]

_DESCRIPTION = """\
Checks every node of a Ray cluster: versions, the number of accelerators according to Ray and to the
driver library, accelerators in use, clocks, ports, interpreters. A failed check says why, and what to
do. The exit code is 1 if a check failed.

  roost doctor
  roost doctor --address 10.0.0.1:6379
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("doctor", help="check every node", description=_DESCRIPTION, formatter_class=Formatter)
    add_address(parser)
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    with joined(args):
        from roost.cluster.connect import alive_nodes
        from roost.cluster.doctor import examine
        from roost.cluster.nodes import measure_nodes, order_nodes

        nodes = order_nodes(measure_nodes(alive_nodes(), 60.0))
        checks = examine(nodes)
    from rich.text import Text

    from roost.report.columns import align

    rows: list[list[Text | str]] = [["node", "address", "what", "", "found"]]
    for check in checks:
        mark = Text("ok", style="green") if check.is_well else Text("WRONG", style="bold red")
        rows.append([str(check.node_rank), nodes[check.node_rank].address, check.question, mark, check.finding])
        if check.fix:
            rows.append(["", "", "", "", Text(f"help: {check.fix}", style="green")])
    print_view(align(rows, rule=True))
    wrong = sum(not check.is_well for check in checks)
    print_view(f"\n{len(nodes)} nodes, {len(checks)} checks, {wrong} wrong")
    return 1 if wrong else 0

"""``roost init``: write a first job file."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from roost.cli.files import write_file
from roost.cli.inputs import Formatter, as_usage, read_cluster
from roost.cli.output import print_view

__all__ = ["add", "run"]

_DESCRIPTION = """\
Writes a commented job file for a layout and a cluster. roost plan finds no problems in it.

  roost init
  roost init --layout disaggregated --cluster 4x8:H200 --out job.yaml
  roost init --layout heterogeneous --cluster 2x8

collocated      trainer and engines share all GPUs, and take turns
disaggregated   trainer and engines have separate GPUs
hybrid          any overlap, for trainer, engines and simulators
heterogeneous   node groups for training, generation and robots, with a cluster file and a module beside it
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "init", help="write a job file to start from", description=_DESCRIPTION, formatter_class=Formatter
    )
    choices = ("collocated", "disaggregated", "hybrid", "heterogeneous")
    parser.add_argument(
        "--layout", choices=choices, default="collocated", help="how GPUs are shared; default collocated"
    )
    parser.add_argument("--cluster", default="2x8", metavar="CLUSTER", help="the nodes, such as 2x8; default 2x8")
    parser.add_argument("--out", default="job.yaml", metavar="FILE", help="the file to write; default job.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    from roost.cli.starters import start
    from roost.cli.writing import check_free

    with as_usage("C101"):
        topology = read_cluster(args.cluster)
    folder, name = os.path.split(args.out)
    cluster = args.cluster
    if folder and os.path.exists(cluster):  # relative to the folder of the job file
        cluster = os.path.relpath(cluster, folder)
    starter = start(args.layout, topology, cluster, os.path.splitext(name)[0])
    files = {name: starter.job, **starter.beside}
    for path in files:
        check_free(os.path.join(folder, path), args.force)
    for path, text in files.items():
        write_file(os.path.join(folder, path), text)
        print_view(f"wrote {os.path.join(folder, path)}")
    inputs = f"{name} --cluster {starter.cluster}" + (f" --import {starter.imports}" if starter.imports else "")
    print_view("\nnext:")
    if folder:
        print_view(f"  cd {folder}")
    print_view(f"  roost plan {inputs}")
    process = f"{name} 'actor[0]'"
    print_view(f"  roost explain {inputs.replace(name, process, 1)}")
    print_view("  and a worker for each component, so that 'roost run' has something to launch: docs/how-to/workers.md")
    return 0

"""``roost init``: a job file to start from."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from roost.cli.files import write_file
from roost.cli.inputs import Formatter, as_usage, read_cluster
from roost.cli.output import print_view

__all__ = ["add", "run"]

_DESCRIPTION = """\
Writes a commented job file for a layout and a cluster size, which plans without problems.

  roost init
  roost init --layout disaggregated --cluster 4x8:H200 --out job.yaml
  roost init --layout heterogeneous --cluster 2x8

collocated      trainer and engines share all GPUs, in turn
disaggregated   trainer and engines have GPUs of their own
hybrid          any sets: trainer, engines and simulators
heterogeneous   node groups: training, generation and robots, with a cluster file and a module beside it
"""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "init", help="write a job file to start from", description=_DESCRIPTION, formatter_class=Formatter
    )
    choices = ("collocated", "disaggregated", "hybrid", "heterogeneous")
    parser.add_argument(
        "--layout", choices=choices, default="collocated", help="how GPUs are shared; default collocated"
    )
    parser.add_argument("--cluster", default="2x8", metavar="CLUSTER", help="the machines, such as 2x8; default 2x8")
    parser.add_argument("--out", default="job.yaml", metavar="FILE", help="the file to write; default job.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Runs the command; returns the exit code."""
    from roost.cli.starters import start
    from roost.cli.writing import check_free

    with as_usage("C101"):
        topology = read_cluster(args.cluster)
    folder, name = os.path.split(args.out)
    cluster = args.cluster
    if folder and os.path.exists(cluster):  # as seen from the folder of the job
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

"""``roost schema``: the JSON Schema of job and cluster files, for editors."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from roost.cli.inputs import Formatter

__all__ = ["add", "run"]

_DESCRIPTION = """\
Prints the JSON Schema (2020-12) of the job file or of the cluster file, so that an editor can
complete keys, explain them and mark mistakes.

  roost schema > .roost-job.json
  roost schema cluster > .roost-cluster.json

and at the top of a job file

  # yaml-language-server: $schema=.roost-job.json
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "schema", help="print the JSON Schema of a file, for editors", description=_DESCRIPTION,
        formatter_class=Formatter,
    )  # fmt: skip
    parser.add_argument("file", nargs="?", choices=("job", "cluster"), default="job", help="which file; default job")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    import json

    from roost.config.schema import cluster_schema, job_schema

    schema = cluster_schema() if args.file == "cluster" else job_schema()
    sys.stdout.write(json.dumps(schema, indent=1, ensure_ascii=False) + "\n")
    return 0

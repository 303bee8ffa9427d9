"""The command line. One module per command; each has ``add`` and ``run``."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from roost import __version__
from roost.cli import doctor, explain, plan, run, status, validate
from roost.cli.inputs import Formatter, UsageError
from roost.cli.output import print_error
from roost.errors import RoostError

__all__ = ["main"]

_DESCRIPTION = """\
Roost decides where every worker of a reinforcement-learning job lives.

  roost plan job.yaml --cluster 2x8        show where everything goes
  roost validate job.yaml --cluster 2x8    show everything that is wrong
  roost explain job.yaml 'actor[3]' --cluster 2x8
  roost run job.yaml --cluster 2x8         launch it, here on an embedded Ray
  roost status                             show what runs
  roost doctor                             check every node
"""

_EPILOG = """\
exit codes: 0 launchable, 1 with problems, 2 wrong usage.
Colours follow NO_COLOR and FORCE_COLOR; ROOST_DEBUG=1 shows tracebacks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = ArgumentParser("roost", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=Formatter)
    parser.add_argument("--version", action="version", version=f"roost {__version__}")
    # With prog given, argparse need not format a usage (and load shutil) before it knows the command.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog="roost")
    for command in (plan, validate, explain, run, status, doctor):
        command.add(commands)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except RoostError as error:
        if os.environ.get("ROOST_DEBUG"):
            raise
        print_error(error)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130

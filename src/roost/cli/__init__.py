"""The command line: one module per command, each with ``add`` and ``run``."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from roost import __version__
from roost.cli.inputs import Formatter, UsageError
from roost.cli.output import print_error
from roost.cli.signals import StopSignals
from roost.errors import RoostError, printable

__all__ = ["build_parser", "main"]

_DESCRIPTION = """\
Roost decides where every worker of a reinforcement-learning job lives.

  roost init --layout hybrid --cluster 2x8 write a job file to start from
  roost import verl config.yaml            write that of another system's job
  roost plan job.yaml --cluster 2x8        show where everything goes
  roost validate job.yaml --cluster 2x8    show everything that is wrong
  roost explain job.yaml 'actor[3]' --cluster 2x8
  roost diff job.lock.json job.yaml        show what changes
  roost run job.yaml --cluster 2x8         launch it, here on an embedded Ray
  roost status --watch                     show what runs
  roost trace --out trace.json             a timeline of all calls
  roost doctor                             check every node
"""

_EPILOG = """\
exit codes: 0 launchable, 1 with problems, 2 wrong usage, 130 and 143 stopped by SIGINT and SIGTERM.
Colours follow NO_COLOR and FORCE_COLOR; ROOST_DEBUG=1 shows tracebacks.
"""


_COMMANDS = {
    name: "importing" if name == "import" else name
    for name in [
        "plan",
        "validate",
        "explain",
        "diff",
        "run",
        "status",
        "trace",
        "doctor",
        "init",
        "import",
        "schema",
        "completion",
    ]
}
"""Module of each command, by name."""


class _Parser(ArgumentParser):
    """A parser whose errors quote arguments with control characters spelled out."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def build_parser(command: str = "") -> ArgumentParser:
    """Return the parser of all commands, or of ``command`` alone, so that no other command is loaded."""
    parser = _Parser("roost", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=Formatter)
    parser.add_argument("--version", action="version", version=f"roost {__version__}")
    # With prog given, argparse need not format a usage (and load shutil) before it knows the command.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog="roost")
    for name in [command] if command in _COMMANDS else _COMMANDS:
        importlib.import_module(f"roost.cli.{_COMMANDS[name]}").add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser(arguments[0] if arguments else "").parse_args(arguments)
    with StopSignals() as signals:
        try:
            code: int = args.run(args)
            sys.stdout.flush()
            return code
        except RoostError as error:
            if os.environ.get("ROOST_DEBUG"):
                raise
            print_error(error)
            return signals.exit_code if signals.received else 2 if isinstance(error, UsageError) else 1
        except BrokenPipeError:  # the reader (head, less) has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except KeyboardInterrupt:
            print(f"roost: stopped by {signals.name}", file=sys.stderr)
            return signals.exit_code
        except Exception as error:
            if not signals.received:
                raise
            print(f"roost: error while stopping: {type(error).__name__}: {printable(str(error))}", file=sys.stderr)
            return signals.exit_code

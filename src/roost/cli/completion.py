"""``roost completion``: print a shell completion script."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from roost.cli.inputs import Formatter

__all__ = ["add", "run"]

_DESCRIPTION = """\
Prints a script with which a shell completes commands, options, choices and files.

  bash    source <(roost completion bash)                               in ~/.bashrc
  zsh     source <(roost completion zsh)                                in ~/.zshrc, after compinit
  fish    roost completion fish > ~/.config/fish/completions/roost.fish
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "completion", help="print a script that completes this command", description=_DESCRIPTION,
        formatter_class=Formatter,
    )  # fmt: skip
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that will read it")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    from roost.cli import build_parser
    from roost.cli.shells import script

    sys.stdout.write(script(build_parser(), args.shell))
    return 0

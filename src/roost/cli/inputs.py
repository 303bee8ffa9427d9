"""Read the inputs of commands: a job file, a cluster, and modules that register hardware types."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from roost.config import Config, load_config
from roost.errors import ConfigError, Finding, Fix, RoostError
from roost.source import as_tree
from roost.topology import Topology

__all__ = [
    "Formatter",
    "UsageError",
    "add_inputs",
    "as_usage",
    "import_modules",
    "read_cluster",
    "read_config",
    "read_inputs",
    "set_values",
]

_CLUSTER_HELP = """\
the nodes: a text such as 2x8 (nodes x GPUs), 8x8:H200, 8x8:A800+8x8:4090+2x0, or a cluster file"""


class Formatter(RawDescriptionHelpFormatter):
    """Help with a fixed width of 100: asking the terminal takes a few milliseconds per argument."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=100)


class UsageError(RoostError):
    """The command line is wrong: exit code 2."""


def add_inputs(parser: ArgumentParser, is_cluster_required: bool = True) -> None:
    """Add the arguments that all planning commands share."""
    parser.add_argument("--cluster", required=is_cluster_required, metavar="CLUSTER", help=_CLUSTER_HELP)
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module first, such as one that registers hardware types; may be repeated",
    )
    parser.add_argument(
        "--set",
        dest="values",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the job file, such as cluster.layout.mode=hybrid; may be repeated",
    )


def read_inputs(args: Namespace) -> tuple[Config, Topology]:
    """Return the job and the topology of a command."""
    import_modules(args.modules)
    with as_usage("C101"):
        topology = read_cluster(args.cluster)
        config = read_config(args)
    return config, topology


def read_config(args: Namespace) -> Config:
    """Return the job of a command, with the values of ``--set``."""
    with as_usage("C101"):
        config = load_config(args.job)
    return set_values(config, args.values)


def set_values(config: Config, assignments: Sequence[str]) -> Config:
    """Return a job with overridden values.

    Each assignment is ``KEY=VALUE``, with a dotted path of keys and a value in YAML. Later assignments win. Findings
    about such a value have the place ``--set KEY=VALUE``.

    Raises:
        UsageError: With all invalid assignments (U106).
    """
    if not assignments:
        return config
    from roost.source.yaml import read_value

    tree = as_tree(config)
    findings = []
    for assignment in assignments:
        name = f"--set {assignment if len(assignment) <= 100 else assignment[:99] + '…'}"
        path, sign, text = assignment.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not sign or not all(keys):
            fix = Fix("for example", "--set cluster.layout.mode=hybrid")
            findings.append(Finding("U106", f"{name}: not KEY=VALUE with a dotted path of keys", fixes=(fix,)))
            continue
        try:
            tree = tree.replacing(keys, read_value(text, name))
        except ConfigError as error:
            findings += [Finding("U106", f"{name}: {finding}") for finding in error.findings]
        except LookupError as error:
            findings.append(Finding("U106", f"{name}: {error.args[0]}"))
    if findings:
        raise UsageError(findings)
    return Config(tree)


def import_modules(modules: Sequence[str]) -> None:
    """Import modules that register something, also from the working folder.

    Raises:
        UsageError: If a module cannot be imported (U101).
    """
    if modules and "" not in sys.path:
        sys.path.insert(0, "")
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a module may raise anything when it is loaded
            message = f"--import {module}: {type(error).__name__}: {error}"
            raise UsageError([Finding("U101", message)]) from error


def read_cluster(text: str) -> Topology:
    """Return the topology of ``--cluster``: a cluster file, or a short text."""
    if os.path.exists(text) or text.endswith((".yaml", ".yml", ".json")):
        return Topology.load(text)
    with as_usage("T101"):
        return Topology.parse(text)


@contextmanager
def as_usage(*codes: str) -> Iterator[None]:
    """Turn errors whose findings all have one of these codes into a :class:`UsageError`."""
    try:
        yield
    except UsageError:
        raise
    except RoostError as error:
        if set(error.codes) <= set(codes):
            raise UsageError(error.findings) from error
        raise

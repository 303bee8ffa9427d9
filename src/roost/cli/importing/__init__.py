"""``roost import``: convert configurations of other systems to job files."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from typing import Any

from roost.cli.inputs import Formatter, import_modules
from roost.cli.output import print_notes, print_problems, print_view

__all__ = ["add", "run"]

_DESCRIPTION = """\
Writes a Roost job file that places the same components on the same accelerators. Comments in it list
the settings without a counterpart.

  roost import slime -- --actor-num-nodes 2 --colocate --rollout-num-gpus-per-engine 2
  roost import rlinf config.yaml --out job.yaml
  roost import verl config.yaml -- trainer.nnodes=2
"""
_SYSTEMS = {
    "slime": (
        "the flags of a slime command",
        "FLAG",
        """\
Flags of slime (and of Megatron and SGLang) → cluster.layout. Put them after --; the program before them
may stay: python3 train_async.py … means asynchronous training.

  roost import slime --out job.yaml -- --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4
""",
    ),
    "rlinf": (
        "a configuration of RLinf",
        "CONFIG.yaml",
        """\
A configuration of RLinf → the same cluster section, with what Roost needs beside it. Overrides (key=value)
may follow after --.

  roost import rlinf examples/math/config.yaml --cluster 8x8 --out job.yaml
""",
    ),
    "verl": (
        "a configuration of verl",
        "CONFIG.yaml",
        """\
A configuration of verl, its overrides, or both → components on the accelerators of its resource pools.

  roost import verl config.yaml --out job.yaml
  roost import verl -- trainer.nnodes=2 actor_rollout_ref.rollout.tensor_model_parallel_size=4
""",
    ),
}


class _Parser(ArgumentParser):
    """A parser that passes on everything after ``--`` unchanged."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments before ``--``."""
        args = list(args)
        end = args.index("--") if "--" in args else len(args)
        found, unknown = super().parse_known_args(args[:end], namespace)
        if unknown:
            self.error(f"{unknown[0]} is not an option of roost import: options of the other system go after --")
        found.words = [*found.words, *args[end + 1 :]]
        return found, []


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "import", help="write the job file of another system's job", description=_DESCRIPTION,
        formatter_class=Formatter,
    )  # fmt: skip
    systems = parser.add_subparsers(
        title="systems", metavar="SYSTEM", required=True, prog="roost import", parser_class=_Parser
    )
    for name, (about, metavar, description) in _SYSTEMS.items():
        system = systems.add_parser(
            name, help=about, description=description, formatter_class=Formatter, allow_abbrev=False
        )
        system.add_argument("words", nargs="*", metavar=metavar, help=f"{about}; further ones after --")
        system.add_argument("--out", metavar="FILE", help="the file to write; default: print it")
        system.add_argument("--force", action="store_true", help="overwrite an existing file")
        system.add_argument(
            "--cluster", default="", metavar="CLUSTER", help="the nodes; default: the smallest cluster that fits"
        )
        system.add_argument(
            "--import", dest="modules", action="append", default=[], metavar="MODULE",
            help="import this module first, such as one that registers hardware types; may be repeated",
        )  # fmt: skip
        system.set_defaults(run=run, system=name)


def run(args: Namespace) -> int:
    """Run the command, and return the exit code."""
    from roost.cli.files import write_file
    from roost.cli.importing.parts import complain, raise_found
    from roost.cli.writing import check_free

    import_modules(args.modules)
    if not args.words:
        example = {"slime": "-- --colocate", "rlinf": "config.yaml", "verl": "config.yaml"}[args.system]
        fix = ("for example", f"roost import {args.system} {example}")
        raise_found([complain("U140", f"nothing to import: {_SYSTEMS[args.system][0]} is missing", fixes=[fix])])
    if args.out:
        check_free(args.out, args.force)
    imported = _import(args)
    findings, is_planned = _planned(imported, args.out or "the job file")
    if print_problems(findings):
        return 1
    if not args.out:
        print_view(imported.text.rstrip("\n"))
        return 0
    write_file(args.out, imported.text)
    print_view(f"wrote {args.out}")
    if is_planned:
        print_notes(findings)
    more = "".join(f" --import {module}" for module in args.modules)
    if not is_planned:
        more = " --import MODULE"
        print_view(
            f"register first, in a module: {', '.join(imported.needs)} (docs/how-to/topologies.md#other-hardware)"
        )
    print_view(f"\nnext:\n  roost plan {args.out} --cluster {imported.cluster}{more}")
    return 0


def _import(args: Namespace) -> Any:
    if args.system == "slime":
        from roost.cli.importing.slime import import_slime

        return import_slime(args.words, args.cluster)
    if args.system == "verl":
        from roost.cli.importing.verl import import_verl

        return import_verl(args.words, args.cluster)
    from roost.cli.importing.rlinf import import_rlinf

    return import_rlinf(args.words, args.cluster)


def _planned(imported: Any, name: str) -> tuple[list[Any], bool]:
    """Return the findings of the new file's plan, and whether it could be resolved."""
    from roost.cli.inputs import read_cluster
    from roost.errors import RoostError
    from roost.hardware import hardware_types
    from roost.plan import Plan
    from roost.source.yaml import read_text

    cluster = read_cluster(imported.cluster)
    try:
        return Plan.resolve(read_text(imported.text, os.path.basename(name)), cluster).check(), True
    except RoostError as error:
        missing = set(imported.needs) - set(hardware_types())
        if missing and set(error.codes) == {"C308"}:
            return [], False
        raise

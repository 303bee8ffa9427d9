"""Reaching a live Ray from the command line."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from roost.cli.inputs import UsageError
from roost.errors import Finding, Fix

__all__ = ["add_address", "joined"]


def add_address(parser: ArgumentParser) -> None:
    """Adds the argument that says which Ray is meant."""
    parser.add_argument(
        "--address", metavar="ADDRESS", help="the Ray to ask; default RAY_ADDRESS, else this user's job"
    )


@contextmanager
def joined(args: Namespace) -> Iterator[None]:
    """Joins a Ray that runs; never starts one."""
    import ray

    from roost.cluster.connect import connect, find_job

    address = args.address or os.environ.get("RAY_ADDRESS") or find_job()
    if address is None:
        message = "no Ray is named, and no job of yours runs on this machine"
        fixes = (Fix("say which", "--address 10.0.0.1:6379, or RAY_ADDRESS"),)
        raise UsageError([Finding("U105", message, fixes=fixes)])
    connect(address, "roost-cli", attach=True)
    try:
        yield
    finally:
        ray.shutdown()

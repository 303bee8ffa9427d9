"""Reaching a live Ray from the command line."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from roost.cli.inputs import UsageError
from roost.errors import Finding, Fix

__all__ = ["add_address", "joined", "ray_is_gone"]


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


def ray_is_gone() -> Callable[[], bool]:
    """A function that tells whether the Ray that was joined has ended.

    A process that goes on asking such a Ray is ended by Ray itself, at once and without tidying up.
    """
    import socket

    import ray

    try:
        host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
        place = (host.strip("[]"), int(port))
    except (AttributeError, RuntimeError, ValueError):  # reached through a proxy, which tells itself
        return lambda: False

    def is_gone() -> bool:
        try:
            socket.create_connection(place, timeout=2.0).close()
        except TimeoutError:
            return False  # busy
        except OSError:
            return True
        return False

    return is_gone

"""Connect commands to a running Ray cluster."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from roost.cli.inputs import UsageError
from roost.errors import Finding, Fix

__all__ = ["add_address", "joined", "ray_is_gone"]


def add_address(parser: ArgumentParser) -> None:
    """Add ``--address``."""
    parser.add_argument(
        "--address", metavar="ADDRESS", help="the Ray cluster; default RAY_ADDRESS, else that of this user's job"
    )


@contextmanager
def joined(args: Namespace) -> Iterator[None]:
    """Connect to a running Ray cluster; never start one.

    Raises:
        UsageError: If no address is given or found (U105).
    """
    import ray

    from roost.cluster.connect import connect, find_job

    address = args.address or os.environ.get("RAY_ADDRESS") or find_job()
    if address is None:
        message = "there is no Ray address, and no job of yours runs on this machine"
        fixes = (Fix("give an address", "--address 10.0.0.1:6379, or RAY_ADDRESS"),)
        raise UsageError([Finding("U105", message, fixes=fixes)])
    connect(address, "roost-cli", attach=True)
    try:
        yield
    finally:
        ray.shutdown()


def ray_is_gone() -> Callable[[], bool]:
    """Return a function that tells whether the connected Ray cluster has ended; it takes at most 2 seconds.

    Ray aborts a process that keeps calling a cluster that has ended, without running its cleanup.
    """
    import socket

    import ray

    try:
        host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
        place = (host.strip("[]"), int(port))
    except (AttributeError, RuntimeError, ValueError):  # Ray Client: its proxy reports the end itself
        return lambda: False

    def is_gone() -> bool:
        try:
            socket.create_connection(place, timeout=2.0).close()
        except TimeoutError:
            return False  # no answer in time: it is busy, not gone
        except OSError:
            return True
        return False

    return is_gone

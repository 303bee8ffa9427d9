"""Which Ray a job joins: the one that was asked for, or one of its own. Never another user's."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from roost.cluster.guards import guard_embedded_ray
from roost.cluster.ray_private import local_node
from roost.cluster.runtime_folder import open_private, runtime_folder
from roost.cluster.signals import keep_signal_handlers
from roost.errors import ClusterError, Finding, Fix

__all__ = ["alive_nodes", "connect", "find_job", "forget_job", "remember_job", "wait_for_nodes"]

logger = logging.getLogger("roost")


def connect(address: str | None, namespace: str, attach: bool) -> bool:
    """Connects this process to Ray; returns whether it was this call that did.

    Args:
        address: The Ray that was asked for; ``None``: see ``RAY_ADDRESS``.
        namespace: The namespace of the job.
        attach: Join what runs; never start one.

    Raises:
        ClusterError: Where there is nothing to join, or it does not answer.
    """
    if ray.is_initialized():
        return False
    wanted = address or os.environ.get("RAY_ADDRESS") or None
    if attach and wanted in (None, "local"):  # "local" would start one
        wanted = find_job(namespace)
    if wanted is None and attach:
        message = f"no Roost job runs in the namespace {namespace!r}: there is nothing to attach to"
        fixes = (Fix("start one", "Cluster(num_nodes=1)"), Fix("or say where it runs", "RAY_ADDRESS=10.0.0.1:6379"))
        raise ClusterError([Finding("R102", message, fixes=fixes)])
    try:
        if wanted:
            _check_reachable(wanted)
        with keep_signal_handlers(starts_processes=wanted in (None, "local")):
            ray.init(address=wanted or "local", namespace=namespace, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"cannot join the Ray at {wanted}: {reason}" if wanted else f"Ray cannot be started: {reason}"
        raise ClusterError([Finding("R108", message)]) from error
    if wanted in (None, "local"):
        guard_embedded_ray(local_node().get_session_dir_path(), removes_folder=False)
    return True


def _check_reachable(address: str, timeout_s: float = 5.0) -> None:
    """Ray itself waits for minutes for an address at which nothing listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        return
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def alive_nodes() -> list[Mapping[str, Any]]:
    """The nodes that Ray counts as alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def wait_for_nodes(num_nodes: int, timeout_s: float) -> Sequence[Mapping[str, Any]]:
    """Waits until so many nodes are there, and says on a terminal how far it is.

    Raises:
        ClusterError: Where they are not there in time; it says which are.
    """
    deadline = time.monotonic() + timeout_s
    is_shown = sys.stderr.isatty()
    while True:
        nodes = alive_nodes()
        if len(nodes) >= num_nodes:
            if is_shown and num_nodes > 1:
                sys.stderr.write(f"\r\x1b[Kroost: {len(nodes)} of {num_nodes} nodes\n")
            return nodes
        left = deadline - time.monotonic()
        if left <= 0:
            break
        if is_shown:
            missing = num_nodes - len(nodes)
            sys.stderr.write(f"\r\x1b[Kroost: {len(nodes)} of {num_nodes} nodes, {missing} missing, {left:.0f} s left")
            sys.stderr.flush()
        time.sleep(min(0.2, left))
    there = ", ".join(sorted(str(node["NodeManagerAddress"]) for node in nodes)[:20])
    raise ClusterError(
        [
            Finding(
                "R109",
                f"{num_nodes} nodes are needed, {len(nodes)} registered within {timeout_s:g} s, "
                f"{num_nodes - len(nodes)} are missing",
                context=(f"registered: {there}",),
                fixes=(
                    Fix("on each missing node", f"ray start --address={ray.get_runtime_context().gcs_address}"),
                    Fix("wait longer", "ROOST_NODE_TIMEOUT_S=1800, or Cluster(…, timeout_s=1800)"),
                    Fix("use what is there", f"num_nodes: {len(nodes)}"),
                ),
            )
        ]
    )


# Where jobs of this user on this machine run: so that another process can attach without being told. A note names the
# Ray to join, so it is read from and written to the user's private folder only.


def _notes_folder() -> str:
    """Return the folder of the notes, and create it where it does not exist.

    Raises:
        ClusterError: The private runtime folder cannot be used (R140).
    """
    folder = os.path.join(runtime_folder(), "jobs")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def _note(namespace: str) -> str:
    """The note of this process's job; jobs on different Rays may have the same name."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in namespace)
    return os.path.join(_notes_folder(), f"{safe}.{os.getpid()}.json")


def remember_job(namespace: str, address: str) -> None:
    """Note where the job of a namespace runs. Where that is not possible, log a warning: the job runs without it."""
    # A Ray that was started here may want a token, and says so only to the process that started it.
    mode = os.environ.get("RAY_AUTH_MODE", "")
    note = {"namespace": namespace, "address": address, "pid": os.getpid(), "auth_mode": mode}
    try:
        handle = open_private(_note(namespace), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(note, file)
    except (OSError, ClusterError) as error:
        logger.warning("other processes will not find this job without its address: %s", error)


def find_job(namespace: str | None = None) -> str | None:
    """Return the address of the Ray of this user's newest job whose driver is alive; ``None`` if there is none.

    Notes that are not regular files of this user are passed over.

    Args:
        namespace: Return only a job of this name.

    Raises:
        ClusterError: The private runtime folder cannot be used (R140).
    """
    notes = [entry for entry in os.scandir(_notes_folder()) if entry.name.endswith(".json")]
    for entry in sorted(notes, key=_written, reverse=True):
        try:
            with open(open_private(entry.path, os.O_RDONLY), encoding="utf-8") as file:
                found = json.load(file)
            os.kill(int(found["pid"]), 0)
        except ProcessLookupError:  # it was killed, and could not tidy up
            with contextlib.suppress(OSError):
                os.remove(entry.path)
            continue
        except (ClusterError, OSError, ValueError, KeyError, TypeError):
            continue
        if namespace in (None, found.get("namespace")):
            if found.get("auth_mode"):
                os.environ.setdefault("RAY_AUTH_MODE", str(found["auth_mode"]))
            return str(found.get("address"))
    return None


def _written(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def forget_job(namespace: str) -> None:
    """Removes the note of this process's job."""
    with contextlib.suppress(OSError, ClusterError):
        os.remove(_note(namespace))

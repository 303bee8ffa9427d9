"""Connecting to Ray: the Ray that was asked for, or a new one on this machine; never another user's."""

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

import psutil
import ray

from roost.cluster.guards import guard_embedded_ray
from roost.cluster.ray_private import local_node
from roost.cluster.ray_typed import nodes_of_ray
from roost.cluster.runtime_folder import open_private, runtime_folder
from roost.cluster.signals import keep_signal_handlers
from roost.errors import ClusterError, Finding, Fix

__all__ = ["alive_nodes", "connect", "find_job", "forget_job", "remember_job", "wait_for_nodes"]

logger = logging.getLogger("roost")


def connect(address: str | None, namespace: str, attach: bool) -> bool:
    """Connect this process to Ray unless it is connected; return whether this call connected it.

    Args:
        address: Address of the Ray to join; default ``RAY_ADDRESS``, else a new Ray is started.
        namespace: Namespace of the job.
        attach: Whether to join a running job, and never start a Ray.

    Raises:
        ClusterError: There is no job to attach to (R102), or Ray cannot be joined or started (R108).
    """
    if ray.is_initialized():
        return False
    wanted = address or os.environ.get("RAY_ADDRESS") or None
    if attach and wanted in (None, "local"):  # "local" would start a new Ray
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
    started = local_node() if wanted in (None, "local") else None
    if started is not None:
        guard_embedded_ray(started.get_session_dir_path(), removes_folder=False)
    return True


def _check_reachable(address: str, timeout_s: float = 5.0) -> None:
    """Raise ``OSError`` if nothing listens at an address for ``timeout_s``; Ray itself would wait for minutes."""
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
    """Return the entries of Ray's node table that are alive."""
    return [node for node in nodes_of_ray() if node["Alive"]]


def wait_for_nodes(num_nodes: int, timeout_s: float) -> Sequence[Mapping[str, Any]]:
    """Wait until Ray has ``num_nodes`` nodes; on a terminal, show the progress.

    Raises:
        ClusterError: Fewer nodes registered in time (R109); it lists them.
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
                f"{_missing(num_nodes - len(nodes))}",
                context=(f"registered: {there}",),
                fixes=(
                    Fix("on each missing node", f"ray start --address={ray.get_runtime_context().gcs_address}"),
                    Fix("wait longer", "ROOST_NODE_TIMEOUT_S=1800, or Cluster(…, timeout_s=1800)"),
                    Fix("use what is there", f"num_nodes: {len(nodes)}"),
                ),
            )
        ]
    )


def _missing(count: int) -> str:
    return "1 node is missing" if count == 1 else f"{count} nodes are missing"


# Notes say on which Ray this user's jobs on this machine run, so that another process can attach without an address.
# Whoever writes a note decides which Ray is joined, so notes are kept in the user's private folder only.


def _notes_folder() -> str:
    """Return the folder of the notes, and create it where it does not exist.

    Raises:
        ClusterError: The private runtime folder cannot be used (R140).
    """
    folder = os.path.join(runtime_folder(), "jobs")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def _note(namespace: str) -> str:
    """Return the path of this process's note. It has the pid, since jobs on different Rays may have the same name."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in namespace)
    return os.path.join(_notes_folder(), f"{safe}.{os.getpid()}.json")


def remember_job(namespace: str, address: str) -> None:
    """Write a note with the address of this process's job. If that fails, log a warning: the job runs without a note."""
    # A Ray that this process started may require a token, which only this process knows.
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

    Notes that cannot be read, or are not regular files of this user, are passed over.

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
            is_alive = psutil.pid_exists(int(found["pid"]))
        except (ClusterError, OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("the note %s cannot be used: %s", entry.path, error)
            continue
        if not is_alive:  # the driver was killed, and left its note
            with contextlib.suppress(OSError):
                os.remove(entry.path)
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
    """Remove the note of this process's job."""
    with contextlib.suppress(OSError, ClusterError):
        os.remove(_note(namespace))

"""Log files of servers: one per process, in the folder of the Ray session, where Ray's own tools show them.

This module does not import Ray, so that servers work without it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import time

from roost.cluster.ray_private import local_node
from roost.cluster.runtime_folder import open_private, runtime_folder

__all__ = ["describe_node", "log_folder", "open_log", "plain_name", "remove_old", "session_folder"]

KEPT_S = 7 * 86_400
"""Seconds after its last change until a file outside any Ray session, such as a log, is removed."""
_MAX_NAME = 150


def log_folder() -> str:
    """Return the folder for log files on this node: that of the Ray session, else one in the private runtime folder.

    Raises:
        ClusterError: This process has no Ray, and the private runtime folder cannot be used (R140).
    """
    node = local_node()
    if node is not None:
        return str(node.get_logs_dir_path())
    folder = os.path.join(runtime_folder(), "logs")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    remove_old(folder)
    return folder


def session_folder() -> str:
    """Return the folder of the Ray session on this node, else the private runtime folder.

    Raises:
        ClusterError: See :func:`log_folder`.
    """
    node = local_node()
    return str(node.get_session_dir_path()) if node is not None else runtime_folder()


def plain_name(name: str) -> str:
    """Return a name with only characters that every file system allows."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:_MAX_NAME]


def open_log(name: str) -> tuple[str, int]:
    """Create a log file ``roost-NAMESPACE-NAME-PID.log``; return its path and a descriptor that appends to it.

    Only this user can read the file. The name is new: a further log of this process gets a number.

    Raises:
        ClusterError: See :func:`log_folder`.
        OSError: The file cannot be created.
    """
    namespace = os.environ.get("ROOST_NAMESPACE") or "roost"
    base = os.path.join(log_folder(), f"{plain_name(f'roost-{namespace}-{name}')}-{os.getpid()}")
    number = 1
    while True:
        path = f"{base}.log" if number == 1 else f"{base}.{number}.log"
        try:
            return path, open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        except FileExistsError:
            number += 1


def describe_node() -> str:
    """Return the address of this node as Ray knows it; without a Ray, its host name."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    return platform.node()


def remove_old(folder: str) -> None:
    """Remove the files of a folder that were last changed more than :data:`KEPT_S` ago."""
    oldest = time.time() - KEPT_S
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry.path)

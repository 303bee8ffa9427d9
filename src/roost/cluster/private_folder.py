"""Folders for files and sockets of one process, inside the user's private folder; abandoned ones are removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from roost.cluster.runtime_folder import runtime_folder, temporary_folder

__all__ = ["PrivateFolder"]


class PrivateFolder:
    """A folder with mode 0700 that exists from first use until :meth:`close`.

    The process that made it holds a file lock (``flock``) on it. The kernel releases the lock however that process ends,
    so the next process that makes a folder of the same kind finds abandoned folders, and removes them.

    Args:
        kind: Name of the parent folder, such as ``weights``.
        is_large: Whether files of many gigabytes go there. The folder is then in the temporary directory: the runtime
            directory of a user is often a small file system in memory.
    """

    def __init__(self, kind: str, *, is_large: bool = False) -> None:
        self._kind = kind
        self._base = temporary_folder if is_large else runtime_folder
        self._made: tuple[str, int] | None = None

    def path(self) -> str:
        """Return the path of the folder; the first call makes it.

        Raises:
            ClusterError: The private folder of the user cannot be used (R140).
        """
        if self._made is None:
            parent = Path(self._base(), self._kind)
            parent.mkdir(mode=0o700, exist_ok=True)
            _remove_abandoned(parent)
            while self._made is None:
                self._made = _make(parent)
        return self._made[0]

    def close(self) -> None:
        """Remove the folder. Safe to call twice."""
        if self._made is not None:
            path, lock = self._made
            self._made = None
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _make(parent: Path) -> tuple[str, int] | None:
    """Make a folder and lock it; return ``None`` if another process removed it before it was locked."""
    path = tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent)
    lock = _locked(path)
    if lock is not None and os.path.exists(path):
        return path, lock
    if lock is not None:
        os.close(lock)
    return None


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders that nobody has locked: the processes that made them have ended."""
    for found in parent.iterdir():
        lock = _locked(str(found))
        if lock is not None:
            shutil.rmtree(found, ignore_errors=True)
            os.close(lock)


def _locked(path: str) -> int | None:
    """Lock a folder, and return the descriptor that holds the lock; ``None`` if another process holds it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle

"""The folder that versions are written to: the user's, or one of our own that is removed even after a crash."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from roost.cluster.runtime_folder import runtime_folder

__all__ = ["WeightsFolder"]


class WeightsFolder:
    """Where versions of the weights are written.

    A folder of our own is made on first use, inside the private runtime folder, and its maker holds a file
    lock (``flock``) on it. The kernel releases that lock however the maker ends, so the next process that
    makes such a folder can tell which ones were left behind, and removes them.

    Args:
        given: A folder that the user chose. It is never removed. ``None``: make one.
    """

    def __init__(self, given: str | None = None) -> None:
        self._given = given
        self._own: tuple[str, int] | None = None

    def path(self) -> str:
        """Return the folder's path; make the folder where this is the first call.

        Raises:
            ClusterError: The private runtime folder cannot be used (R140).
        """
        if self._given is not None:
            return self._given
        if self._own is None:
            parent = Path(runtime_folder(), "weights")
            parent.mkdir(mode=0o700, exist_ok=True)
            _remove_abandoned(parent)
            while self._own is None:
                self._own = _make(parent)
        return self._own[0]

    def close(self) -> None:
        """Remove the folder where it is our own. Safe to call twice."""
        if self._own is not None:
            path, lock = self._own
            self._own = None
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _make(parent: Path) -> tuple[str, int] | None:
    """Make a folder and lock it; ``None`` where another process removed it before it was locked."""
    path = tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent)
    lock = _locked(path)
    if lock is not None and os.path.exists(path):
        return path, lock
    if lock is not None:
        os.close(lock)
    return None


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders whose maker has ended."""
    for found in parent.iterdir():
        lock = _locked(str(found))
        if lock is not None:
            shutil.rmtree(found, ignore_errors=True)
            os.close(lock)


def _locked(path: str) -> int | None:
    """Lock a folder, and return the descriptor that holds the lock; ``None`` where another process holds it."""
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

"""A shared page of memory by which the processes of one node report how far the sync of a version is.

Where engines read the trainer's memory in place, a sync is one copy on the device, and consecutive calls between
processes would take as long as the copy. So driver, trainer and engines start at once and wait for each other here.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable

__all__ = ["ABORT", "COMMIT", "FIRST_RANK", "ProgressAddress", "SharedProgress"]

COMMIT, ABORT, FIRST_RANK = 0, 1, 2
"""Slots: version ready to commit, version aborted, then the last finished version of each rank."""

ProgressAddress = tuple[str, bytes]
"""Path of the page on its node, and the random token at its start."""

_TOKEN_BYTES = 16
_FAST_S, _SLOW_S = 0.02, 2.0
"""Seconds of waiting after which the polling interval grows from 20 µs to 1 ms, and from 1 ms to 10 ms."""


class SharedProgress:
    """A version number in each slot. Each slot has one writer; all processes can read it.

    Args:
        ranks: Number of senders and receivers, which have one slot each.
    """

    def __init__(self, ranks: int) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._file = os.memfd_create("roost-progress")
        os.ftruncate(self._file, _TOKEN_BYTES + 8 * (FIRST_RANK + ranks))
        self._memory = mmap.mmap(self._file, _TOKEN_BYTES + 8 * (FIRST_RANK + ranks))
        self._memory[:_TOKEN_BYTES] = self._token

    @property
    def address(self) -> ProgressAddress:
        """Address for :meth:`open` in other processes."""
        return (f"/proc/{os.getpid()}/fd/{self._file}", self._token)

    @classmethod
    def open(cls, address: ProgressAddress) -> SharedProgress | None:
        """Return the page of another process; ``None`` if that process is not on this node."""
        path, token = address
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            return None
        try:
            memory = mmap.mmap(file, 0)
        except (OSError, ValueError):
            os.close(file)
            return None
        if memory[:_TOKEN_BYTES] != token:  # the same process id and file number, but on another node
            memory.close()
            os.close(file)
            return None
        found = cls.__new__(cls)
        found._token, found._file, found._memory = token, file, memory
        return found

    def set(self, slot: int, value: int) -> None:
        """Write a slot."""
        struct.pack_into("<q", self._memory, _TOKEN_BYTES + 8 * slot, value)

    def get(self, slot: int) -> int:
        """Read a slot."""
        value: int = struct.unpack_from("<q", self._memory, _TOKEN_BYTES + 8 * slot)[0]
        return value

    def wait(self, is_done: Callable[[], bool], timeout_s: float, is_over: Callable[[], bool] = bool) -> bool:
        """Block until a condition holds, by polling; return whether it does.

        Args:
            is_done: The condition.
            timeout_s: Seconds to wait.
            is_over: Return early when this is true. It is not checked in the first 20 ms.
        """
        start = time.monotonic()
        while not is_done():
            waited = time.monotonic() - start
            if waited > timeout_s or (waited > _FAST_S and is_over()):
                return is_done()
            time.sleep(2e-5 if waited < _FAST_S else 1e-3 if waited < _SLOW_S else 1e-2)
        return True

    def all_at(self, slots: Iterable[int], version: int) -> bool:
        """Return whether all of these slots have a version."""
        return all(self.get(slot) == version for slot in slots)

    def close(self) -> None:
        """Unmap the page."""
        self._memory.close()
        os.close(self._file)

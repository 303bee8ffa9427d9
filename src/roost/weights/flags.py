"""A page of memory by which the processes of one node tell each other how far a version is.

Where engines read the trainer's own memory, a sync is one copy on the device, and calls between processes
would take as long as that. So all sides are called at once, and wait for each other here.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable

__all__ = ["FIRST", "GO", "STOP", "Flags", "FlagsAddress"]

GO, STOP, FIRST = 0, 1, 2
"""Slots: the version that may be put to use, the one that will not come, and the first of those of ranks."""

FlagsAddress = tuple[str, bytes]
"""Where the page is found on its node, and what it begins with."""

_TOKEN_BYTES = 16
_FAST_S, _SLOW_S = 0.02, 2.0


class Flags:
    """Versions by slot, that one process writes and others wait for.

    Args:
        ranks: How many senders and receivers have a slot.
    """

    def __init__(self, ranks: int) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._file = os.memfd_create("roost-flags")
        os.ftruncate(self._file, _TOKEN_BYTES + 8 * (FIRST + ranks))
        self._memory = mmap.mmap(self._file, _TOKEN_BYTES + 8 * (FIRST + ranks))
        self._memory[:_TOKEN_BYTES] = self._token

    @property
    def address(self) -> FlagsAddress:
        """For :meth:`open`, in other processes."""
        return (f"/proc/{os.getpid()}/fd/{self._file}", self._token)

    @classmethod
    def open(cls, address: FlagsAddress) -> Flags | None:
        """The page of another process, where that is on this node; else nothing."""
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
        if memory[:_TOKEN_BYTES] != token:  # the same process number and file, on another machine
            memory.close()
            os.close(file)
            return None
        found = cls.__new__(cls)
        found._token, found._file, found._memory = token, file, memory
        return found

    def set(self, slot: int, value: int) -> None:
        """Says something."""
        struct.pack_into("<q", self._memory, _TOKEN_BYTES + 8 * slot, value)

    def get(self, slot: int) -> int:
        """What was said."""
        value: int = struct.unpack_from("<q", self._memory, _TOKEN_BYTES + 8 * slot)[0]
        return value

    def wait(self, is_done: Callable[[], bool], timeout_s: float, is_over: Callable[[], bool] = bool) -> bool:
        """Waits until something is so: in short steps at first, later in longer ones.

        Args:
            is_done: What is waited for.
            timeout_s: How long.
            is_over: Asked now and then whether there is no point in waiting any more.
        """
        start = time.monotonic()
        while not is_done():
            waited = time.monotonic() - start
            if waited > timeout_s or (waited > _FAST_S and is_over()):
                return is_done()
            time.sleep(2e-5 if waited < _FAST_S else 1e-3 if waited < _SLOW_S else 1e-2)
        return True

    def all_say(self, slots: Iterable[int], version: int) -> bool:
        """Whether all of these slots say a version."""
        return all(self.get(slot) == version for slot in slots)

    def close(self) -> None:
        """Gives the page back."""
        self._memory.close()
        os.close(self._file)

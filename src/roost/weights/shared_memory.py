"""Weights through memory that sender and receivers have mapped, for processes of one node.

The memory is a memfd, which has no name in any file system: however a process ends, nothing is left behind. Receivers
open it through ``/proc`` of the sender.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

import torch

from roost.weights.buffers import map_bytes, piece_views, write_pieces
from roost.weights.streams import WeightStream

__all__ = ["SharedMemoryReceiver", "SharedMemorySender"]


class SharedMemorySender:
    """The sending endpoint of a stream.

    Attributes:
        address: Path of the memory.
    """

    def __init__(self, stream: WeightStream) -> None:
        self._stream = stream
        self._file = os.memfd_create(f"roost-{stream.id}")
        os.ftruncate(self._file, max(1, stream.nbytes))
        self._memory = mmap.mmap(self._file, max(1, stream.nbytes))
        self._views = piece_views(map_bytes(self._memory), stream.pieces)
        self.address = f"/proc/{os.getpid()}/fd/{self._file}"

    def join(self) -> None:
        """Return at once: receivers need no connection."""

    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Write a version to the memory."""
        write_pieces(self._views, self._stream.pieces, tensors)

    def close(self) -> None:
        """Close the memory. The kernel frees it when no process maps it any more."""
        self._views = []
        os.close(self._file)


class SharedMemoryReceiver:
    """A receiving endpoint of a stream."""

    def __init__(self, stream: WeightStream, address: str) -> None:
        self.stream = stream
        file = os.open(address, os.O_RDWR)
        try:
            self._memory = mmap.mmap(file, max(1, stream.nbytes))
        finally:
            os.close(file)
        self._views = piece_views(map_bytes(self._memory), stream.pieces)

    def begin(self, version: int) -> None:
        """Do nothing: the sender writes to the memory."""

    def finish(self) -> None:
        """Return at once: the caller knows when the sender has written."""

    def staged(self) -> list[torch.Tensor]:
        """Return the pieces of the last version that was sent, without a copy."""
        return self._views

    def close(self) -> None:
        """Unmap the memory."""
        self._views = []

"""Weights through memory that sender and receivers have mapped: for processes of one node.

The memory has no name in any file system, so nothing is left behind however a process ends;
receivers find it through the sender's open file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

import torch

from roost.weights.buffers import map_bytes, piece_views, write_pieces
from roost.weights.channels import Channel

__all__ = ["SharedMemoryReceiver", "SharedMemorySender"]


class SharedMemorySender:
    """The writing end.

    Attributes:
        address: Where receivers find the memory.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._file = os.memfd_create(f"roost-{channel.id}")
        os.ftruncate(self._file, max(1, channel.nbytes))
        self._memory = mmap.mmap(self._file, max(1, channel.nbytes))
        self._views = piece_views(map_bytes(self._memory), channel.pieces)
        self.address = f"/proc/{os.getpid()}/fd/{self._file}"

    def join(self) -> None:
        """Nothing to wait for: the memory is there."""

    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Writes a version."""
        write_pieces(self._views, self._channel.pieces, tensors)

    def close(self) -> None:
        """Gives the memory back once nobody maps it."""
        self._views = []
        os.close(self._file)


class SharedMemoryReceiver:
    """A reading end."""

    def __init__(self, channel: Channel, address: str) -> None:
        self.channel = channel
        file = os.open(address, os.O_RDWR)
        try:
            self._memory = mmap.mmap(file, max(1, channel.nbytes))
        finally:
            os.close(file)
        self._views = piece_views(map_bytes(self._memory), channel.pieces)

    def begin(self, version: int) -> None:
        """Nothing to do: the sender writes by itself."""

    def finish(self) -> None:
        """Nothing to wait for: the sender says when it has written."""

    def staged(self) -> list[torch.Tensor]:
        """The pieces of the last version that was sent."""
        return self._views

    def close(self) -> None:
        """Unmaps the memory."""
        self._views = []

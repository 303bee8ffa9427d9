"""Weights through a file that all sides can read: for engines that share nothing else.

One safetensors file per version holds every tensor in full. Each sender writes its own pieces into
it at their place, so that nobody gathers anything; the file appears under its final name when all
have written.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch

from roost.plan import TensorShards
from roost.plan.shards import ITEM_BYTES
from roost.rl.checkpoint_shapes import DTYPES
from roost.rl.weights.buffers import box_of, dtype_of, map_bytes
from roost.rl.weights.channels import Channel

__all__ = ["FILE_NAME", "FileReceiver", "FileSender", "file_layout", "publish_version", "version_folder"]

FILE_NAME = "model.safetensors"
_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


def version_folder(folder: str, version: int, is_whole: bool = True) -> Path:
    """The folder of a version; another while it is written."""
    return Path(folder) / (f"version-{version}" if is_whole else f".version-{version}")


def publish_version(folder: str, version: int) -> Path:
    """Gives a version that all have written its final name, and removes those before the last."""
    final = version_folder(folder, version)
    shutil.rmtree(final, ignore_errors=True)
    version_folder(folder, version, is_whole=False).rename(final)
    for old in Path(folder).glob("version-*"):
        number = old.name.partition("-")[2]
        if number.isdigit() and int(number) < version - 1:
            shutil.rmtree(old, ignore_errors=True)
    return final


class FileSender:
    """A sender's pieces, in a file that all senders write."""

    def __init__(self, channel: Channel, folder: str, tensors: Sequence[TensorShards]) -> None:
        self._channel = channel
        self._folder = folder
        self._header, self._offsets, self._size = file_layout(tensors)
        self.address = folder

    def join(self) -> None:
        """Nothing to wait for."""

    @torch.no_grad()
    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Writes this sender's pieces of a version."""
        folder = version_folder(self._folder, version, is_whole=False)
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(file, len(self._header) + self._size)
            os.pwrite(file, self._header, 0)  # the same bytes, whoever comes first
            memory = mmap.mmap(file, len(self._header) + self._size)
            flat = map_bytes(memory)
            for piece in self._channel.pieces:
                start = len(self._header) + self._offsets[piece.name]
                nbytes = prod(piece.shape) * dtype_of(piece.dtype).itemsize
                whole = flat[start : start + nbytes].view(dtype_of(piece.dtype)).view(piece.shape)
                box_of(whole, piece.box).copy_(box_of(tensors[piece.name].detach(), piece.source_box))
            memory.flush()
        finally:
            os.close(file)

    def close(self) -> None:
        """Nothing is held between versions."""


class FileReceiver:
    """Reads its pieces of a version's file."""

    def __init__(self, channel: Channel, folder: str) -> None:
        self.channel = channel
        self._folder = folder
        self._version = 0

    def begin(self, version: int) -> None:
        """Notes which version comes."""
        self._version = version

    def finish(self) -> None:
        """Nothing to wait for: the senders say when they have written."""

    def staged(self) -> list[torch.Tensor]:
        """The pieces of the version."""
        from safetensors import safe_open

        path = version_folder(self._folder, self._version) / FILE_NAME
        with safe_open(path, framework="pt") as file:
            return [
                file.get_slice(piece.name)[tuple(slice(*part) for part in piece.box)]
                if piece.shape
                else file.get_tensor(piece.name)
                for piece in self.channel.pieces
            ]

    def close(self) -> None:
        """Nothing is held between versions."""


def file_layout(tensors: Sequence[TensorShards]) -> tuple[bytes, dict[str, int], int]:
    """Header, offset of each tensor behind it, and their size together."""
    entries: dict[str, object] = {}
    offsets: dict[str, int] = {}
    at = 0
    # Large elements first: everything is aligned then.
    for tensor in sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name)):
        size = prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        offsets[tensor.name] = at
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets, at

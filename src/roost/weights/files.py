"""Weights through safetensors files that all sides can read: for engines that share nothing else.

Each rank of the trainer writes the files that :mod:`roost.weights.shard_files` gives it. A version's folder gets
its final name when all files are there, so no reader sees half of a version.

Files are written with ordinary writes: where a disk is full, these raise ``OSError``, while a store to mapped memory
ends the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from roost.cluster.log_files import describe_node
from roost.errors import Finding, Fix, RolloutError
from roost.weights.buffers import box_of, dtype_of
from roost.weights.channels import Channel
from roost.weights.checkpoint import indexed_files
from roost.weights.shard_files import FILE_NAME, INDEX_NAME, FileShard, file_layout, pieces_file

__all__ = ["FileReceiver", "FileWriter", "discard_version", "publish_version", "version_folder", "write_tensor"]

_ROOM = "three versions are there at once: the one being written and the two before it; cut tensors are written twice"
_LARGER = Fix("a folder with room for three versions and the cut tensors", "RolloutManager(…, weights_folder=…)")
_SHARED = Fix("a folder that all nodes share", "RolloutManager(…, weights_folder=…)")


def version_folder(folder: str, version: int, is_whole: bool = True) -> Path:
    """The folder of a version; another while it is written."""
    return Path(folder) / (f"version-{version}" if is_whole else f".version-{version}")


def publish_version(folder: str, version: int, shards: Sequence[FileShard]) -> Path:
    """Give a version its final name, with an index where it has several files; remove all but it and the one before.

    Args:
        folder: Where versions are.
        version: One whose files all ranks have written.
        shards: Those files.

    Raises:
        OSError: A file is missing or has another size than it must have.
    """
    draft, final = version_folder(folder, version, is_whole=False), version_folder(folder, version)
    written = [shard for shard in shards if shard.file]
    for shard in written:
        found = (draft / shard.file).stat().st_size
        if found != shard.nbytes:
            raise OSError(f"{draft / shard.file} of rank {shard.rank} has {found:,} bytes instead of {shard.nbytes:,}")
    if len(written) > 1:
        names = {tensor.name: shard.file for shard in written for tensor in shard.tensors}
        total = sum(file_layout(shard.tensors)[2] for shard in written)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        (draft / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
    expected = {INDEX_NAME, *(shard.file for shard in written)}
    for path in draft.iterdir():
        if path.name not in expected:  # pieces, and what an earlier attempt left
            path.unlink()
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    for old in Path(folder).glob("version-*"):
        number = old.name.partition("-")[2]
        if number.isdigit() and int(number) < version - 1:
            shutil.rmtree(old, ignore_errors=True)
    return final


def discard_version(folder: str, version: int) -> None:
    """Remove what was written of a version that failed: a full disk would stay full."""
    shutil.rmtree(version_folder(folder, version, is_whole=False), ignore_errors=True)


class FileWriter:
    """Writes a rank's files of each version.

    Args:
        shard: What the rank writes.
        folder: Where versions are.
    """

    def __init__(self, shard: FileShard, folder: str) -> None:
        self._shard = shard
        self._folder = folder
        self.nbytes = shard.nbytes if shard.file else 0

    def write(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Write the tensors that this rank has whole, and its pieces of others.

        Raises:
            RolloutError: The files cannot be written, or the folder is not there on this node (S206).
        """
        shard, draft = self._shard, version_folder(self._folder, version, is_whole=False)
        header, offsets, size = file_layout(shard.tensors)
        with self._failures_named(draft):
            self._make(draft)
            if shard.file:
                with open(draft / shard.file, "wb") as file:
                    file.truncate(len(header) + size)
                    file.write(header)
                    for tensor in shard.tensors:
                        if tensor.name in shard.whole:
                            file.seek(len(header) + offsets[tensor.name])
                            write_tensor(file, tensors[tensor.name])
            if shard.pieces:
                with open(draft / shard.pieces_file, "wb") as file:
                    for piece in shard.pieces:
                        write_tensor(file, box_of(tensors[piece.name], piece.source_box))

    def join(self, version: int) -> None:
        """Write the cut tensors of this rank's file, from the pieces that all ranks have written.

        Raises:
            RolloutError: Pieces are missing, or the file cannot be written (S206).
        """
        shard, draft = self._shard, version_folder(self._folder, version, is_whole=False)
        if not shard.joined:
            return
        header, offsets, _ = file_layout(shard.tensors)
        with self._failures_named(draft), contextlib.ExitStack() as stack:
            ranks = {rank for parts in shard.joined.values() for rank, _, _ in parts}
            sources = {rank: stack.enter_context(open(draft / pieces_file(rank), "rb")) for rank in sorted(ranks)}
            target = stack.enter_context(open(draft / shard.file, "r+b"))
            for tensor in shard.tensors:
                if tensor.name in shard.joined:
                    whole = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype))
                    for rank, at, piece in shard.joined[tensor.name]:
                        part = box_of(whole, piece.box)
                        part.copy_(_read_tensor(sources[rank], at, piece.nbytes, piece.dtype).view(part.shape))
                    target.seek(len(header) + offsets[tensor.name])
                    write_tensor(target, whole)

    def _make(self, draft: Path) -> None:
        """Make the folder of a version. The folder that it is in must be there: the driver has made that one."""
        try:
            draft.mkdir(exist_ok=True)
        except FileNotFoundError as error:
            message = (
                f"rank {self._shard.rank} cannot write its weights: {draft.parent} does not exist on its node, "
                f"{describe_node()}, so the folder is not shared between the nodes"
            )
            rule = "the driver makes the folder for weights, and every trainer writes to it"
            raise RolloutError([Finding("S206", message, rule=rule, fixes=(_SHARED,))]) from error

    @contextlib.contextmanager
    def _failures_named(self, draft: Path) -> Iterator[None]:
        """Raise a failure of the file system with the rank, the folder and the room that is left."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            reason += f": {error.filename}" if error.filename else ""
            room = _free_text(draft.parent)
            size = f"{self.nbytes / 2**30:.2f} GiB" if self.nbytes >= 2**25 else f"{self.nbytes / 2**10:.0f} KiB"
            message = f"rank {self._shard.rank} cannot write its weights ({size}) to {draft}: {reason}{room}"
            raise RolloutError([Finding("S206", message, rule=_ROOM, fixes=(_LARGER,))]) from error


class FileReceiver:
    """Reads its pieces of a version's files."""

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

        folder = version_folder(self._folder, self._version)
        problems: list[Finding] = []
        file_of = indexed_files(folder, problems) or {}
        if problems:
            raise RolloutError(problems)
        with contextlib.ExitStack() as stack:
            names = sorted({file_of.get(piece.name, FILE_NAME) for piece in self.channel.pieces})
            files = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in names}
            return [
                files[file_of.get(piece.name, FILE_NAME)].get_slice(piece.name)[
                    tuple(slice(*part) for part in piece.box)
                ]
                if piece.shape
                else files[file_of.get(piece.name, FILE_NAME)].get_tensor(piece.name)
                for piece in self.channel.pieces
            ]

    def close(self) -> None:
        """Nothing is held between versions."""


@torch.no_grad()
def write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Write a tensor's bytes, row by row, where the file stands."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    file.write(memoryview(flat.numpy()))


def _read_tensor(file: BinaryIO, at: int, nbytes: int, dtype: str) -> torch.Tensor:
    memory = bytearray(nbytes)
    file.seek(at)
    found = file.readinto(memory)  # type: ignore[attr-defined]
    if found != nbytes:
        raise OSError(f"{file.name} ends after {at + found:,} bytes; {at + nbytes:,} were expected")
    return torch.frombuffer(memory, dtype=dtype_of(dtype)) if nbytes else torch.empty(0, dtype=dtype_of(dtype))


def _free_text(folder: Path) -> str:
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    return f"; {found.f_bavail * found.f_frsize / 2**30:.2f} GiB are free in {folder}"

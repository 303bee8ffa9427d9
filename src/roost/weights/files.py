"""Weights through safetensors files in a shared folder, for engines that have no faster transport.

Each rank of the trainer writes the files that :mod:`roost.weights.shard_files` assigns to it. A version's folder gets
its final name when all files are complete, so no reader sees a part of a version.

Files are written with ordinary writes: on a full disk these raise ``OSError``, while a store to mapped memory ends the
process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import torch

from roost.cluster.log_files import describe_node
from roost.errors import Finding, Fix, RolloutError
from roost.weights.buffers import box_of, dtype_of
from roost.weights.checkpoint import indexed_files
from roost.weights.shard_files import FILE_NAME, INDEX_NAME, FileShard, file_layout, pieces_file
from roost.weights.streams import Piece, WeightStream

__all__ = ["FileReceiver", "FileWriter", "discard_version", "publish_version", "version_folder", "write_tensor"]

_ROOM_RULE = "the folder holds the version being written and the two before it; sharded tensors are written twice"
_LARGER = Fix(
    "use a folder with room for three versions and the sharded tensors", "RolloutManager(…, weights_folder=…)"
)
_SHARED = Fix("use a folder that all nodes share", "RolloutManager(…, weights_folder=…)")


def version_folder(folder: str, version: int, is_whole: bool = True) -> Path:
    """Return the folder of a version; an incomplete version has another folder."""
    return Path(folder) / (f"version-{version}" if is_whole else f".version-{version}")


def publish_version(folder: str, version: int, shards: Sequence[FileShard]) -> Path:
    """Make a version visible to readers, and remove all versions but this one and the one before.

    A version of several files gets an index.

    Args:
        folder: Folder of all versions.
        version: A version whose files all ranks have written.
        shards: The files of the version.

    Returns:
        The folder of the version.

    Raises:
        OSError: A file is missing or has the wrong size.
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
        if path.name not in expected:  # files of pieces, and leftovers of an earlier attempt
            path.unlink()
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    for old in Path(folder).glob("version-*"):
        number = old.name.partition("-")[2]
        if number.isdigit() and int(number) < version - 1:
            shutil.rmtree(old, ignore_errors=True)
    return final


def discard_version(folder: str, version: int) -> None:
    """Remove the files of a version that failed, so that a full disk does not stay full."""
    shutil.rmtree(version_folder(folder, version, is_whole=False), ignore_errors=True)


class FileWriter:
    """The writer of one rank's files, for each version.

    Args:
        shard: The rank's file and its pieces of other files.
        folder: Folder of all versions.
    """

    def __init__(self, shard: FileShard, folder: str) -> None:
        self._shard = shard
        self._folder = folder
        self.nbytes = shard.nbytes if shard.file else 0

    def write(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Write the unsharded tensors of this rank's file, and its pieces of sharded tensors.

        Raises:
            RolloutError: The files cannot be written, or the folder does not exist on this node (S206).
        """
        shard, draft = self._shard, version_folder(self._folder, version, is_whole=False)
        header, offsets, size = file_layout(shard.tensors)
        with self._errors_explained(draft):
            self._make_folder(draft)
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
        """Write the sharded tensors of this rank's file, from the pieces that all ranks have written.

        Raises:
            RolloutError: Pieces are missing, or the file cannot be written (S206).
        """
        shard, draft = self._shard, version_folder(self._folder, version, is_whole=False)
        if not shard.joined:
            return
        header, offsets, _ = file_layout(shard.tensors)
        with self._errors_explained(draft), contextlib.ExitStack() as stack:
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

    def _make_folder(self, draft: Path) -> None:
        """Make the folder of a version. Its parent must exist: the driver has made it."""
        try:
            draft.mkdir(exist_ok=True)
        except FileNotFoundError as error:
            message = (
                f"rank {self._shard.rank} cannot write its weights: {draft.parent} does not exist on its node, "
                f"{describe_node()}, so the folder is not shared between the nodes"
            )
            rule = "the driver makes the folder for weights, and all ranks of the trainer write to it"
            raise RolloutError([Finding("S206", message, rule=rule, fixes=(_SHARED,))]) from error

    @contextlib.contextmanager
    def _errors_explained(self, draft: Path) -> Iterator[None]:
        """Raise errors of the file system again, with the rank, the folder and the free space."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            reason += f": {error.filename}" if error.filename else ""
            free = _free_text(draft.parent)
            size = f"{self.nbytes / 2**30:.2f} GiB" if self.nbytes >= 2**25 else f"{self.nbytes / 2**10:.0f} KiB"
            message = f"rank {self._shard.rank} cannot write its weights ({size}) to {draft}: {reason}{free}"
            raise RolloutError([Finding("S206", message, rule=_ROOM_RULE, fixes=(_LARGER,))]) from error


class FileReceiver:
    """A receiving endpoint of a stream: reads the pieces from a version's files."""

    def __init__(self, stream: WeightStream, folder: str) -> None:
        self.stream = stream
        self._folder = folder
        self._version = 0

    def begin(self, version: int) -> None:
        """Note the version that :meth:`staged` will read."""
        self._version = version

    def finish(self) -> None:
        """Return at once: the caller knows when the files are complete."""

    def staged(self) -> list[torch.Tensor]:
        """Read and return the pieces of the version."""
        from safetensors import safe_open

        folder = version_folder(self._folder, self._version)
        problems: list[Finding] = []
        file_of = indexed_files(folder, problems) or {}
        if problems:
            raise RolloutError(problems)
        with contextlib.ExitStack() as stack:
            names = sorted({file_of.get(piece.name, FILE_NAME) for piece in self.stream.pieces})
            files = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in names}

            def read(piece: Piece) -> torch.Tensor:
                file = files[file_of.get(piece.name, FILE_NAME)]
                found: torch.Tensor
                if piece.shape:
                    found = file.get_slice(piece.name)[tuple(slice(*part) for part in piece.box)]
                else:  # a tensor without dimensions has no slices
                    found = file.get_tensor(piece.name)
                return found

            return [read(piece) for piece in self.stream.pieces]

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


@torch.no_grad()
def write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Write a tensor's bytes in row-major order at the current position of a file."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    file.write(flat.numpy().data)


def _read_tensor(file: BufferedReader, at: int, nbytes: int, dtype: str) -> torch.Tensor:
    memory = bytearray(nbytes)
    file.seek(at)
    found = file.readinto(memory)
    if found != nbytes:
        raise OSError(f"{file.name} ends after {at + found:,} bytes; {at + nbytes:,} were expected")
    return torch.frombuffer(memory, dtype=dtype_of(dtype)) if nbytes else torch.empty(0, dtype=dtype_of(dtype))


def _free_text(folder: Path) -> str:
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    return f"; {found.f_bavail * found.f_frsize / 2**30:.2f} GiB are free in {folder}"

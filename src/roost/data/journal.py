"""An append-only file of records with checksums, which survives the death of the process that writes it.

The file begins with :data:`MAGIC`. A record is a header of three numbers (length, CRC-32 of the content, CRC-32 of the
first two numbers) and its content. Records that belong together are written with one ``append``, so a process that is
killed leaves at most one torn record, at the end. Data is written to the page cache and not synced to the disk: it
survives the death of the process, but not a crash of the node.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence

from roost.cluster.runtime_folder import open_private
from roost.errors import Finding, Fix, RolloutError

__all__ = ["Journal", "Span", "read_journal"]

MAGIC = b"roost.journal 1\n"
CHUNK = 4 << 20
"""Bytes that a rewrite writes at once."""

Span = tuple[int, int]
"""Offset and length of a record's content in the file, in bytes."""

_HEAD = struct.Struct(">III")
_LENGTHS = struct.Struct(">II")


class Journal:
    """A journal that is open for writing. The first :meth:`rewrite` creates its file, or replaces an existing one.

    Attributes:
        path: Path of the file.
        size: Size of the file in bytes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self._file = -1

    def append(self, contents: Sequence[bytes]) -> list[Span]:
        """Append records, all of them or none; return where each is.

        Raises:
            OSError: The records cannot be written, for example because the disk is full.
        """
        framed, spans = _framed(contents, self.size)
        try:
            _write(self._file, framed)
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(framed)
        return spans

    def read(self, span: Span) -> bytes:
        """Return the content of a record."""
        return os.pread(self._file, span[1], span[0])

    def rewrite(self, contents: Iterable[bytes]) -> list[Span]:
        """Replace all records; return where each new one is. ``contents`` may read the old records of this journal.

        Raises:
            OSError: The new file cannot be written; the old one is unchanged.
        """
        temporary = f"{self.path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        file = open_private(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            _write(file, MAGIC)
            size, spans = len(MAGIC), list[Span]()
            for batch in _batches(contents):
                framed, found = _framed(batch, size)
                _write(file, framed)
                size += len(framed)
                spans += found
            os.replace(temporary, self.path)
        except BaseException:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self.size = file, size
        return spans

    def invalidate(self) -> None:
        """Remove the file, because it is out of date. :meth:`read` still works."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def close(self) -> None:
        """Close the file and remove it. Safe to call twice."""
        if self._file >= 0:
            self.invalidate()
            os.close(self._file)
            self._file = -1


def read_journal(path: str) -> Iterator[bytes | None]:
    """Yield the contents of all complete records, then ``None`` where the last record is torn.

    Raises:
        FileNotFoundError: There is no such file.
        ClusterError: The file is not a regular file of this user (R141).
        RolloutError: The file is not a journal, or is damaged before its end (B112).
    """
    with open(open_private(path, os.O_RDONLY), "rb") as file:
        start = file.read(len(MAGIC))
        if start != MAGIC:
            raise damaged(path, "its first bytes are not those of a journal")
        number = 0
        while head := file.read(_HEAD.size):
            number += 1
            what = f"record {number} at byte {file.tell() - len(head):,} does not match its checksum"
            if len(head) < _HEAD.size:
                yield None
                return
            length, checksum, of_head = _HEAD.unpack(head)
            if zlib.crc32(head[: _LENGTHS.size]) != of_head:
                raise damaged(path, what)
            content = file.read(length)
            if len(content) < length:
                yield None
                return
            if zlib.crc32(content) != checksum:
                raise damaged(path, what)
            yield content


def damaged(path: str, reason: str) -> RolloutError:
    """Return the error of a journal that cannot be used."""
    fix = Fix("remove the journal, to continue without its groups", f"rm {path}")
    return RolloutError([Finding("B112", f"{path} is not an intact journal of a buffer: {reason}", fixes=(fix,))])


def _framed(contents: Sequence[bytes], offset: int) -> tuple[bytearray, list[Span]]:
    framed, spans = bytearray(), []
    for content in contents:
        lengths = _LENGTHS.pack(len(content), zlib.crc32(content))
        framed += lengths
        framed += zlib.crc32(lengths).to_bytes(4, "big")
        spans.append((offset + len(framed), len(content)))
        framed += content
    return framed, spans


def _write(file: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _batches(contents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the contents in lists of about :data:`CHUNK` bytes."""
    batch: list[bytes] = []
    size = 0
    for content in contents:
        batch.append(content)
        size += len(content)
        if size > CHUNK:
            yield batch
            batch, size = [], 0
    yield batch

"""The file of a saved buffer: lines of JSON, with long lists of numbers packed.

The first line names the format, the last one carries the number of lines and a checksum: a file that was
cut off is never taken for a whole one. Nothing in it can run code when it is read.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from roost.errors import Finding, RolloutError
from roost.rl.samples import Sample, SampleGroup

__all__ = ["FORMAT", "VERSION", "pack_group", "read_lines", "unpack_group", "write_lines"]

FORMAT = "roost.buffer"
VERSION = 1

LONG = 32
"""Lists of so many numbers are packed; shorter ones are quicker as they are."""

_INTS = ("prompt_ids", "output_ids", "versions")
_CODES = {"i4": "i", "f8": "d"}


def write_lines(path: Path, header: dict[str, Any], lines: Iterable[dict[str, Any]]) -> None:
    """Writes a whole file or none: beside the target, to the disk, and then in its place."""
    folder = path.parent
    temporary = folder / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            checksum, count = 0, 0
            for line in _texts(header, lines):
                checksum, count = zlib.crc32(line, checksum), count + 1
                file.write(line)
            file.write(_text({"end": True, "lines": count, "crc32": checksum}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise RolloutError([Finding("B106", f"{path} cannot be written: {error}")]) from error
        raise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The header and the lines of a file, checked; the last line is there or it raises."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RolloutError([Finding("B106", f"{path} cannot be read: {error}")]) from error
    lines = content.split(b"\n")
    header = _parsed(lines[0])
    if header is None or header.get("format") != FORMAT:
        message = f"{path} is no saved buffer, or was cut off in its first line"
        raise RolloutError([Finding("B106", message, rule=f'the first line says "format": "{FORMAT}"')])
    if header.get("version") != VERSION:
        message = f"{path} has version {header.get('version')} of the format; this Roost reads version {VERSION}"
        raise RolloutError([Finding("B107", message)])
    last = _parsed(lines[-2]) if len(lines) > 2 and not lines[-1] else None
    if last is None or not last.get("end"):
        raise _damaged(path, f"it ends after {len(content):,} bytes without its last line: it was cut off")
    body = len(content) - len(lines[-2]) - 1
    if last.get("lines") != len(lines) - 2 or last.get("crc32") != zlib.crc32(memoryview(content)[:body]):
        raise _damaged(path, "its checksum does not fit: it was changed or damaged")
    yield header
    for number, line in enumerate(lines[1:-2], 2):
        fields = _parsed(line)
        if fields is None:
            raise _damaged(path, f"line {number} is no JSON object")
        yield fields


def _damaged(path: Path, reason: str) -> RolloutError:
    return RolloutError([Finding("B106", f"{path} is no whole saved buffer: {reason}")])


def _text(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _texts(header: dict[str, Any], lines: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    yield _text({"format": FORMAT, "version": VERSION, **header})
    for fields in lines:
        try:
            yield _text(fields)
        except (TypeError, ValueError, RecursionError) as error:
            group = fields.get("group", {}).get("id")
            message = f"the group {group!r} cannot be saved: {error}"
            rule = "`data` and `extra` hold what JSON can: texts, numbers, lists, mappings with texts as keys"
            raise RolloutError([Finding("B108", message, rule=rule)]) from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where the file system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Groups ------------------------------------------------------------------------------------


def pack_group(group: SampleGroup) -> dict[str, Any]:
    """:meth:`SampleGroup.to_json`, with long lists of numbers packed."""
    samples = []
    for sample in group.samples:
        fields = sample.to_json()
        for name in _INTS:
            fields[name] = _pack(fields[name], "i4")
        fields["logprobs"] = _pack(fields["logprobs"], "f8")
        samples.append(fields)
    return {"id": group.id, "data": group.data, "samples": samples}


def unpack_group(fields: dict[str, Any]) -> SampleGroup:
    """The group that :func:`pack_group` described."""
    samples = []
    for packed in fields["samples"]:
        for name in (*_INTS, "logprobs"):
            packed[name] = _unpack(packed[name])
        samples.append(Sample(**packed))
    return SampleGroup(fields["id"], fields["data"], samples)


def _pack(numbers: list[Any], kind: str) -> Any:
    if len(numbers) < LONG:
        return numbers
    try:
        if type(numbers[0]) is int and numbers.count(numbers[0]) == len(numbers):
            return {"same": numbers[0], "count": len(numbers)}
        packed = array(_CODES[kind], numbers)
    except (AttributeError, TypeError, OverflowError, ValueError):  # no plain numbers, or large ones: as they are
        return numbers
    if sys.byteorder == "big":
        packed.byteswap()
    return {kind: base64.b64encode(packed.tobytes()).decode("ascii")}


def _unpack(packed: Any) -> list[Any]:
    if isinstance(packed, list):
        return packed
    if "same" in packed:
        return [packed["same"]] * packed["count"]
    ((kind, text),) = packed.items()
    numbers = array(_CODES[kind])
    numbers.frombytes(base64.b64decode(text))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()

"""The file format of a saved buffer: JSON lines, with long lists of numbers packed in base64.

The first line names the format. The last line has the number of lines and a checksum, so that a truncated file is
recognized. Reading a file runs no code from it.
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

from roost.data.samples import Sample, SampleGroup
from roost.errors import Finding, RolloutError, counted, shown

__all__ = ["FORMAT", "VERSION", "check_header", "pack_group", "read_lines", "unpack_group", "write_lines"]

FORMAT = "roost.buffer"
VERSION = 1

LONG = 32
"""Lists of at least this many numbers are packed; for shorter ones plain JSON is faster."""

_INTS = ("prompt_ids", "output_ids", "versions")
_CODES = {"i4": "i", "f8": "d"}


def write_lines(path: Path, header: dict[str, Any], lines: Iterable[dict[str, Any]]) -> None:
    """Write a file atomically: write a temporary file, sync it, and rename it.

    Raises:
        RolloutError: The file cannot be written (B106), or a line is not JSON-serializable (B108).
    """
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
    """Yield the header and then the lines of a file, after its checksum was verified.

    Raises:
        RolloutError: The file cannot be read or is damaged (B106), or has another format version (B107).
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RolloutError([Finding("B106", f"{path} cannot be read: {error}")]) from error
    lines = content.split(b"\n")
    header = _parsed(lines[0])
    if header is None or header.get("format") != FORMAT:
        message = f"{path} is not a saved buffer, or was truncated in its first line"
        raise RolloutError([Finding("B106", message, rule=f'the first line has "format": "{FORMAT}"')])
    if header.get("version") != VERSION:
        message = f"{path} has version {header.get('version')} of the format; this Roost reads version {VERSION}"
        raise RolloutError([Finding("B107", message)])
    last = _parsed(lines[-2]) if len(lines) > 2 and not lines[-1] else None
    if last is None or not last.get("end"):
        raise _damaged(path, f"it ends after {len(content):,} bytes without its last line: it was truncated")
    body = len(content) - len(lines[-2]) - 1
    if last.get("lines") != len(lines) - 2 or last.get("crc32") != zlib.crc32(memoryview(content)[:body]):
        raise _damaged(path, "its checksum does not match: it was changed or damaged")
    yield header
    for number, line in enumerate(lines[1:-2], 2):
        fields = _parsed(line)
        if fields is None:
            raise _damaged(path, f"line {number} is not a JSON object")
        yield fields


def _damaged(path: Path, reason: str) -> RolloutError:
    return RolloutError([Finding("B106", f"{path} is not an intact saved buffer: {reason}")])


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
            rule = "`data` and `extra` hold JSON values: strings, numbers, lists, mappings with strings as keys"
            raise RolloutError([Finding("B108", message, rule=rule)]) from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power failure; file systems that cannot sync a folder are left as they are."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Groups ------------------------------------------------------------------------------------


def pack_group(group: SampleGroup) -> dict[str, Any]:
    """Return the group as :meth:`SampleGroup.to_json` does, with long lists of numbers packed.

    Raises:
        RolloutError: A sample has a value that :func:`unpack_group` would refuse (B108).
    """
    samples = []
    for number, sample in enumerate(group.samples):
        fields = sample.to_json()
        try:
            _check_sample(fields)
        except ValueError as error:
            message = f"the group {group.id!r} cannot be saved: sample {number}: {error}"
            raise RolloutError([Finding("B108", message)]) from None
        for name in _INTS:
            fields[name] = _pack(fields[name], "i4", may_repeat=name == "versions")
        fields["logprobs"] = _pack(fields["logprobs"], "f8")
        samples.append(fields)
    return {"id": group.id, "data": group.data, "samples": samples}


def check_header(header: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    """Return the used ids and the totals from a file's first line.

    Raises:
        ValueError: A value has another type.
    """
    used, totals = header.get("used"), header.get("totals")
    if not isinstance(used, list) or set(map(type, used)) - {str}:
        raise ValueError("used is a list of ids")
    if not isinstance(totals, dict) or any(type(count) is not int or count < 0 for count in totals.values()):
        raise ValueError("totals are integers of at least 0")
    return used, totals


def unpack_group(fields: Any) -> SampleGroup:
    """Return the group that :func:`pack_group` described.

    A damaged file cannot make it allocate more than a small multiple of the file's size.

    Raises:
        ValueError: ``fields`` is not the result of :func:`pack_group`; the message names the sample and the field.
    """
    if not isinstance(fields, dict) or fields.keys() != {"id", "data", "samples"}:
        raise ValueError("a group has the fields id, data and samples")
    if not isinstance(fields["id"], str) or not fields["id"]:
        raise ValueError(f"the id of a group is {shown(fields['id'])}")
    if not isinstance(fields["data"], dict) or not isinstance(fields["samples"], list):
        raise ValueError("data is a mapping, and samples is a list")
    samples = []
    for number, packed in enumerate(fields["samples"]):
        try:
            samples.append(_unpack_sample(packed))
        except ValueError as error:
            raise ValueError(f"sample {number}: {error}") from None
    return SampleGroup(fields["id"], fields["data"], samples)


def _unpack_sample(packed: Any) -> Sample:
    if not isinstance(packed, dict) or packed.keys() != set(Sample.__dataclass_fields__):
        raise ValueError(f"a sample has the fields {', '.join(Sample.__dataclass_fields__)}")
    for name, kind in (("prompt_ids", "i4"), ("output_ids", "i4"), ("logprobs", "f8"), ("versions", "i4")):
        try:
            repeats = len(packed["output_ids"]) if name == "versions" else None
            packed[name] = _unpack(packed[name], kind, repeats)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name} are damaged: {str(error)[:100]}") from None
    _check_sample(packed)
    return Sample(**packed)


def _check_sample(fields: dict[str, Any]) -> None:
    """Raise ``ValueError`` where a field of a sample has another type, or lists have different lengths."""
    for name in (*_INTS, "logprobs"):
        if not isinstance(fields[name], (list, tuple)):
            raise ValueError(f"{name} are {shown(fields[name])}, not a list")
    for name in _INTS:
        if set(map(type, fields[name])) - {int}:
            raise ValueError(f"{name} are integers")
    kinds = set(map(type, fields["logprobs"]))
    if not all(issubclass(kind, (int, float)) and kind is not bool for kind in kinds):  # numpy's float64 is a float
        raise ValueError("logprobs are numbers")
    count = len(fields["output_ids"])
    for name in ("logprobs", "versions"):
        if len(fields[name]) not in (0, count):
            raise ValueError(f"there are {len(fields[name]):,} {name} for {counted(count, 'token')}")
    if min(fields["versions"], default=0) < 0:
        raise ValueError(f"the version {min(fields['versions'])} is negative")
    if type(fields["index"]) is not int or fields["index"] < 0:
        raise ValueError(f"the index is {shown(fields['index'])}")
    if not isinstance(fields["finish_reason"], str):
        raise ValueError(f"the finish_reason is {shown(fields['finish_reason'])}")
    reward = fields["reward"]
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, (int, float))):
        raise ValueError(f"the reward is {shown(reward)}")
    if not isinstance(fields["extra"], dict):
        raise ValueError(f"extra is {shown(fields['extra'])}")


def _pack(numbers: list[Any], kind: str, may_repeat: bool = False) -> Any:
    if len(numbers) < LONG:
        return numbers
    if may_repeat and numbers.count(numbers[0]) == len(numbers):
        return {"same": numbers[0], "count": len(numbers)}
    try:
        packed = array(_CODES[kind], numbers)
    except OverflowError:  # more than 32 bits: leave the numbers unpacked
        return numbers
    if sys.byteorder == "big":
        packed.byteswap()
    return {kind: base64.b64encode(packed.tobytes()).decode("ascii")}


def _unpack(packed: Any, kind: str, repeats: int | None) -> list[Any]:
    """Return a list of numbers. A repeated number must be repeated ``repeats`` times, which bounds the list."""
    if isinstance(packed, list):
        return packed
    if packed.keys() == {"same", "count"}:
        if repeats is None or type(packed["count"]) is not int or packed["count"] != repeats:
            raise ValueError(f"a number repeated {shown(packed['count'])} times")
        return [packed["same"]] * repeats
    if packed.keys() != {kind}:
        raise ValueError(f"the keys are {shown(sorted(packed))}")
    numbers = array(_CODES[kind])
    numbers.frombytes(base64.b64decode(packed[kind], validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()

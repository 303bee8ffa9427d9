"""Messages from the engine to vLLM's workers about weights, as JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from roost.plan import WeightTransport
from roost.weights.streams import Piece, WeightStream

__all__ = ["PACKING", "stream_from_json", "stream_to_json", "tensor_list"]

PACKING = {"packed": True, "packed_buffer_size_bytes": 1 << 30, "packed_num_buffers": 2}
"""How tensors are packed for vLLM's broadcast; must be the same on both sides."""


def stream_to_json(stream: WeightStream, address: str | bytes) -> dict[str, Any]:
    """Return a stream and the address of its memory as a JSON object."""
    where = {"pickled": base64.b64encode(address).decode()} if isinstance(address, bytes) else {"path": address}
    return {
        "id": stream.id,
        "transport": stream.transport.value,
        "nbytes": stream.nbytes,
        "pieces": [asdict(piece) for piece in stream.pieces],
        **where,
    }


def stream_from_json(data: Mapping[str, Any]) -> tuple[WeightStream, str | bytes]:
    """Read such an object; the stream's source and targets are left out."""
    pieces = tuple(Piece(**{name: _tuples(value) for name, value in piece.items()}) for piece in data["pieces"])
    stream = WeightStream(data["id"], WeightTransport(data["transport"]), 0, (0,), pieces, data["nbytes"])
    return stream, base64.b64decode(data["pickled"]) if "pickled" in data else data["path"]


def tensor_list(pieces: Sequence[Piece]) -> dict[str, list[Any]]:
    """Return the names, dtypes and shapes of tensors in vLLM's format."""
    return {
        "names": [piece.name for piece in pieces],
        "dtype_names": [piece.dtype for piece in pieces],
        "shapes": [list(piece.target_shape) for piece in pieces],
    }


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value

"""What the engine tells the workers of vLLM about weights, as JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from roost.plan import WeightTransport
from roost.weights.channels import Channel, Piece

__all__ = ["PACKING", "channel_from_json", "channel_to_json", "tensor_list"]

PACKING = {"packed": True, "packed_buffer_size_bytes": 1 << 30, "packed_num_buffers": 2}
"""How tensors are packed for vLLM's broadcast: both ends must do it alike."""


def channel_to_json(channel: Channel, address: str | bytes) -> dict[str, Any]:
    """A channel, and where its memory is."""
    where = {"pickled": base64.b64encode(address).decode()} if isinstance(address, bytes) else {"path": address}
    return {
        "id": channel.id,
        "kind": channel.kind.value,
        "nbytes": channel.nbytes,
        "pieces": [asdict(piece) for piece in channel.pieces],
        **where,
    }


def channel_from_json(said: Mapping[str, Any]) -> tuple[Channel, str | bytes]:
    """The other way round; who reads and who writes is left out."""
    pieces = tuple(Piece(**{name: _tuples(value) for name, value in piece.items()}) for piece in said["pieces"])
    channel = Channel(said["id"], WeightTransport(said["kind"]), 0, (0,), pieces, said["nbytes"])
    return channel, base64.b64decode(said["pickled"]) if "pickled" in said else said["path"]


def tensor_list(pieces: Sequence[Piece]) -> dict[str, list[Any]]:
    """Names, element types and shapes, as vLLM's own ways want them."""
    return {
        "names": [piece.name for piece in pieces],
        "dtype_names": [piece.dtype for piece in pieces],
        "shapes": [list(piece.target_shape) for piece in pieces],
    }


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value

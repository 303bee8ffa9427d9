"""Assignment of the safetensors files of a version to the ranks of a trainer. The functions are pure.

A version is a folder as Hugging Face's ``save_pretrained`` writes it: one file, or several with an index. Each file has
exactly one writer, because over NFS two nodes that write different bytes of one page overwrite each other.

No rank has the whole of a sharded tensor. Each rank first writes its pieces to a file of its own; then the rank that
owns the tensor reads the pieces and writes the whole tensor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from roost.plan import Sharding, TensorShards, WeightTransport, plan_transfer
from roost.plan.shards import ITEM_BYTES
from roost.weights.checkpoint_shapes import DTYPES
from roost.weights.streams import Piece, make_streams

__all__ = ["FILE_NAME", "INDEX_NAME", "FileShard", "file_layout", "plan_files"]

FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


@dataclass(frozen=True)
class FileShard:
    """One file of a version, and its writer's pieces of other files.

    Attributes:
        rank: Rank of the writer.
        file: Name of the file; empty if the rank writes only pieces.
        tensors: The tensors in the file, each in full.
        whole: Names of those tensors that the writer has in full.
        pieces: The writer's pieces of sharded tensors, in the order of its file of pieces.
        joined: The pieces of each sharded tensor in the file: (rank, offset in that rank's file of pieces, piece).
    """

    rank: int
    file: str
    tensors: tuple[TensorShards, ...]
    whole: frozenset[str]
    pieces: tuple[Piece, ...]
    joined: dict[str, tuple[tuple[int, int, Piece], ...]]

    @property
    def pieces_file(self) -> str:
        """Name of the writer's file of pieces. Loaders do not take it for weights."""
        return pieces_file(self.rank)

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        header, _, size = file_layout(self.tensors)
        return len(header) + size


def pieces_file(rank: int) -> str:
    """Return the name of a rank's file of pieces."""
    return f"pieces-{rank}"


def plan_files(source: Sharding) -> list[FileShard]:
    """Return the files of a version of a trainer's weights.

    Each tensor is in one file, in full. Tensors are distributed so that files have similar sizes; a rank that has
    nothing to write has no entry.
    """
    whole = Sharding(tuple(TensorShards(tensor.name, tensor.shape, tensor.dtype) for tensor in source.tensors))
    held: dict[str, list[tuple[int, int, Piece]]] = {tensor.name: [] for tensor in whole.tensors}
    cut: dict[int, list[Piece]] = {}
    next_offset: dict[int, int] = {}
    for stream in make_streams(plan_transfer(source, whole), lambda *_: WeightTransport.FILE):
        for piece in stream.pieces:
            at = -1
            if not _is_whole(piece):
                at = next_offset.get(stream.source, 0)
                next_offset[stream.source] = at + piece.nbytes
                cut.setdefault(stream.source, []).append(piece)
            held[piece.name].append((stream.source, at, piece))
    owned: dict[int, list[TensorShards]] = {rank: [] for rank in cut}
    load: dict[int, int] = {}
    for tensor in whole.tensors:
        ranks = [rank for rank, _, _ in held[tensor.name]] or [0]  # an empty tensor has no sender
        owner = min(ranks, key=lambda rank: load.get(rank, 0))
        owned.setdefault(owner, []).append(tensor)
        load[owner] = load.get(owner, 0) + prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
    count = sum(1 for tensors in owned.values() if tensors)
    number = 0
    shards = []
    for rank, tensors in sorted(owned.items()):
        number += bool(tensors)
        file = FILE_NAME if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        joined = {t.name: tuple(held[t.name]) for t in tensors if any(at >= 0 for _, at, _ in held[t.name])}
        names = frozenset(tensor.name for tensor in tensors if held[tensor.name] and tensor.name not in joined)
        shards.append(FileShard(rank, file if tensors else "", tuple(tensors), names, tuple(cut.get(rank, ())), joined))
    return shards


def _is_whole(piece: Piece) -> bool:
    return tuple(stop - start for start, stop in piece.box) == piece.shape


def file_layout(tensors: Sequence[TensorShards]) -> tuple[bytes, dict[str, int], int]:
    """Return a file's header, the offset of each tensor behind the header, and the size of all tensors in bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # required by transformers
    offsets: dict[str, int] = {}
    at = 0
    # Large elements first, so that all tensors are aligned.
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

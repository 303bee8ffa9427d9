"""Which rank of a trainer writes which safetensors file of a version. Pure.

A version is a folder such as Hugging Face's ``save_pretrained`` writes: one file, or several with an index. Every
file has exactly one writer. Over NFS, two nodes that write different bytes of one page overwrite each other.

A tensor that is cut over several ranks is whole in the memory of none. Each of them first writes its pieces to a
file of its own, and then the tensor's owner reads them and writes the whole tensor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from roost.plan import Sharding, TensorShards, WeightTransport, plan_transfer
from roost.plan.shards import ITEM_BYTES
from roost.weights.channels import Piece, make_channels
from roost.weights.checkpoint_shapes import DTYPES

__all__ = ["FILE_NAME", "INDEX_NAME", "FileShard", "file_layout", "plan_files"]

FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


@dataclass(frozen=True)
class FileShard:
    """One file of a version, and what its writer has to do for the other files.

    Attributes:
        rank: The rank that writes it.
        file: Its name.
        tensors: What it holds, each tensor whole.
        whole: Names of those that the rank has whole.
        pieces: Pieces of cut tensors that the rank holds, in the order of its file of pieces.
        joined: Where the pieces of each cut tensor of this file are: (rank, first byte in that rank's file of
            pieces, piece).
    """

    rank: int
    file: str
    tensors: tuple[TensorShards, ...]
    whole: frozenset[str]
    pieces: tuple[Piece, ...]
    joined: dict[str, tuple[tuple[int, int, Piece], ...]]

    @property
    def pieces_file(self) -> str:
        """The rank's file of pieces. No loader takes it for weights by its name."""
        return pieces_file(self.rank)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        header, _, size = file_layout(self.tensors)
        return len(header) + size


def pieces_file(rank: int) -> str:
    """Return the name of a rank's file of pieces."""
    return f"pieces-{rank}"


def plan_files(source: Sharding) -> list[FileShard]:
    """Return the files of a version of a trainer's weights.

    Each tensor is written once, in whole. Ranks that hold no tensor of their own to write have no file.
    """
    whole = Sharding(tuple(TensorShards(tensor.name, tensor.shape, tensor.dtype) for tensor in source.tensors))
    held: dict[str, list[tuple[int, int, Piece]]] = {tensor.name: [] for tensor in whole.tensors}
    cut: dict[int, list[Piece]] = {}
    ends: dict[int, int] = {}
    for channel in make_channels(plan_transfer(source, whole), lambda *_: WeightTransport.FILE):
        for piece in channel.pieces:
            at = -1
            if not _is_whole(piece):
                at = ends.get(channel.source, 0)
                ends[channel.source] = at + piece.nbytes
                cut.setdefault(channel.source, []).append(piece)
            held[piece.name].append((channel.source, at, piece))
    owned: dict[int, list[TensorShards]] = {rank: [] for rank in cut}
    load: dict[int, int] = {}
    for tensor in whole.tensors:
        ranks = [rank for rank, _, _ in held[tensor.name]] or [0]  # nobody sends an empty tensor
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
    """Return a file's header, where each tensor begins behind it, and their size together, in bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
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

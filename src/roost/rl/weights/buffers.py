"""Flat bytes as tensors, and pieces of tensors in and out of them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

import torch

from roost.rl.weights.channels import Box, Piece

__all__ = ["box_of", "dtype_of", "map_bytes", "piece_views", "write_pieces"]


def dtype_of(name: str) -> torch.dtype:
    """The element type of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no element type {name!r}")
    return found


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A part of a tensor, as a view."""
    for dim, (start, stop) in enumerate(box):
        if start != 0 or stop != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def map_bytes(memory: mmap.mmap) -> torch.Tensor:
    """Mapped memory as a tensor of bytes, without a copy."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def piece_views(flat: torch.Tensor, pieces: Sequence[Piece], base: int = 0) -> list[torch.Tensor]:
    """Each piece as a view of a flat buffer of bytes that begins at an offset of the channel's."""
    views = []
    for piece in pieces:
        start = piece.offset - base
        shape = [stop - first for first, stop in piece.box]
        views.append(flat[start : start + piece.nbytes].view(dtype_of(piece.dtype)).view(shape))
    return views


@torch.no_grad()
def write_pieces(views: Sequence[torch.Tensor], pieces: Sequence[Piece], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies pieces of a sender's tensors into the views of a buffer."""
    for view, piece in zip(views, pieces, strict=True):
        view.copy_(box_of(tensors[piece.name].detach(), piece.source_box))

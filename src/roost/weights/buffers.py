"""Flat bytes as tensors, and pieces of tensors in and out of them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roost.weights.channels import Box, Piece

__all__ = ["Copies", "StagedTensors", "box_of", "dtype_name", "dtype_of", "map_bytes", "piece_views", "write_pieces"]


STREAM_BYTES = 16 * 2**20
"""On a GPU, tensors of at least so many bytes are copied one by one, and smaller ones by one kernel together."""
STREAMS = 4
"""Several copies at once use a little more of the bandwidth than one after the other."""


def dtype_of(name: str) -> torch.dtype:
    """The element type of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no element type {name!r}")
    return found


def dtype_name(tensor: torch.Tensor) -> str:
    """Such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


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


class StagedTensors(dict[str, torch.Tensor]):
    """Tensors that came by their names. The same object comes again, as long as only values change.

    Attributes:
        kept: What an engine wants to keep with it.
    """

    kept: Any = None


class Copies:
    """Tensors to be copied to others, again and again.

    Args:
        targets: Where to.
        sources: Where from.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        pairs = list(zip(targets, sources, strict=True))
        large = [target.is_cuda and source.is_cuda and target.nbytes >= STREAM_BYTES for target, source in pairs]
        self._large = [pair for pair, is_large in zip(pairs, large, strict=True) if is_large]
        small = [pair for pair, is_large in zip(pairs, large, strict=True) if not is_large]
        self._small = [target for target, _ in small], [source for _, source in small]
        self._device = next((tensor.device for pair in pairs for tensor in pair if tensor.is_cuda), None)
        self._streams = [torch.cuda.Stream(self._device) for _ in range(STREAMS)] if self._large else []

    @torch.no_grad()
    def run(self) -> None:
        """Copies, and returns when everything is there."""
        for number, stream in enumerate(self._streams):
            stream.wait_stream(torch.cuda.current_stream(self._device))  # what puts pieces together may still run
            with torch.cuda.stream(stream):
                for target, source in self._large[number::STREAMS]:
                    target.copy_(source, non_blocking=True)
        if self._small[0]:
            torch._foreach_copy_(*self._small)
        if self._device is not None:
            torch.cuda.synchronize(self._device)

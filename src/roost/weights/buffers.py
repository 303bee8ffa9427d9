"""Flat byte buffers as tensors, and copies of tensor pieces into and out of them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from roost.weights.streams import Box, Piece

__all__ = ["Copies", "StagedTensors", "box_of", "dtype_name", "dtype_of", "map_bytes", "piece_views", "write_pieces"]


LARGE_BYTES = 16 * 2**20
"""On a GPU, tensors of at least this size are copied one by one; smaller ones are copied together by one kernel."""
CUDA_STREAMS = 4
"""CUDA streams for large tensors: concurrent copies use a little more of the bandwidth than consecutive ones."""


def dtype_of(name: str) -> torch.dtype:
    """Return the element type with a name such as ``float32``."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no element type {name!r}")
    return found


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's element type, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a box of a tensor as a view."""
    for dim, (start, stop) in enumerate(box):
        if start != 0 or stop != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def new_cuda_stream(device: torch.device | None) -> torch.cuda.Stream:
    """Return a new CUDA stream. The constructor has no types in torch."""
    make: Callable[[torch.device | None], torch.cuda.Stream] = torch.cuda.Stream
    return make(device)


def map_bytes(memory: mmap.mmap) -> torch.Tensor:
    """Return mapped memory as a tensor of bytes, without a copy."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def piece_views(flat: torch.Tensor, pieces: Sequence[Piece], base: int = 0) -> list[torch.Tensor]:
    """Return each piece as a view of a buffer.

    Args:
        flat: The buffer, a tensor of bytes.
        pieces: The pieces.
        base: Offset of the buffer's first byte in the stream's buffer.
    """
    views = []
    for piece in pieces:
        start = piece.offset - base
        shape = [stop - first for first, stop in piece.box]
        views.append(flat[start : start + piece.nbytes].view(dtype_of(piece.dtype)).view(shape))
    return views


@torch.no_grad()
def write_pieces(views: Sequence[torch.Tensor], pieces: Sequence[Piece], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy pieces of a sender's tensors into the views of a buffer."""
    for view, piece in zip(views, pieces, strict=True):
        view.copy_(box_of(tensors[piece.name].detach(), piece.source_box))


class StagedTensors(dict[str, torch.Tensor]):
    """Received tensors by name. Later versions reuse the object for as long as only the tensors' values change.

    Attributes:
        engine_cache: Data that an engine derives from the tensors and keeps for later versions.
    """

    engine_cache: Any = None


class Copies:
    """A copy of several tensors that can be repeated.

    Args:
        targets: Tensors to copy to.
        sources: Tensors to copy from, in the same order.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        pairs = list(zip(targets, sources, strict=True))
        large = [target.is_cuda and source.is_cuda and target.nbytes >= LARGE_BYTES for target, source in pairs]
        self._large = [pair for pair, is_large in zip(pairs, large, strict=True) if is_large]
        small = [pair for pair, is_large in zip(pairs, large, strict=True) if not is_large]
        self._small = [target for target, _ in small], [source for _, source in small]
        self._device = next((tensor.device for pair in pairs for tensor in pair if tensor.is_cuda), None)
        count = CUDA_STREAMS if self._large else 0
        self._cuda_streams = [new_cuda_stream(self._device) for _ in range(count)]

    @torch.no_grad()
    def run(self) -> None:
        """Copy all tensors; block until the copies are done."""
        for number, stream in enumerate(self._cuda_streams):
            stream.wait_stream(torch.cuda.current_stream(self._device))  # it may still be writing the sources
            with torch.cuda.stream(stream):
                for target, source in self._large[number::CUDA_STREAMS]:
                    target.copy_(source, non_blocking=True)
        if self._small[0]:
            torch._foreach_copy_(*self._small)
        if self._device is not None:
            torch.cuda.synchronize(self._device)

"""Memory of the device, moved to the host and back without anybody noticing.

What is moved are storages, not tensors: views, tied parameters and optimizer state stay what they
are, and only the bytes behind them go. The host's side is one piece of pinned memory, kept between
uses: pinning is slow, copying to and from pinned memory is not.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

__all__ = ["HostCopies", "device_storages"]

ALIGNMENT = 256
TOUCH_BYTES = 64 * 2**20
"""Fresh memory is touched in parts of so many bytes, by several threads: that is most of what pinning costs."""


class HostCopies:
    """Storages that can be sent to the host and called back."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._away: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self._batches = 0

    @property
    def is_offloaded(self) -> bool:
        """Whether something is away."""
        return bool(self._away)

    def offload(self, storages: Iterable[torch.UntypedStorage], meanwhile: Callable[[], object] | None = None) -> int:
        """Copies storages to the host and frees their device memory; returns how many bytes.

        Args:
            storages: What to move.
            meanwhile: Called while the copies are under way.
        """
        moving = [storage for storage in storages if storage._cdata not in self._away]
        sizes = [_aligned(storage.nbytes()) for storage in moving]
        if not moving:
            return 0
        flat = self._host(sum(sizes))
        at = 0
        for storage, size in zip(moving, sizes, strict=True):
            host = flat[at : at + storage.nbytes()]
            host.copy_(_bytes(storage), non_blocking=True)
            self._away[storage._cdata] = (storage, host)
            at += size
        if meanwhile is not None:
            meanwhile()
        _synchronize(moving)
        for storage in moving:
            storage.resize_(0)
        return sum(self._away[storage._cdata][1].nbytes for storage in moving)

    def onload(self) -> int:
        """Brings everything back, bit for bit; returns how many bytes."""
        for storage, host in self._away.values():
            storage.resize_(host.nbytes)
            _bytes(storage).copy_(host, non_blocking=True)
        _synchronize(storage for storage, _ in self._away.values())
        count = sum(host.nbytes for _, host in self._away.values())
        self._away.clear()
        self._batches = 0
        return count

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where the values of a tensor are now: in its host copy while it is away, else in itself."""
        away = self._away.get(tensor.untyped_storage()._cdata)
        if away is None:
            return tensor
        host = away[1].view(tensor.dtype)
        return host.as_strided(tensor.shape, tensor.stride(), host.storage_offset() + tensor.storage_offset())

    def _host(self, nbytes: int) -> torch.Tensor:
        """Host memory for what is sent away now; that of the last time, where it is large enough."""
        if self._batches == len(self._kept):
            self._kept.append(_pinned(nbytes))
        elif self._kept[self._batches].nbytes < nbytes:
            self._kept[self._batches] = torch.empty(0, dtype=torch.uint8)  # not both at once
            self._kept[self._batches] = _pinned(nbytes)
        self._batches += 1
        return self._kept[self._batches - 1]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _pinned(nbytes: int) -> torch.Tensor:
    """Memory of the host, pinned where there is a device that could use that; torch alone would round it up."""
    memory = mmap.mmap(-1, max(1, nbytes))
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    if not torch.cuda.is_available():
        return flat
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(torch.Tensor.zero_, flat.split(TOUCH_BYTES)))
    cudart: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(cudart.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)))
    weakref.finalize(flat, cudart.cudaHostUnregister, flat.data_ptr()).atexit = False
    return flat


def device_storages(
    module: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> list[torch.UntypedStorage]:
    """Every storage of parameters, buffers and optimizer state that is not in host memory already."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors(module, optimizer):
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu" and storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _tensors(module: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    if module is not None:
        yield from module.parameters()
        yield from module.buffers()
    if optimizer is not None:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(storages: Iterable[torch.UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)

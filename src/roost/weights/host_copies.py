"""Offload of device memory to pinned host memory, and back.

Storages are moved, not tensors: tensor objects, views, tied parameters and optimizer state stay the same objects, and
only the bytes behind them move. The pinned host memory is kept between uses, because pinning is slow.
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
"""Bytes of new memory that one thread touches at once. Page faults are most of the cost of pinning."""


class HostCopies:
    """Host copies of offloaded storages."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._offloaded: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self._batches = 0

    @property
    def is_offloaded(self) -> bool:
        """Whether at least one storage is offloaded."""
        return bool(self._offloaded)

    def offload(self, storages: Iterable[torch.UntypedStorage], meanwhile: Callable[[], object] | None = None) -> int:
        """Copy storages to the host and free their device memory; return the number of bytes.

        Args:
            storages: The storages; those that are offloaded already are skipped.
            meanwhile: Called while the copies are in progress.
        """
        moving = [storage for storage in storages if storage._cdata not in self._offloaded]
        sizes = [_aligned(storage.nbytes()) for storage in moving]
        if not moving:
            return 0
        flat = self._host(sum(sizes))
        at = 0
        for storage, size in zip(moving, sizes, strict=True):
            host = flat[at : at + storage.nbytes()]
            host.copy_(_bytes(storage), non_blocking=True)
            self._offloaded[storage._cdata] = (storage, host)
            at += size
        if meanwhile is not None:
            meanwhile()
        _synchronize(moving)
        for storage in moving:
            storage.resize_(0)
        return sum(self._offloaded[storage._cdata][1].nbytes for storage in moving)

    def onload(self) -> int:
        """Copy all storages back to the device, bit for bit; return the number of bytes."""
        for storage, host in self._offloaded.values():
            storage.resize_(host.nbytes)
            _bytes(storage).copy_(host, non_blocking=True)
        _synchronize(storage for storage, _ in self._offloaded.values())
        count = sum(host.nbytes for _, host in self._offloaded.values())
        self._offloaded.clear()
        self._batches = 0
        return count

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's host copy while it is offloaded, else the tensor itself."""
        offloaded = self._offloaded.get(tensor.untyped_storage()._cdata)
        if offloaded is None:
            return tensor
        host = offloaded[1].view(tensor.dtype)
        return host.as_strided(tensor.shape, tensor.stride(), host.storage_offset() + tensor.storage_offset())

    def _host(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory, that of an earlier use if it is large enough."""
        if self._batches == len(self._kept):
            self._kept.append(_pinned(nbytes))
        elif self._kept[self._batches].nbytes < nbytes:
            self._kept[self._batches] = torch.empty(
                0, dtype=torch.uint8
            )  # free the old memory before the new one is allocated
            self._kept[self._batches] = _pinned(nbytes)
        self._batches += 1
        return self._kept[self._batches - 1]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _pinned(nbytes: int) -> torch.Tensor:
    """Return host memory, pinned if there is a GPU. torch's own pinned memory would be rounded up to a power of two."""
    memory = mmap.mmap(-1, max(1, nbytes))
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    if not torch.cuda.is_available():
        return flat
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(torch.Tensor.zero_, torch.split(flat, TOUCH_BYTES)))
    load_cudart: Callable[[], Any] = torch.cuda.cudart
    cudart = load_cudart()
    torch.cuda.check_error(int(cudart.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)))
    weakref.finalize(flat, cudart.cudaHostUnregister, flat.data_ptr()).atexit = False
    return flat


def device_storages(
    module: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> list[torch.UntypedStorage]:
    """Return all storages of parameters, buffers and optimizer state that are on a device."""
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

"""Memory of the device, moved to the host and back without anybody noticing.

What is moved are storages, not tensors: views, tied parameters and optimizer state stay what they
are, and only the bytes behind them go. The host's side is pinned where that is possible, and kept
between uses: pinning is slow, copying out of pinned memory is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

__all__ = ["HostCopies", "device_storages"]


class HostCopies:
    """Storages that can be sent to the host and called back."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    @property
    def is_offloaded(self) -> bool:
        """Whether something is away."""
        return bool(self._away)

    def offload(self, storages: Iterable[torch.UntypedStorage]) -> int:
        """Copies storages to the host and frees their device memory; returns how many bytes."""
        moved = []
        for index, storage in enumerate(storages):
            host = self._host(index, storage.nbytes())
            host.copy_(_bytes(storage), non_blocking=True)
            moved.append((storage, host))
        _synchronize()
        for storage, _ in moved:
            storage.resize_(0)
        self._away += moved
        return sum(host.nbytes for _, host in moved)

    def onload(self) -> int:
        """Brings everything back, bit for bit; returns how many bytes."""
        for storage, host in self._away:
            storage.resize_(host.nbytes)
            _bytes(storage).copy_(host, non_blocking=True)
        _synchronize()
        count = sum(host.nbytes for _, host in self._away)
        self._away.clear()
        return count

    def _host(self, index: int, nbytes: int) -> torch.Tensor:
        """The host's memory for the n-th storage, kept from the last time where it still fits."""
        kept = self._kept.get(index)
        if kept is None or kept.nbytes != nbytes:
            kept = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._kept[index] = kept
        return kept


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


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

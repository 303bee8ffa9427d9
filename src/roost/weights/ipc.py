"""Weights on the same GPU, shared by CUDA IPC.

The sender exports the memory of its tensors once, and receivers keep it mapped. A sync then is one copy on the device.
If a tensor has moved to other memory since, :class:`MovedError` is raised and the stream must be opened again.

Torch frees exported memory when its reference counter is 0. The counter starts at 1, and each release of a mapping
subtracts 1. It is unsigned, so it wraps if two receivers map a handle or one maps it twice, as SGLang does at every
update; the memory is then never freed. If a receiver is killed, the counter stays 1. Therefore receivers are given the
counter of a tensor that is no weight, and the sender sets the counters of its weights to 0 when it closes.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from roost.weights.buffers import box_of
from roost.weights.streams import WeightStream

__all__ = ["DEVICE", "IpcAddress", "IpcReceiver", "IpcSender", "MovedError", "visible_uuids"]

_ARGUMENTS = tuple(inspect.signature(rebuild_cuda_tensor).parameters)
DEVICE = _ARGUMENTS.index("storage_device")
"""Index of the device among the arguments that rebuild a tensor."""
COUNTER = _ARGUMENTS.index("ref_counter_handle")
"""Index of the reference counter: a file name in shared memory, followed by an offset in the file."""
EVENT_NEEDED = _ARGUMENTS.index("event_sync_required")
"""Index of the argument whether to wait for a CUDA event of the sender. Torch opens the event at every mapping and never
closes it."""


class MovedError(RuntimeError):
    """A tensor of the sender is in other memory than when the stream was opened."""


def visible_uuids() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process sees, by index."""
    if not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))


@dataclass(frozen=True)
class IpcAddress:
    """Everything that a receiver needs to map the memory of a sender.

    Attributes:
        uuid: UUID of the GPU.
        handles: For each piece, the arguments of torch's ``rebuild_cuda_tensor``.
        pid: Id of the sender's process.
    """

    uuid: str
    handles: list[tuple[Any, ...]]
    pid: int

    def to_bytes(self) -> bytes:
        """Serialize the address."""
        return pickle.dumps((self.uuid, self.handles, self.pid))

    @classmethod
    def from_bytes(cls, address: bytes) -> IpcAddress:
        """Deserialize an address. It is unpickled, so it must come from a process of the job."""
        return cls(*pickle.loads(address))  # noqa: S301 - from a worker of the same job


class IpcSender:
    """The sending endpoint of a stream: exports the memory of its tensors.

    Attributes:
        address: Serialized :class:`IpcAddress`.
    """

    def __init__(self, stream: WeightStream, weights: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        tensors = weights()
        self._views = [box_of(tensors[piece.name].detach(), piece.source_box) for piece in stream.pieces]
        self._layouts = {piece.name: _layout(tensors[piece.name]) for piece in stream.pieces}
        self._is_void = False
        device = self._views[0].device if self._views else torch.device("cuda")
        torch.cuda.synchronize(device)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        exported = [_exported(view) for view in self._views]
        self._counters = [handle[COUNTER : COUNTER + 2] for handle in exported]
        handles = [_counted_by(handle, _shared_counter(device.index)[1]) for handle in exported]
        self.address = IpcAddress(uuid, handles, os.getpid()).to_bytes()

    def join(self) -> None:
        """Return at once: receivers need no connection."""

    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Block until the GPU has written the tensors. Receivers read them in place.

        Raises:
            MovedError: A tensor is in other memory than when the stream was opened.
        """
        if self._is_void or any(_layout(tensors[name]) != layout for name, layout in self._layouts.items()):
            raise MovedError("the trainer's tensors have moved since they were mapped")
        if self._views:
            torch.cuda.synchronize(self._views[0].device)

    def invalidate_mappings(self) -> None:
        """Note that the tensors' memory was freed: even at the same address, it is other memory now."""
        self._is_void = True

    def close(self) -> None:
        """Stop exporting the memory, so that it is freed with the tensors whatever receivers do. Idempotent."""
        self._views = []
        counters, self._counters = self._counters, []
        for counter in counters:
            torch.UntypedStorage._release_ipc_counter_cuda(*counter)
        if counters:
            _collect_ipc()  # frees tensors that were dropped while they were exported


class IpcReceiver:
    """A receiving endpoint of a stream: maps the sender's memory.

    Attributes:
        pid: Id of the sender's process.
    """

    def __init__(self, stream: WeightStream, address: bytes) -> None:
        self.stream = stream
        found = IpcAddress.from_bytes(address)
        self.pid = found.pid
        index = visible_uuids().index(found.uuid)
        self._views = [_rebuilt(handle, index) for handle in found.handles]

    def begin(self, version: int) -> None:
        """Do nothing: the memory is mapped already."""

    def finish(self) -> None:
        """Return at once: the caller knows when the sender has written."""

    def staged(self) -> list[torch.Tensor]:
        """Return the sender's tensors. They must be copied before the sender changes them."""
        return self._views

    def close(self) -> None:
        """Unmap the memory."""
        self._views = []
        torch.cuda.synchronize()
        _collect_ipc()


def _exported(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Export a tensor's memory; return the arguments of ``rebuild_cuda_tensor``."""
    reduce: Callable[[torch.Tensor], tuple[Any, tuple[Any, ...]]] = reduce_tensor
    return reduce(tensor)[1]


def _collect_ipc() -> None:
    """Free exported memory whose counter is 0. The function has no types in torch."""
    collect: Callable[[], None] = torch.cuda.ipc_collect
    collect()


def _layout(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Return address and strides of a tensor."""
    return tensor.data_ptr(), tensor.stride()


@functools.cache
def _shared_counter(device: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return a tensor, and its reference counter for all receivers of memory of this process.

    The cache keeps the tensor and its counter alive for as long as the process.
    """
    tensor = torch.zeros(1, device=f"cuda:{device}")
    return tensor, _exported(tensor)[COUNTER : COUNTER + 2]


def _counted_by(handle: tuple[Any, ...], counter: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a handle with another counter and without an event: receivers know when the sender has written."""
    changed = list(handle)
    changed[COUNTER : COUNTER + 2] = counter
    changed[EVENT_NEEDED] = False
    return tuple(changed)


def _rebuilt(handle: tuple[Any, ...], device: int) -> torch.Tensor:
    """Return a tensor of another process. The same GPU may have another index in this process."""
    rebuild: Any = rebuild_cuda_tensor
    found: torch.Tensor = rebuild(*handle[:DEVICE], device, *handle[DEVICE + 1 :])
    return found

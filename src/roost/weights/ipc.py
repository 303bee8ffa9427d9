"""Weights on the same GPU, handed over by CUDA IPC.

The sender exports the memory of its own tensors once; receivers map it and keep the mapping. A sync
then is one copy on the device, and nothing else moves. Where the sender's memory has moved since
(its allocator gave a tensor another place), the channel says so and is opened anew.

Torch frees memory that was exported when its counter of receivers is 0. The counter starts at 1, each release
of a mapping subtracts 1, and it is unsigned: where two receivers map a handle, or one maps it twice (SGLang does
at every update), it wraps, and the memory is never freed; where a receiver was killed, it stays 1. So receivers
count down a counter that belongs to no weights, and the sender sets those of its weights to 0 when it closes.
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
from roost.weights.channels import Channel

__all__ = ["DEVICE", "IpcAddress", "IpcReceiver", "IpcSender", "MovedError", "visible_uuids"]

_ARGUMENTS = tuple(inspect.signature(rebuild_cuda_tensor).parameters)
DEVICE = _ARGUMENTS.index("storage_device")
"""Where the device stands among the arguments that rebuild a tensor."""
COUNTER = _ARGUMENTS.index("ref_counter_handle")
"""Where the counter of receivers stands among them: the name of a file in shared memory, and a place in it."""
EVENT_NEEDED = _ARGUMENTS.index("event_sync_required")
"""Whether to wait for an event of the sender. Torch opens it at every mapping, and never closes it."""


class MovedError(RuntimeError):
    """The sender's tensors are not where they were when the channel was opened."""


def visible_uuids() -> tuple[str, ...]:
    """The GPUs that this process sees, in the order of their indices."""
    if not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))


@dataclass(frozen=True)
class IpcAddress:
    """What is needed to map the memory of a sender.

    Attributes:
        uuid: Of the GPU.
        handles: For each piece, the arguments of torch's ``rebuild_cuda_tensor``.
        pid: The process that has the memory.
    """

    uuid: str
    handles: list[tuple[Any, ...]]
    pid: int

    def to_bytes(self) -> bytes:
        """As bytes, for another process."""
        return pickle.dumps((self.uuid, self.handles, self.pid))

    @classmethod
    def from_bytes(cls, address: bytes) -> IpcAddress:
        """Reads them."""
        return cls(*pickle.loads(address))  # noqa: S301 - from a worker of the same job


class IpcSender:
    """The end that has the memory.

    Attributes:
        address: What receivers need to map it.
    """

    def __init__(self, channel: Channel, weights: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        tensors = weights()
        self._views = [box_of(tensors[piece.name].detach(), piece.source_box) for piece in channel.pieces]
        self._layouts = {piece.name: _layout(tensors[piece.name]) for piece in channel.pieces}
        self._is_void = False
        device = self._views[0].device if self._views else torch.device("cuda")
        torch.cuda.synchronize(device)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        exported = [reduce_tensor(view)[1] for view in self._views]
        self._counters = [handle[COUNTER : COUNTER + 2] for handle in exported]
        handles = [_counted_by(handle, _shared_counter(device.index)[1]) for handle in exported]
        self.address = IpcAddress(uuid, handles, os.getpid()).to_bytes()

    def join(self) -> None:
        """Nothing to wait for: the memory is there."""

    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Waits until the tensors are written; receivers read them where they are.

        Raises:
            MovedError: They are somewhere else than when the channel was opened.
        """
        if self._is_void or any(_layout(tensors[name]) != layout for name, layout in self._layouts.items()):
            raise MovedError("the trainer's tensors have moved since they were mapped")
        if self._views:
            torch.cuda.synchronize(self._views[0].device)

    def forget_places(self) -> None:
        """The tensors have left their memory; also where they come back to the same address, it is other memory."""
        self._is_void = True

    def close(self) -> None:
        """Let go of the memory: it is freed with the tensors, whatever receivers did. Safe to call twice."""
        self._views = []
        counters, self._counters = self._counters, []
        for counter in counters:
            torch.UntypedStorage._release_ipc_counter_cuda(*counter)
        if counters:
            torch.cuda.ipc_collect()  # tensors that were dropped while they were exported


class IpcReceiver:
    """An end that has mapped it.

    Attributes:
        pid: The process that has the memory.
    """

    def __init__(self, channel: Channel, address: bytes) -> None:
        self.channel = channel
        found = IpcAddress.from_bytes(address)
        self.pid = found.pid
        index = visible_uuids().index(found.uuid)
        self._views = [_rebuilt(handle, index) for handle in found.handles]

    def begin(self, version: int) -> None:
        """Nothing to do: the sender's memory is the channel."""

    def finish(self) -> None:
        """Nothing to wait for: the sender says when it is written."""

    def staged(self) -> list[torch.Tensor]:
        """The sender's own tensors: copy them before the sender writes again."""
        return self._views

    def close(self) -> None:
        """Unmaps the memory."""
        self._views = []
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()


def _layout(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Where a tensor is, and how it lies there."""
    return tensor.data_ptr(), tensor.stride()


@functools.cache
def _shared_counter(device: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return the counter for all receivers of memory of this process, and the tensor to which it belongs.

    The cache keeps the tensor, and with it the counter, for as long as the process lives.
    """
    tensor = torch.zeros(1, device=f"cuda:{device}")
    return tensor, reduce_tensor(tensor)[1][COUNTER : COUNTER + 2]


def _counted_by(handle: tuple[Any, ...], counter: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a handle with another counter. Receivers wait for no event: the sender says when memory is written."""
    changed = list(handle)
    changed[COUNTER : COUNTER + 2] = counter
    changed[EVENT_NEEDED] = False
    return tuple(changed)


def _rebuilt(handle: tuple[Any, ...], device: int) -> torch.Tensor:
    """A tensor of another process; the same GPU may have another index here."""
    rebuild: Any = rebuild_cuda_tensor
    found: torch.Tensor = rebuild(*handle[:DEVICE], device, *handle[DEVICE + 1 :])
    return found

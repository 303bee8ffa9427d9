"""Weights on the same GPU, handed over by CUDA IPC.

The sender exports the memory of its own tensors once; receivers map it and keep the mapping. A sync
then is one copy on the device, and nothing else moves. Where the sender's memory has moved since
(its allocator gave a tensor another place), the channel says so and is opened anew.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from roost.rl.weights.buffers import box_of
from roost.rl.weights.channels import Channel

__all__ = ["DEVICE", "IpcAddress", "IpcReceiver", "IpcSender", "MovedError", "visible_uuids"]

DEVICE = 6
"""Where the device stands among the arguments that rebuild a tensor."""


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
        self.address = IpcAddress(uuid, [reduce_tensor(view)[1] for view in self._views], os.getpid()).to_bytes()

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
        """Lets go of the memory."""
        self._views = []


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


def _rebuilt(handle: tuple[Any, ...], device: int) -> torch.Tensor:
    """A tensor of another process; the same GPU may have another index here."""
    rebuild: Any = rebuild_cuda_tensor
    found: torch.Tensor = rebuild(*handle[:DEVICE], device, *handle[DEVICE + 1 :])
    return found

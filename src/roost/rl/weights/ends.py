"""The two ends of weight sync, as they live in a trainer's and in an engine's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from roost.plan import TensorShards, WeightTransport
from roost.rl.weights.buffers import box_of, dtype_of
from roost.rl.weights.channels import Channel
from roost.rl.weights.collective import CollectiveReceiver, CollectiveSender, MeetingPoint, join_meeting
from roost.rl.weights.files import FileReceiver, FileSender
from roost.rl.weights.ipc import IpcReceiver, IpcSender
from roost.rl.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender

__all__ = ["Receiver", "Sender", "WeightReceiver", "WeightSender"]


class Sender(Protocol):
    """The writing end of a channel."""

    address: Any

    def join(self) -> None: ...  # noqa: D102
    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Receiver(Protocol):
    """A reading end of a channel: what it receives is staged until it is asked for."""

    channel: Channel

    def begin(self, version: int) -> None: ...  # noqa: D102
    def finish(self) -> None: ...  # noqa: D102
    def staged(self) -> list[torch.Tensor]: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class WeightSender:
    """All channels that a trainer's rank writes.

    Args:
        channels: Those channels.
        tensors: All tensors of the trainer, for files that hold them in full.
        host: Address of this node.
        folder: Where files go.
        timeout_s: How long the other ends are waited for.
        weights: The tensors of this rank, for channels that hand over their memory.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        tensors: Sequence[TensorShards],
        host: str,
        folder: str,
        timeout_s: float,
        weights: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self._channels = list(channels)
        self._ends: list[Sender] = []
        self._meeting: MeetingPoint | None = None
        for channel in self._channels:
            if channel.kind is WeightTransport.FILE:
                self._ends.append(FileSender(channel, folder, tensors))
            elif channel.kind is WeightTransport.BROADCAST:
                self._meeting = self._meeting or MeetingPoint(host, timeout_s)
                self._ends.append(CollectiveSender(channel, self._meeting))
            elif channel.kind is WeightTransport.IPC:
                self._ends.append(IpcSender(channel, weights))
            else:
                self._ends.append(SharedMemorySender(channel))

    @property
    def addresses(self) -> dict[str, Any]:
        """Where the other ends find each channel, by its id."""
        return {channel.id: end.address for channel, end in zip(self._channels, self._ends, strict=True)}

    def join(self) -> None:
        """Waits until the other ends are there."""
        for end in self._ends:
            end.join()

    def send(self, weights: Callable[[], Mapping[str, torch.Tensor]], version: int) -> int:
        """Sends a version; returns how many bytes. What fails closes all channels: nobody waits in vain."""
        try:
            tensors = weights() if self._ends else {}
            for end in self._ends:
                end.send(tensors, version)
        except BaseException:
            self.close()
            raise
        return sum(channel.nbytes for channel in self._channels)

    def close(self) -> None:
        """Closes all channels."""
        for end in self._ends:
            end.close()
        self._ends.clear()
        if self._meeting is not None:
            self._meeting.close()


class WeightReceiver:
    """All channels that an engine's member reads.

    Args:
        channels: Those channels.
        addresses: Where each is found, by its id.
        rank: Rank of this member among all receivers.
        host: Address of this node.
        timeout_s: How long the other ends are waited for.
    """

    def __init__(
        self, channels: Sequence[Channel], addresses: Mapping[str, Any], rank: int, host: str, timeout_s: float
    ) -> None:
        self._ends: list[Receiver] = []
        self._whole: dict[str, torch.Tensor] = {}
        stores: dict[str, Any] = {}
        for channel in channels:
            address = addresses[channel.id]
            if channel.kind is WeightTransport.FILE:
                self._ends.append(FileReceiver(channel, address))
            elif channel.kind is WeightTransport.BROADCAST:
                number = 1 + channel.targets.index(rank)
                if address not in stores:
                    stores[address] = join_meeting(address, timeout_s)
                self._ends.append(CollectiveReceiver(channel, stores[address], number, host, timeout_s))
            elif channel.kind is WeightTransport.IPC:
                self._ends.append(IpcReceiver(channel, address))
            else:
                self._ends.append(SharedMemoryReceiver(channel, address))

    def receive(self, version: int) -> None:
        """Waits for what must be waited for. All channels are read at once, so that senders never block each other."""
        for end in self._ends:
            end.begin(version)
        for end in self._ends:
            end.finish()

    def staged(self) -> dict[str, torch.Tensor]:
        """The tensors that came, by name; those that came in pieces are put together."""
        found: dict[str, torch.Tensor] = {}
        for end in self._ends:
            for piece, tensor in zip(end.channel.pieces, end.staged(), strict=True):
                if tuple(tensor.shape) == piece.target_shape:
                    found[piece.name] = tensor
                    continue
                whole = self._whole.get(piece.name)
                if whole is None:
                    whole = self._whole[piece.name] = torch.empty(piece.target_shape, dtype=dtype_of(piece.dtype))
                box_of(whole, piece.target_box).copy_(tensor)
                found[piece.name] = whole
        return found

    def close(self) -> None:
        """Closes all channels."""
        for end in self._ends:
            end.close()
        self._ends.clear()

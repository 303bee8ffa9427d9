"""The two ends of weight sync, as they live in a trainer's and in an engine's process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from roost.plan import WeightTransport
from roost.weights.borrowed import Lender
from roost.weights.buffers import StagedTensors, box_of, dtype_of
from roost.weights.channels import Channel
from roost.weights.collective import CollectiveReceiver, CollectiveSender, MeetingPoint, join_meeting
from roost.weights.files import FileReceiver, FileWriter
from roost.weights.ipc import IpcReceiver, IpcSender
from roost.weights.shard_files import FileShard
from roost.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from roost.weights.stoppable import Stoppable

__all__ = ["Receiver", "Sender", "WeightReceiver", "WeightSender"]


class Sender(Protocol):
    """The writing end of a channel.

    ``close`` may be called from another thread while ``join`` or ``send`` runs, and makes these end where the library
    can do that. It can be called again.
    """

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


def direct_sender(channel: Channel, host: str, timeout_s: float) -> Sender:
    """Return the trainer's end of a broadcast that an engine's own processes join: the class that the engine names."""
    module, _, name = channel.sender.partition(":")
    made: Sender = getattr(importlib.import_module(module), name)(channel, host, timeout_s)
    return made


class WeightSender:
    """All channels that a trainer's rank writes.

    Args:
        channels: Those channels.
        shard: What this rank writes of the files of a version; ``None`` where there are none.
        host: Address of this node.
        folder: Where files go.
        timeout_s: How long the other ends are waited for.
        weights: The tensors of this rank, for channels that hand over their memory.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        shard: FileShard | None,
        host: str,
        folder: str,
        timeout_s: float,
        weights: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self._channels = list(channels)
        self._timeout_s = timeout_s
        self._calls = Stoppable()
        self._ends: list[Sender] = []
        self._meeting: MeetingPoint | None = None
        self._file = FileWriter(shard, folder) if shard is not None else None
        for channel in self._channels:
            if channel.is_direct:
                self._ends.append(direct_sender(channel, host, timeout_s))
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
        """Wait until the other ends are there.

        Raises:
            RolloutError: They are not there in time, or :meth:`stop` was called (S207). All channels are closed.
        """
        try:
            for channel, end in zip(self._channels, self._ends, strict=True):
                self._run(channel, end, end.join, "the start of the broadcast")
        except BaseException:
            self.close()
            raise

    def _run(self, channel: Channel, end: Sender, action: Callable[[], None], what: str) -> None:
        """Run a call that may wait for other processes."""
        if channel.kind is WeightTransport.BROADCAST:
            count = len(channel.targets)
            what = f"{what} {channel.id} to {count} engine process{'es' if count > 1 else ''}"
            self._calls.run(action, end.close, self._timeout_s, what)
        else:
            action()

    def stop(self, reason: str) -> None:
        """Give up a :meth:`join` or :meth:`send` that runs in another thread; does not wait for it."""
        self._calls.stop(reason)

    def send(self, weights: Callable[[], Mapping[str, torch.Tensor]], version: int, is_direct: bool = False) -> int:
        """Sends a version; returns how many bytes. What fails closes all channels: nobody waits in vain.

        Args:
            weights: The tensors of this rank.
            version: Of them.
            is_direct: Whether now is the turn of the channels that stage nothing, or of the others.

        Raises:
            RolloutError: A broadcast did not end in time, or :meth:`stop` was called (S207).
        """
        if len(self._ends) != len(self._channels):
            raise RuntimeError("the channels of this rank were closed")
        sent = 0
        try:
            tensors = weights() if self._ends or self._file is not None else {}
            for channel, end in zip(self._channels, self._ends, strict=True):
                if channel.is_direct is is_direct:
                    self._run(
                        channel, end, partial(end.send, tensors, version), f"version {version} over the broadcast"
                    )
                    sent += channel.nbytes
            if self._file is not None and not is_direct:
                self._file.write(tensors, version)
                sent += self._file.nbytes
        except BaseException:
            self.close()
            raise
        return sent

    def join_pieces(self, version: int) -> None:
        """Write this rank's tensors that are cut over several ranks, once all of these have written their pieces."""
        if self._file is not None:
            self._file.join(version)

    def close(self) -> None:
        """Closes all channels."""
        for end in self._ends:
            end.close()
        self._ends.clear()
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None

    def forget_places(self) -> None:
        """The memory of the tensors was given up: what has mapped it must map it anew, wherever it will be."""
        for end in self._ends:
            if isinstance(end, IpcSender):
                end.forget_places()


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
        self._views: list[list[torch.Tensor]] = []
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._staged = StagedTensors()
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

    def staged(self) -> StagedTensors:
        """The tensors that came, by name; those that came in pieces are put together.

        The same mapping comes again as long as it has the same tensors.
        """
        views = [end.staged() for end in self._ends]
        if len(views) == len(self._views) and all(a is b for a, b in zip(views, self._views, strict=True)):
            for target, part in self._pieces:
                target.copy_(part)
            return self._staged
        self._views, self._pieces, self._staged = views, [], StagedTensors()
        for end, tensors in zip(self._ends, views, strict=True):
            for piece, tensor in zip(end.channel.pieces, tensors, strict=True):
                if tuple(tensor.shape) == piece.target_shape:
                    self._staged[piece.name] = tensor
                    continue
                whole = self._staged.get(piece.name)
                if whole is None:
                    whole = torch.empty(piece.target_shape, dtype=dtype_of(piece.dtype), device=tensor.device)
                    self._staged[piece.name] = whole
                target = box_of(whole, piece.target_box)
                target.copy_(tensor)
                self._pieces.append((target, tensor))
        return self._staged

    def lender(self) -> Lender | None:
        """The process whose memory the staged tensors are, where they all are one's."""
        pids = {end.pid for end in self._ends if isinstance(end, IpcReceiver)}
        if len(pids) != 1 or not all(isinstance(end, IpcReceiver) for end in self._ends):
            return None
        self.staged()
        return None if self._pieces else Lender(pids.pop())

    def close(self) -> None:
        """Closes all channels."""
        for end in self._ends:
            end.close()
        self._ends.clear()
        self._views, self._pieces, self._staged = [], [], StagedTensors()

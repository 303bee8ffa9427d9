"""The endpoints of weight streams in the processes of trainers and engines."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from roost.plan import WeightTransport
from roost.weights.aliasing import MemoryOwner
from roost.weights.buffers import StagedTensors, box_of, dtype_of
from roost.weights.collective import CollectiveReceiver, CollectiveSender, Rendezvous, join_rendezvous
from roost.weights.files import FileReceiver, FileWriter
from roost.weights.ipc import IpcReceiver, IpcSender
from roost.weights.shard_files import FileShard
from roost.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from roost.weights.stoppable import Stoppable
from roost.weights.streams import WeightStream

__all__ = ["Receiver", "Sender", "WeightReceiver", "WeightSender"]


class Sender(Protocol):
    """The sending endpoint of a stream.

    Attributes:
        address: Picklable address for the receivers.
    """

    address: Any

    def join(self) -> None:
        """Block until all receivers are connected."""
        ...

    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Send a version; block until the tensors may be changed again."""
        ...

    def close(self) -> None:
        """Release the endpoint. Idempotent.

        Another thread may call it while :meth:`join` or :meth:`send` runs; these then raise where the library supports
        it.
        """
        ...


class Receiver(Protocol):
    """A receiving endpoint of a stream. A version is staged beside the weights in use.

    Attributes:
        stream: The stream.
    """

    stream: WeightStream

    def begin(self, version: int) -> None:
        """Start to receive a version. Does not block."""
        ...

    def finish(self) -> None:
        """Block until the version is received."""
        ...

    def staged(self) -> list[torch.Tensor]:
        """Return the pieces of the last version, in the order of the stream."""
        ...

    def close(self) -> None:
        """Release the endpoint."""
        ...


def direct_sender(stream: WeightStream, host: str, timeout_s: float) -> Sender:
    """Return the sender for a broadcast that an engine's own processes join. The engine names the class."""
    module, _, name = stream.sender.partition(":")
    made: Sender = getattr(importlib.import_module(module), name)(stream, host, timeout_s)
    return made


class WeightSender:
    """The sending endpoints of one rank of a trainer.

    Args:
        streams: The streams that this rank sends.
        shard: The files of each version that this rank writes; ``None`` where it writes none.
        host: Address of this node.
        folder: Folder for files.
        timeout_s: Seconds to wait for the receivers of a broadcast.
        weights: Returns the tensors of this rank, for streams that share the tensors' memory.
    """

    def __init__(
        self,
        streams: Sequence[WeightStream],
        shard: FileShard | None,
        host: str,
        folder: str,
        timeout_s: float,
        weights: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self._streams = list(streams)
        self._timeout_s = timeout_s
        self._calls = Stoppable()
        self._endpoints: list[Sender] = []
        self._rendezvous: Rendezvous | None = None
        self._file = FileWriter(shard, folder) if shard is not None else None
        for stream in self._streams:
            if stream.is_direct:
                self._endpoints.append(direct_sender(stream, host, timeout_s))
            elif stream.transport is WeightTransport.BROADCAST:
                self._rendezvous = self._rendezvous or Rendezvous(host, timeout_s)
                self._endpoints.append(CollectiveSender(stream, self._rendezvous))
            elif stream.transport is WeightTransport.IPC:
                self._endpoints.append(IpcSender(stream, weights))
            else:
                self._endpoints.append(SharedMemorySender(stream))

    @property
    def addresses(self) -> dict[str, Any]:
        """Addresses of the endpoints by stream id."""
        return {stream.id: endpoint.address for stream, endpoint in zip(self._streams, self._endpoints, strict=True)}

    def join(self) -> None:
        """Block until all receivers are connected.

        Raises:
            RolloutError: A receiver did not connect in time, or :meth:`stop` was called (S207). All endpoints are
                closed.
        """
        try:
            for stream, endpoint in zip(self._streams, self._endpoints, strict=True):
                self._run(stream, endpoint, endpoint.join, "the start of the broadcast")
        except BaseException:
            self.close()
            raise

    def _run(self, stream: WeightStream, endpoint: Sender, action: Callable[[], None], what: str) -> None:
        """Run a call of an endpoint; where it waits for other processes, with a timeout."""
        if stream.transport is WeightTransport.BROADCAST:
            count = len(stream.targets)
            what = f"{what} {stream.id} to {count} engine process{'es' if count > 1 else ''}"
            self._calls.run(action, endpoint.close, self._timeout_s, what)
        else:
            action()

    def stop(self, reason: str) -> None:
        """Abort a :meth:`join` or :meth:`send` that runs in another thread, without waiting for its end."""
        self._calls.stop(reason)

    def send(self, weights: Callable[[], Mapping[str, torch.Tensor]], version: int, is_direct: bool = False) -> int:
        """Send a version; return the number of bytes. A failure closes all endpoints, so that no receiver waits on.

        Args:
            weights: Returns the tensors of this rank.
            version: Number of the version.
            is_direct: Send over the direct streams, which stage nothing; else over all others.

        Raises:
            RolloutError: A broadcast did not end in time, or :meth:`stop` was called (S207).
        """
        if len(self._endpoints) != len(self._streams):
            raise RuntimeError("the endpoints of this rank are closed")
        sent = 0
        try:
            tensors = weights() if self._endpoints or self._file is not None else {}
            for stream, endpoint in zip(self._streams, self._endpoints, strict=True):
                if stream.is_direct is is_direct:
                    self._run(
                        stream,
                        endpoint,
                        partial(endpoint.send, tensors, version),
                        f"version {version} over the broadcast",
                    )
                    sent += stream.nbytes
            if self._file is not None and not is_direct:
                self._file.write(tensors, version)
                sent += self._file.nbytes
        except BaseException:
            self.close()
            raise
        return sent

    def join_pieces(self, version: int) -> None:
        """Write the sharded tensors of this rank's file, after all ranks have written their pieces."""
        if self._file is not None:
            self._file.join(version)

    def close(self) -> None:
        """Close all endpoints."""
        for endpoint in self._endpoints:
            endpoint.close()
        self._endpoints.clear()
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def invalidate_mappings(self) -> None:
        """Note that the tensors' memory was freed: the next send over IPC raises, so that receivers map it again."""
        for endpoint in self._endpoints:
            if isinstance(endpoint, IpcSender):
                endpoint.invalidate_mappings()


class WeightReceiver:
    """The receiving endpoints of one member of an engine.

    Args:
        streams: The streams that this member receives.
        addresses: Addresses of the senders by stream id.
        rank: Rank of this member among all receivers.
        host: Address of this node.
        timeout_s: Seconds to wait for the senders.
    """

    def __init__(
        self, streams: Sequence[WeightStream], addresses: Mapping[str, Any], rank: int, host: str, timeout_s: float
    ) -> None:
        self._endpoints: list[Receiver] = []
        self._views: list[list[torch.Tensor]] = []
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._staged = StagedTensors()
        stores: dict[str, Any] = {}
        for stream in streams:
            address = addresses[stream.id]
            if stream.transport is WeightTransport.FILE:
                self._endpoints.append(FileReceiver(stream, address))
            elif stream.transport is WeightTransport.BROADCAST:
                number = 1 + stream.targets.index(rank)
                if address not in stores:
                    stores[address] = join_rendezvous(address, timeout_s)
                self._endpoints.append(CollectiveReceiver(stream, stores[address], number, host, timeout_s))
            elif stream.transport is WeightTransport.IPC:
                self._endpoints.append(IpcReceiver(stream, address))
            else:
                self._endpoints.append(SharedMemoryReceiver(stream, address))

    def receive(self, version: int) -> None:
        """Block until a version is received. All streams are read at once, so that senders do not block each other."""
        for endpoint in self._endpoints:
            endpoint.begin(version)
        for endpoint in self._endpoints:
            endpoint.finish()

    def staged(self) -> StagedTensors:
        """Return the received tensors by name. Tensors that arrived in several pieces are assembled.

        The result is the same object for as long as the endpoints return the same tensors.
        """
        views = [endpoint.staged() for endpoint in self._endpoints]
        if len(views) == len(self._views) and all(a is b for a, b in zip(views, self._views, strict=True)):
            for target, part in self._pieces:
                target.copy_(part)
            return self._staged
        self._views, self._pieces, self._staged = views, [], StagedTensors()
        for endpoint, tensors in zip(self._endpoints, views, strict=True):
            for piece, tensor in zip(endpoint.stream.pieces, tensors, strict=True):
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

    def owner(self) -> MemoryOwner | None:
        """Return the process that owns the memory of all staged tensors; ``None`` if there is no such process."""
        pids = {endpoint.pid for endpoint in self._endpoints if isinstance(endpoint, IpcReceiver)}
        if len(pids) != 1 or not all(isinstance(endpoint, IpcReceiver) for endpoint in self._endpoints):
            return None
        self.staged()
        return None if self._pieces else MemoryOwner(pids.pop())

    def close(self) -> None:
        """Close all endpoints."""
        for endpoint in self._endpoints:
            endpoint.close()
        self._endpoints.clear()
        self._views, self._pieces, self._staged = [], [], StagedTensors()

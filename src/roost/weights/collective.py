"""Weights by collective broadcast, in buckets: for processes that share a network.

Each stream has its own process group beside the trainer's, with the sender as rank 0: NCCL between GPUs, so that
nothing passes through host memory, else gloo. Large pieces are sent from where they are. Small pieces are packed into
buckets, and a bucket is packed while earlier ones are in flight. A sender that fails closes its group, so that
receivers do not wait for data that never arrives.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from roost.cluster import PortLease, lease_ports
from roost.weights.buffers import box_of, piece_views, write_pieces
from roost.weights.streams import Piece, WeightStream

__all__ = [
    "BUCKET_BYTES",
    "LIBRARY_GRACE_S",
    "CollectiveReceiver",
    "CollectiveSender",
    "Rendezvous",
    "join_rendezvous",
    "nccl_errors_raised",
]

NCCL = "nccl"
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
LIBRARY_GRACE_S = 15.0
"""Seconds by which the library's timeout is later than that of :class:`WeightSender`, whose error says more."""
BUCKET_BYTES = 32 * 2**20
"""Most bytes of pieces that are packed into one broadcast."""
DIRECT_BYTES = 2**20
"""Pieces of at least this size are broadcast one by one, without packing."""


class Rendezvous:
    """The store through which the process groups of one sender's streams are set up. It holds a port lease.

    Args:
        host: Address of this node.
        timeout_s: Seconds that operations on the store may take.

    Attributes:
        address: ``host:port`` for :func:`join_rendezvous`.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._lease: PortLease = lease_ports(1)
        self.host = host
        self.timeout_s = timeout_s
        self.store = TCPStore(
            host, self._lease.port, None, True, datetime.timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self.address = f"{host}:{self._lease.port}"

    def close(self) -> None:
        """Release the port lease."""
        self._lease.release()


def join_rendezvous(address: str, timeout_s: float) -> TCPStore:
    """Connect to a :class:`Rendezvous`; return its store."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), None, False, datetime.timedelta(seconds=timeout_s), wait_for_workers=False)


class CollectiveSender:
    """Rank 0 of a stream's process group.

    Attributes:
        address: ``host:port`` at which receivers join.
    """

    def __init__(self, stream: WeightStream, rendezvous: Rendezvous) -> None:
        self._stream = stream
        self._rendezvous = rendezvous
        self.address = rendezvous.address
        self._group: Any = None
        self._buckets = _buckets(stream.pieces)
        self._packing: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def join(self) -> None:
        """Create the process group; block until all receivers have joined."""
        at = self._rendezvous
        self._group = _new_group(at.store, self._stream, 0, at.host, at.timeout_s + LIBRARY_GRACE_S)

    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Send a version; block until it is sent. A failure closes the endpoint."""
        # Keep a reference: freeing a group with calls in flight would wait for these calls.
        group = self._group
        try:
            works = [
                group.broadcast(self._packed(number, pieces, tensors), 0)
                for number, (_, _, pieces) in enumerate(self._buckets)
            ]
            for work in works:
                work.wait()
            _synchronize(self._stream)
        except BaseException:
            self.close()
            raise

    def _packed(self, number: int, pieces: list[Piece], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the bytes of a bucket: the tensor itself where it can be sent without a copy."""
        if len(pieces) == 1:
            part = box_of(tensors[pieces[0].name].detach(), pieces[0].source_box)
            if part.is_contiguous() and part.device.type == _device(self._stream).type:
                return part.reshape(-1).view(torch.uint8)
        start, stop, _ = self._buckets[number]
        if number not in self._packing:
            flat = torch.empty(stop - start, dtype=torch.uint8, device=_device(self._stream))
            self._packing[number] = (flat, piece_views(flat, pieces, start))
        flat, views = self._packing[number]
        write_pieces(views, pieces, tensors)
        return flat

    def close(self) -> None:
        """Leave the process group; calls of receivers in flight fail."""
        group, self._group = self._group, None
        _leave(self._stream, group)


class CollectiveReceiver:
    """A receiver in a stream's process group. It stages a version without changing the weights in use."""

    def __init__(self, stream: WeightStream, store: Store, rank: int, host: str, timeout_s: float) -> None:
        self.stream = stream
        self._group = _new_group(store, stream, rank, host, timeout_s)
        self._buckets = _buckets(stream.pieces)
        self._works: list[Any] = []
        self._flat = torch.empty(stream.nbytes, dtype=torch.uint8, device=_device(stream))
        self._views = piece_views(self._flat, stream.pieces)

    def begin(self, version: int) -> None:
        """Start to receive a version."""
        self._works = [self._group.broadcast(self._flat[start:stop], 0) for start, stop, _ in self._buckets]

    def finish(self) -> None:
        """Block until the version is received."""
        for work in self._works:
            work.wait()
        _synchronize(self.stream)

    def staged(self) -> list[torch.Tensor]:
        """Return the pieces of the last version that was received."""
        return self._views

    def close(self) -> None:
        """Leave the process group."""
        _leave(self.stream, self._group)
        self._group = None


def _buckets(pieces: Sequence[Piece], size: int = BUCKET_BYTES) -> list[tuple[int, int, list[Piece]]]:
    """Return consecutive pieces as (first byte, end, pieces), with at most ``size`` bytes or a single piece."""
    buckets: list[tuple[int, int, list[Piece]]] = []
    for piece in pieces:
        stop = piece.offset + piece.nbytes
        is_small = piece.nbytes < DIRECT_BYTES and (not buckets or buckets[-1][2][-1].nbytes < DIRECT_BYTES)
        if buckets and is_small and stop - buckets[-1][0] <= size:
            start, _, members = buckets[-1]
            members.append(piece)
            buckets[-1] = (start, stop, members)
        else:
            buckets.append((piece.offset, stop, [piece]))
    return [bucket for bucket in buckets if bucket[1] > bucket[0]]


def _new_group(store: Store, stream: WeightStream, rank: int, host: str, timeout_s: float) -> Any:
    """Return a process group: torch declares no type that the classes of both backends share."""
    size = stream.world_size or 1 + len(stream.targets)
    timeout = datetime.timedelta(seconds=timeout_s)
    prefixed = PrefixStore(stream.id, store)
    group: Any
    if stream.backend == NCCL:
        of_nccl = dist.ProcessGroupNCCL.Options()
        of_nccl._timeout = timeout
        with nccl_errors_raised():
            group = dist.ProcessGroupNCCL(prefixed, rank, size, of_nccl)
        # The first collective connects the ranks: do it here, so that the first version does not pay for it.
        group.broadcast(torch.zeros(1, device=_device(stream)), 0).wait()
        return group
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 4
    return gloo(prefixed, rank, size, options)


def _device(stream: WeightStream) -> torch.device:
    """Return the device of a stream's buffers."""
    return torch.device("cuda", torch.cuda.current_device()) if stream.backend == NCCL else torch.device("cpu")


def _synchronize(stream: WeightStream) -> None:
    """Wait for the GPU: a finished NCCL call is only enqueued there."""
    if stream.backend == NCCL:
        torch.cuda.synchronize()


def _leave(stream: WeightStream, group: Any) -> None:
    if group is None:
        return
    if stream.backend == NCCL:
        group.abort()  # unlike shutdown(), it does not wait for other ranks
    else:
        group.shutdown()


@contextlib.contextmanager
def nccl_errors_raised() -> Iterator[None]:
    """Make NCCL process groups that are created in the block raise errors instead of ending the process."""
    kept = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"
    try:
        yield
    finally:
        if kept is None:
            del os.environ[_BLOCKING]
        else:
            os.environ[_BLOCKING] = kept

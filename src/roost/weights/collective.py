"""Weights by collective broadcast, in buckets: for processes that share a network.

A channel has a process group of its own, apart from the trainer's: its sender is rank 0. Between GPUs
that is one of NCCL, and nothing passes through host memory; otherwise gloo's. Large pieces travel from
where they are; small ones are packed, and while buckets travel the next are filled. A sender that fails
closes its group, so that receivers do not wait for what will never come.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from roost.cluster import PortLease, lease_ports
from roost.weights.buffers import box_of, piece_views, write_pieces
from roost.weights.channels import Channel, Piece

__all__ = [
    "BUCKET_BYTES",
    "LATER_S",
    "CollectiveReceiver",
    "CollectiveSender",
    "MeetingPoint",
    "errors_are_raised",
    "join_meeting",
]

NCCL = "nccl"
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
LATER_S = 15.0
"""A sender's library gives up so long after :class:`WeightSender`, which says more."""
BUCKET_BYTES = 32 * 2**20
DIRECT_BYTES = 2**20
"""Pieces of at least so many bytes are a bucket of their own, and are not packed."""


class MeetingPoint:
    """Where the groups of one sender's channels find each other.

    Attributes:
        address: Its host and port.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._lease: PortLease = lease_ports(1)
        self.host = host
        self.timeout_s = timeout_s
        self.store = dist.TCPStore(
            host, self._lease.port, None, True, datetime.timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self.address = f"{host}:{self._lease.port}"

    def close(self) -> None:
        """Gives the port back."""
        self._lease.release()


def join_meeting(address: str, timeout_s: float) -> Any:
    """The other end of a meeting point."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), None, False, datetime.timedelta(seconds=timeout_s), wait_for_workers=False)


class CollectiveSender:
    """Rank 0 of a channel's group.

    Attributes:
        address: Host and port where receivers join.
    """

    def __init__(self, channel: Channel, meeting: MeetingPoint) -> None:
        self._channel = channel
        self._meeting = meeting
        self.address = meeting.address
        self._group: Any = None
        self._buckets = _buckets(channel.pieces)
        self._spare: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def join(self) -> None:
        """Waits until all receivers are there."""
        meeting = self._meeting
        self._group = _group(meeting.store, self._channel, 0, meeting.host, meeting.timeout_s + LATER_S)

    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Sends a version."""
        group = self._group  # kept here: a group with calls that wait cannot be freed without waiting for them
        try:
            works = [
                group.broadcast(self._packed(number, pieces, tensors), 0)
                for number, (_, _, pieces) in enumerate(self._buckets)
            ]
            for work in works:
                work.wait()
            _settle(self._channel)
        except BaseException:
            self.close()
            raise

    def _packed(self, number: int, pieces: list[Piece], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The bytes of a bucket: those of the tensor itself where it is one that can be sent as it is."""
        if len(pieces) == 1:
            part = box_of(tensors[pieces[0].name].detach(), pieces[0].source_box)
            if part.is_contiguous() and part.device.type == _device(self._channel).type:
                return part.reshape(-1).view(torch.uint8)
        start, stop, _ = self._buckets[number]
        if number not in self._spare:
            flat = torch.empty(stop - start, dtype=torch.uint8, device=_device(self._channel))
            self._spare[number] = (flat, piece_views(flat, pieces, start))
        flat, views = self._spare[number]
        write_pieces(views, pieces, tensors)
        return flat

    def close(self) -> None:
        """Leaves the group; receivers that wait are told."""
        group, self._group = self._group, None
        _leave(self._channel, group)


class CollectiveReceiver:
    """Another rank of a channel's group. What it receives is staged, and touches no weights in use."""

    def __init__(self, channel: Channel, store: Any, rank: int, host: str, timeout_s: float) -> None:
        self.channel = channel
        self._group = _group(store, channel, rank, host, timeout_s)
        self._buckets = _buckets(channel.pieces)
        self._works: list[Any] = []
        self._flat = torch.empty(channel.nbytes, dtype=torch.uint8, device=_device(channel))
        self._views = piece_views(self._flat, channel.pieces)

    def begin(self, version: int) -> None:
        """Makes ready for a version; while it comes, the one before is in use."""
        self._works = [self._group.broadcast(self._flat[start:stop], 0) for start, stop, _ in self._buckets]

    def finish(self) -> None:
        """Waits until it is there."""
        for work in self._works:
            work.wait()
        _settle(self.channel)

    def staged(self) -> list[torch.Tensor]:
        """The pieces of the last version that came."""
        return self._views

    def close(self) -> None:
        """Leaves the group."""
        _leave(self.channel, self._group)
        self._group = None


def _buckets(pieces: Sequence[Piece], size: int = BUCKET_BYTES) -> list[tuple[int, int, list[Piece]]]:
    """Runs of pieces as (first byte, last byte, pieces): at most so many bytes, or a single piece."""
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


def _group(store: Any, channel: Channel, rank: int, host: str, timeout_s: float) -> Any:
    size = channel.world_size or 1 + len(channel.targets)
    timeout = datetime.timedelta(seconds=timeout_s)
    prefixed = dist.PrefixStore(channel.id, store)
    if channel.backend == NCCL:
        of_nccl = dist.ProcessGroupNCCL.Options()
        of_nccl._timeout = timeout
        with errors_are_raised():
            group = dist.ProcessGroupNCCL(prefixed, rank, size, of_nccl)
        group.broadcast(
            torch.zeros(1, device=_device(channel)), 0
        ).wait()  # connects them now, not with the first version
        return group
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 4
    return dist.ProcessGroupGloo(prefixed, rank, size, options)


def _device(channel: Channel) -> torch.device:
    """Where the buffers of a channel are."""
    return torch.device("cuda", torch.cuda.current_device()) if channel.backend == NCCL else torch.device("cpu")


def _settle(channel: Channel) -> None:
    """Waits until what was sent or received is there, and not only in line for it."""
    if channel.backend == NCCL:
        torch.cuda.synchronize()


def _leave(channel: Channel, group: Any) -> None:
    if group is None:
        return
    if channel.backend == NCCL:
        group.abort()  # does not wait for the others
    else:
        group.shutdown()


@contextlib.contextmanager
def errors_are_raised() -> Iterator[None]:
    """NCCL groups that are made here raise what fails, instead of ending the process."""
    kept = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"
    try:
        yield
    finally:
        if kept is None:
            del os.environ[_BLOCKING]
        else:
            os.environ[_BLOCKING] = kept

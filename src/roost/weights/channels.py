"""Channels: what one sender writes once, and who reads it. Pure.

A transfer plan says for every receiver which box of which tensor comes from which sender. Receivers
that want the same boxes from the same sender over the same transport share a channel: one buffer
that is written once, whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from roost.plan import TensorShards, TransferPlan, WeightTransport
from roost.plan.shards import ITEM_BYTES, intervals_of

__all__ = ["ALIGNMENT", "Box", "Channel", "Piece", "WeightDescription", "make_channels"]

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, stop) in each dimension."""

ALIGNMENT = 64
"""Pieces begin at multiples of so many bytes."""


@dataclass(frozen=True)
class WeightDescription:
    """What one rank says of its weights.

    Attributes:
        tensors: Their names, full shapes, and how they are cut.
        tensor_parallel: Size of the tensor-parallel groups.
        pipeline_parallel: Number of pipeline stages.
        gpus: UUIDs of the GPUs that hold a sender's weights, or that a receiver sees; empty on the CPU.
        broadcast: Backend of the broadcast that an engine's own processes join; empty if they join none.
        broadcast_sender: ``module:Class`` of the trainer's end of that broadcast; see :class:`Sender`.
        broadcast_ranks: How many of them do.
        takes_pieces: Whether an engine's own processes take parts of tensors.
    """

    tensors: tuple[TensorShards, ...]
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    gpus: tuple[str, ...] = ()
    broadcast: str = ""
    broadcast_sender: str = ""
    broadcast_ranks: int = 1
    takes_pieces: bool = True


@dataclass(frozen=True)
class Piece:
    """A box of a tensor on its way.

    Attributes:
        name: The tensor.
        dtype: Name of its element type.
        shape: Shape of the full tensor.
        box: Where the piece is in the full tensor.
        source_box: Where it is in the sender's own tensor.
        target_box: Where it is in the receiver's own tensor.
        target_shape: Shape of the receiver's own tensor.
        offset: Where it begins in the channel's buffer, in bytes.
        nbytes: Its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    source_box: Box
    target_box: Box
    target_shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Channel:
    """One sender, the receivers that want the same of it, and the way.

    Attributes:
        id: Its name in the job.
        kind: The transport.
        source: Rank of the sender.
        targets: Ranks of the receivers.
        pieces: What goes through it, in the order of its buffer.
        nbytes: Size of that buffer.
        backend: Backend of a broadcast, ``gloo`` or ``nccl``.
        sender: ``module:Class`` of the trainer's end, where an engine's own processes join the broadcast.
        first_ranks: For each target, the first of its ranks in the group of a broadcast; the sender is rank 0.
        world_size: Size of that group.
    """

    id: str
    kind: WeightTransport
    source: int
    targets: tuple[int, ...]
    pieces: tuple[Piece, ...]
    nbytes: int
    backend: str = ""
    sender: str = ""
    first_ranks: tuple[int, ...] = ()
    world_size: int = 0

    @property
    def is_direct(self) -> bool:
        """Whether nothing is staged: the engine's own processes write what comes where it is used."""
        return bool(self.sender)


def make_channels(
    flow: TransferPlan, kind_of: Callable[[int, int], WeightTransport], prefix: str = "weights", first_target: int = 0
) -> list[Channel]:
    """The channels of a transfer plan.

    Args:
        flow: Who sends what to whom.
        kind_of: The transport from a sender to a receiver.
        prefix: What the names of the channels begin with.
        first_target: The receivers are counted from here.
    """
    source, target = flow.source, flow.target
    audiences: dict[tuple[int, WeightTransport, int], list[int]] = {}
    of_source = {tensor.name: tensor for tensor in source.tensors}
    of_target = {tensor.name: tensor for tensor in target.tensors}
    known: dict[tuple[object, ...], tuple[Piece, ...]] = {}
    for rank in range(target.world_size):
        by_sender: dict[int, list[tuple[str, Box]]] = {}
        for move in flow.for_target(rank):
            by_sender.setdefault(move.rank, []).append((move.tensor, move.box))
        for sender, boxes in by_sender.items():
            key = (source.coordinates(sender)[0], target.coordinates(rank)[0], tuple(boxes))
            pieces = known.get(key)
            if pieces is None:
                pieces = known[key] = _lay_out(boxes, key[0], key[1], source.tp, target.tp, of_source, of_target)
            audiences.setdefault((sender, kind_of(sender, rank), id(pieces)), []).append(rank)
    by_id = {id(pieces): pieces for pieces in known.values()}
    channels = []
    for number, ((sender, kind, identity), ranks) in enumerate(audiences.items()):
        pieces = by_id[identity]
        nbytes = pieces[-1].offset + pieces[-1].nbytes if pieces else 0
        targets = tuple(first_target + rank for rank in ranks)
        channels.append(Channel(f"{prefix}-{number}", kind, sender, targets, pieces, nbytes))
    return channels


def _lay_out(
    boxes: Sequence[tuple[str, Box]],
    source_tp: int,
    target_tp: int,
    source_size: int,
    target_size: int,
    of_source: dict[str, TensorShards],
    of_target: dict[str, TensorShards],
) -> tuple[Piece, ...]:
    pieces = []
    offset = 0
    for name, box in boxes:
        sent, wanted = of_source[name], of_target[name]
        sent_start, _ = _held(sent, source_tp, source_size)
        wanted_start, wanted_shape = _held(wanted, target_tp, target_size)
        nbytes = prod(stop - start for start, stop in box) * ITEM_BYTES[sent.dtype]
        pieces.append(
            Piece(
                name,
                sent.dtype,
                sent.shape,
                box,
                _moved(box, sent_start),
                _moved(box, wanted_start),
                wanted_shape,
                offset,
                nbytes,
            )
        )
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(pieces)


def _held(tensor: TensorShards, tp_rank: int, tp_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a rank's own tensor begins in the full one, and its shape."""
    start = [0] * len(tensor.shape)
    shape = list(tensor.shape)
    if tensor.dim is not None:
        first, last = intervals_of(tensor, tp_size)[tp_rank]
        start[tensor.dim] = first
        shape[tensor.dim] = last - first
    return tuple(start), tuple(shape)


def _moved(box: Box, start: Sequence[int]) -> Box:
    return tuple((first - at, last - at) for (first, last), at in zip(box, start, strict=True))

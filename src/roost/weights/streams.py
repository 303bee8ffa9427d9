"""Weight streams: one sender, and the receivers that need the same parts of its tensors over the same transport.

A transfer plan names the sender of each box of each tensor for every receiver. Receivers that need the same boxes from
the same sender over the same transport share a stream, whose buffer the sender writes once per version. The functions
here are pure; they open nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from roost.plan import TensorShards, TransferPlan, WeightTransport
from roost.plan.shards import ITEM_BYTES, intervals_of

__all__ = ["ALIGNMENT", "Box", "Piece", "WeightDescription", "WeightStream", "make_streams"]

Box = tuple[tuple[int, int], ...]
"""A rectangular part of a tensor: (start, stop) in each dimension."""

ALIGNMENT = 64
"""Offsets of pieces in a buffer are multiples of this many bytes."""


@dataclass(frozen=True)
class WeightDescription:
    """The weights of one rank, as the rank itself describes them.

    Attributes:
        tensors: Names, full shapes and sharding of its tensors.
        tensor_parallel: Size of the tensor-parallel groups.
        pipeline_parallel: Number of pipeline stages.
        gpus: UUIDs of the GPUs that hold a sender's weights, or that a receiver sees; empty on CPUs.
        broadcast: Backend of the process group that the engine's own processes join; empty if they join none.
        broadcast_sender: ``module:Class`` of the trainer's endpoint of that process group; the class is a
            :class:`roost.weights.endpoints.Sender`.
        broadcast_ranks: Number of ranks of the engine in that process group.
        takes_pieces: Whether the engine's own processes accept parts of tensors.
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
    """A box of a tensor that a stream carries.

    Attributes:
        name: Name of the tensor.
        dtype: Name of its element type, such as ``float32``.
        shape: Shape of the full tensor.
        box: The box in the full tensor.
        source_box: The box in the sender's shard.
        target_box: The box in the receiver's shard.
        target_shape: Shape of the receiver's shard.
        offset: Offset in the stream's buffer, in bytes.
        nbytes: Size in bytes.
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
class WeightStream:
    """One sender, the receivers of the same pieces, and the transport between them.

    Attributes:
        id: Unique name in the job.
        transport: The transport.
        source: Rank of the sender in the trainer.
        targets: Ranks of the receivers among all receivers of the job.
        pieces: The pieces, in the order of the buffer.
        nbytes: Size of the buffer in bytes.
        backend: Backend of a broadcast's process group, ``gloo`` or ``nccl``.
        sender: ``module:Class`` of the trainer's endpoint, where an engine's own processes join the process group.
        first_ranks: The first rank of each receiver in the process group of a broadcast; the sender is rank 0.
        world_size: Size of that process group.
    """

    id: str
    transport: WeightTransport
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
        """Whether nothing is staged: the engine's own processes receive the weights in place."""
        return bool(self.sender)


def make_streams(
    plan: TransferPlan,
    transport_of: Callable[[int, int], WeightTransport],
    prefix: str = "weights",
    first_target: int = 0,
) -> list[WeightStream]:
    """Return the streams of a transfer plan.

    Args:
        plan: The transfer plan.
        transport_of: Returns the transport from a rank of the sender to a rank of the receiver.
        prefix: Prefix of the streams' ids.
        first_target: Number of the plan's first receiver among all receivers of the job.
    """
    source, target = plan.source, plan.target
    receivers: dict[tuple[int, WeightTransport, int], list[int]] = {}
    source_tensors = {tensor.name: tensor for tensor in source.tensors}
    target_tensors = {tensor.name: tensor for tensor in target.tensors}
    laid_out: dict[tuple[object, ...], tuple[Piece, ...]] = {}
    for rank in range(target.world_size):
        by_sender: dict[int, list[tuple[str, Box]]] = {}
        for move in plan.for_target(rank):
            by_sender.setdefault(move.rank, []).append((move.tensor, move.box))
        for sender, boxes in by_sender.items():
            key = (source.coordinates(sender)[0], target.coordinates(rank)[0], tuple(boxes))
            pieces = laid_out.get(key)
            if pieces is None:
                pieces = _lay_out(boxes, key[0], key[1], source.tp, target.tp, source_tensors, target_tensors)
                laid_out[key] = pieces
            receivers.setdefault((sender, transport_of(sender, rank), id(pieces)), []).append(rank)
    by_id = {id(pieces): pieces for pieces in laid_out.values()}
    streams = []
    for number, ((sender, transport, identity), ranks) in enumerate(receivers.items()):
        pieces = by_id[identity]
        nbytes = pieces[-1].offset + pieces[-1].nbytes if pieces else 0
        targets = tuple(first_target + rank for rank in ranks)
        streams.append(WeightStream(f"{prefix}-{number}", transport, sender, targets, pieces, nbytes))
    return streams


def _lay_out(
    boxes: Sequence[tuple[str, Box]],
    source_tp: int,
    target_tp: int,
    source_size: int,
    target_size: int,
    source_tensors: dict[str, TensorShards],
    target_tensors: dict[str, TensorShards],
) -> tuple[Piece, ...]:
    """Return the boxes as pieces, one after the other in a buffer."""
    pieces = []
    offset = 0
    for name, box in boxes:
        sent, wanted = source_tensors[name], target_tensors[name]
        sent_start, _ = _shard_of(sent, source_tp, source_size)
        wanted_start, wanted_shape = _shard_of(wanted, target_tp, target_size)
        nbytes = prod(stop - start for start, stop in box) * ITEM_BYTES[sent.dtype]
        pieces.append(
            Piece(
                name,
                sent.dtype,
                sent.shape,
                box,
                _relative_to(box, sent_start),
                _relative_to(box, wanted_start),
                wanted_shape,
                offset,
                nbytes,
            )
        )
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(pieces)


def _shard_of(tensor: TensorShards, tp_rank: int, tp_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where a rank's shard begins in the full tensor, and its shape."""
    start = [0] * len(tensor.shape)
    shape = list(tensor.shape)
    if tensor.dim is not None:
        first, last = intervals_of(tensor, tp_size)[tp_rank]
        start[tensor.dim] = first
        shape[tensor.dim] = last - first
    return tuple(start), tuple(shape)


def _relative_to(box: Box, start: Sequence[int]) -> Box:
    return tuple((first - at, last - at) for (first, last), at in zip(box, start, strict=True))

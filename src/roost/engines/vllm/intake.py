"""Weights on their way into vLLM's workers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from roost.engines.vllm.messages import PACKING, stream_to_json, tensor_list
from roost.errors import RoostError
from roost.plan import WeightTransport
from roost.weights.buffers import dtype_name
from roost.weights.shared_memory import SharedMemorySender
from roost.weights.streams import ALIGNMENT, Piece, WeightStream

if TYPE_CHECKING:
    from roost.engines.vllm.engine import VllmEngine

__all__ = ["NODE_LOCAL", "StagingMemory", "VllmIntake"]

NODE_LOCAL = (WeightTransport.SHARED_MEMORY, WeightTransport.IPC)


class VllmIntake:
    """What a trainer sends, read by vLLM's workers themselves.

    Args:
        engine: The engine.
        streams: Memory of this node, or one broadcast that the workers join.
        addresses: Where each is found, by its id.
        rank: Rank of the engine among all receivers.
        timeout_s: How long the trainer is waited for.
    """

    def __init__(
        self,
        engine: VllmEngine,
        streams: Sequence[WeightStream],
        addresses: Mapping[str, Any],
        rank: int,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        near = [stream for stream in streams if stream.transport in NODE_LOCAL]
        self._init: dict[str, Any] = {"memory": [stream_to_json(stream, addresses[stream.id]) for stream in near]}
        self._updates: list[dict[str, Any]] = [{"memory": True}] if near else []
        for stream in streams:
            if stream.is_direct:
                host, _, port = addresses[stream.id].rpartition(":")
                self._init["nccl"] = {
                    "master_address": host.strip("[]"),
                    "master_port": int(port),
                    "rank_offset": stream.first_ranks[stream.targets.index(rank)],
                    "world_size": stream.world_size,
                    **PACKING,
                }
                self._updates.append({"nccl": tensor_list(stream.pieces)})
        self._connect()

    def _connect(self) -> None:
        self._engine.command("init_weight_transfer_engine", {"init_info": self._init}, self._timeout_s)
        self._engine.weight_source = self

    def receive(self, version: int) -> None:
        """Nothing to do: the memory is mapped, and a broadcast is taken when it is put to use."""

    def commit(self, version: int) -> None:
        """Has the workers load the version."""
        if self._engine.weight_source is not self:  # weights came some other way since
            self._connect()
        self._engine.load_version(version, self._updates)

    def close(self) -> None:
        """Has the workers let go of what is the trainer's."""
        if self._engine.weight_source is not self:
            return
        self._engine.weight_source = None
        with contextlib.suppress(RoostError):
            self._engine.command("shutdown_weight_transfer_engine")


class StagingMemory:
    """Memory of this process from which vLLM's workers load what came here some other way.

    Attributes:
        stream: What is in it, and where.
        addresses: Where the memory is found, by the id of the stream.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pieces = _pieces(tensors)
        nbytes = pieces[-1].offset + pieces[-1].nbytes if pieces else 0
        self.stream = WeightStream("own", WeightTransport.SHARED_MEMORY, 0, (0,), pieces, nbytes)
        self._sender = SharedMemorySender(self.stream)
        self.addresses = {self.stream.id: self._sender.address}

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these have the same names, shapes and types."""
        return self.stream.pieces == _pieces(tensors)

    def write(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Puts a version into it."""
        self._sender.send(tensors, version)

    def close(self) -> None:
        """Gives it back once nobody maps it."""
        self._sender.close()


def _pieces(tensors: Mapping[str, torch.Tensor]) -> tuple[Piece, ...]:
    """Whole tensors, one behind the other."""
    pieces = []
    offset = 0
    for name, tensor in tensors.items():
        shape, box = tuple(tensor.shape), tuple((0, size) for size in tensor.shape)
        pieces.append(Piece(name, dtype_name(tensor), shape, box, box, box, shape, offset, tensor.nbytes))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(pieces)

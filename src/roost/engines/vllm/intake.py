"""Load weights that trainers send into vLLM's workers."""

from __future__ import annotations

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
    """Weights of a trainer that vLLM's workers read themselves.

    Args:
        engine: The engine.
        streams: Streams through memory of this node, or one broadcast that the workers join.
        addresses: Stream id → address of the sender.
        rank: Rank of the engine among all receivers.
        timeout_s: Seconds to wait for the trainer.
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
        """Do nothing: the memory is mapped, and a broadcast is received in :meth:`commit`."""

    def commit(self, version: int) -> None:
        """Have the workers load the version."""
        if self._engine.weight_source is not self:  # other weights were loaded since
            self._connect()
        self._engine.load_version(version, self._updates)

    def close(self) -> None:
        """Have the workers release the trainer's memory and connections."""
        if self._engine.weight_source is not self:
            return
        self._engine.weight_source = None
        try:
            self._engine.command("shutdown_weight_transfer_engine")
        except RoostError as error:  # vLLM may have ended, and its memory with it
            self._engine.log.info("%s", error.findings[0].message)


class StagingMemory:
    """Shared memory of this process, from which vLLM's workers load weights that arrived in this process.

    Attributes:
        stream: The tensors in it, with their offsets.
        addresses: Stream id → address of the memory.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pieces = _pieces(tensors)
        nbytes = pieces[-1].offset + pieces[-1].nbytes if pieces else 0
        self.stream = WeightStream("own", WeightTransport.SHARED_MEMORY, 0, (0,), pieces, nbytes)
        self._sender = SharedMemorySender(self.stream)
        self.addresses = {self.stream.id: self._sender.address}

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether these tensors have the same names, shapes and dtypes."""
        return self.stream.pieces == _pieces(tensors)

    def write(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Write a version into the memory."""
        self._sender.send(tensors, version)

    def close(self) -> None:
        """Remove the memory; the kernel frees it when no process maps it."""
        self._sender.close()


def _pieces(tensors: Mapping[str, torch.Tensor]) -> tuple[Piece, ...]:
    """Lay out whole tensors one behind the other."""
    pieces = []
    offset = 0
    for name, tensor in tensors.items():
        shape, box = tuple(tensor.shape), tuple((0, size) for size in tensor.shape)
        pieces.append(Piece(name, dtype_name(tensor), shape, box, box, box, shape, offset, tensor.nbytes))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(pieces)

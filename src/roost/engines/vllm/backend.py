"""Roost's weight-transfer engine, which vLLM loads in each of its workers.

On one node, the workers map the shared memory or the GPU memory of the trainers once, keep it mapped, and load from
it without a copy in between. Over a network, vLLM's own NCCL broadcast is used. In both cases the model loads the
tensors as with vLLM's other weight-transfer engines: by the names of a checkpoint, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import envs
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from roost.engines.vllm.messages import stream_from_json
from roost.weights.buffers import box_of, dtype_of
from roost.weights.ipc import IpcReceiver
from roost.weights.shared_memory import SharedMemoryReceiver
from roost.weights.streams import Piece

__all__ = ["RoostInitInfo", "RoostTransferEngine", "RoostUpdateInfo"]


@dataclass
class RoostInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM may be absent where types are checked
    """The sources of weights.

    Attributes:
        memory: Streams through memory of this node, each with its address.
        nccl: Arguments for joining vLLM's own NCCL broadcast; ``None`` without one.
    """

    memory: list[dict[str, Any]] = field(default_factory=list)
    nccl: dict[str, Any] | None = None


@dataclass
class RoostUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A part of a version that can be loaded now.

    Attributes:
        memory: Whether the mapped memory holds a new version.
        nccl: The tensors that are broadcast, in vLLM's format; ``None`` without a broadcast.
    """

    memory: bool = False
    nccl: dict[str, Any] | None = None


class RoostTransferEngine(WeightTransferEngine[RoostInitInfo, RoostUpdateInfo]):  # type: ignore[misc]
    """Loads the weights that trainers of a Roost job send."""

    init_info_cls = RoostInitInfo
    update_info_cls = RoostUpdateInfo
    supports_draft_weight_update = False

    _ends: tuple[SharedMemoryReceiver | IpcReceiver, ...] = ()
    _nccl: Any = None

    def init_transfer_engine(self, init_info: RoostInitInfo) -> None:
        """Map the memory and join the broadcast; release the sources of before."""
        self.shutdown()
        self._ends = tuple(_open_memory(data) for data in init_info.memory)
        if init_info.nccl is not None:
            self._nccl = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend="nccl"), self.vllm_config, self.device, self.model
            )
            self._nccl.init_transfer_engine(self._nccl.parse_init_info(init_info.nccl))

    def start_weight_update(self) -> None:
        """Prepare the model for tensors of a checkpoint."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a part of a version, and wait until the device has copied it."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # torch.accelerator raises an error on the CPU
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: RoostUpdateInfo) -> None:
        """Load a part of a version."""
        if update_info.nccl is not None:
            self._nccl.receive_weights(self._nccl.parse_update_info(update_info.nccl))
        if update_info.memory:
            with disable_mtp_completeness_check():
                self.model.load_weights(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors by name. Tensors that arrived in pieces are assembled one at a time."""
        parts: dict[str, list[tuple[Piece, torch.Tensor]]] = {}
        for end in self._ends:
            for piece, view in zip(end.stream.pieces, end.staged(), strict=True):
                parts.setdefault(piece.name, []).append((piece, view))
        for name, found in parts.items():
            piece, whole = found[0]
            if tuple(whole.shape) != piece.target_shape:
                whole = torch.empty(piece.target_shape, dtype=dtype_of(piece.dtype), device=whole.device)
                for part, view in found:
                    box_of(whole, part.target_box).copy_(view)
            yield name, whole

    def finish_weight_update(self) -> None:
        """Finish loading: the model can serve again."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Release all memory and connections of the trainer."""
        ends, self._ends = self._ends, ()
        for end in ends:
            end.close()
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.shutdown()


def _open_memory(data: dict[str, Any]) -> SharedMemoryReceiver | IpcReceiver:
    stream, address = stream_from_json(data)
    if isinstance(address, str):
        return SharedMemoryReceiver(stream, address)
    if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise ValueError("handles of GPU memory are pickled, and VLLM_ALLOW_INSECURE_SERIALIZATION is not 1")
    return IpcReceiver(stream, address)

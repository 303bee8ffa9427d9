"""The trainer's side of vLLM's own NCCL broadcast."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from roost.cluster import lease_ports
from roost.engines.vllm.messages import PACKING
from roost.errors import Finding, Fix, RolloutError
from roost.weights.streams import WeightStream

__all__ = ["DirectSender"]


class DirectSender:
    """Rank 0 of a process group whose other ranks are workers of vLLM.

    Attributes:
        address: Host and port of the rendezvous.

    Raises:
        RolloutError: The trainer's environment has no vLLM, whose functions are used here (E122).
    """

    def __init__(self, stream: WeightStream, host: str, timeout_s: float) -> None:
        if importlib.util.find_spec("vllm") is None:
            message = "the trainer cannot join vLLM's NCCL broadcast: its environment has no vLLM"
            rule = "both ends of that broadcast are vLLM's; on one node none is needed"
            fixes = (Fix("install it beside the trainer", "pip install vllm"),)
            raise RolloutError([Finding("E122", message, rule=rule, fixes=fixes)])
        self._stream = stream
        self._host = host
        self._lease = lease_ports(1)
        self._group: Any = None
        self._is_closed = False
        self.address = f"{host}:{self._lease.port}"

    def join(self) -> None:
        """Join the group; wait until all workers have joined."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        meeting = {"master_address": self._host, "master_port": self._lease.port}
        group = trainer_init({**meeting, "world_size": self._stream.world_size})
        self._group = group
        if self._is_closed:  # another thread called close() meanwhile
            self.close()

    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Send a version; the workers must receive it at the same time."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        group = self._group
        torch.cuda.synchronize()  # vLLM packs on its own CUDA streams, which do not wait for the trainer's
        packed_nccl_broadcast_producer(
            iterator=((piece.name, tensors[piece.name].detach()) for piece in self._stream.pieces),
            group=group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=PACKING["packed_buffer_size_bytes"],
            num_buffers=PACKING["packed_num_buffers"],
        )
        torch.cuda.synchronize()

    def close(self) -> None:
        """Leave the group without waiting for the workers: vLLM aborts the communicator, and a running send returns."""
        self._is_closed = True
        group, self._group = self._group, None
        if group is not None:
            group.destroy()
        self._lease.release()

"""The trainer's side of a broadcast that SGLang's own processes join.

SGLang creates the process group with an internal function of torch, under a name that both sides know. This side uses
the same function.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from roost.cluster import PortLease, lease_ports
from roost.engines.sglang.intake import group_name
from roost.weights.collective import LIBRARY_GRACE_S, nccl_errors_raised
from roost.weights.streams import WeightStream

__all__ = ["DirectSender"]

WINDOW_BYTES = 2**30
"""Bytes of broadcasts in flight after which the sender waits for them."""


class DirectSender:
    """Rank 0 of a stream's process group; the other ranks are SGLang's processes.

    Args:
        stream: The stream.
        host: Address of this node.
        timeout_s: Seconds to wait for the other ranks.

    Attributes:
        address: Host and port of the rendezvous.
    """

    def __init__(self, stream: WeightStream, host: str, timeout_s: float) -> None:
        self._stream = stream
        self._backend = stream.backend
        self._timeout = datetime.timedelta(seconds=timeout_s + LIBRARY_GRACE_S)
        self._lease: PortLease | None = lease_ports()
        self._store: c10d.Store | None = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not mark it as exported
            host, self._lease.port, stream.world_size, True, self._timeout, wait_for_workers=False, multi_tenant=True
        )
        self.address = f"[{host}]:{self._lease.port}" if ":" in host else f"{host}:{self._lease.port}"
        self._group: Any = None
        self._is_closed = False

    def join(self) -> None:
        """Create the group; wait until all ranks have joined."""
        store = self._store
        if store is None:
            raise RuntimeError("the sender was closed before its group was made")
        name = group_name(self._stream, self.address)
        helper: Any = c10d._new_process_group_helper
        # torch 2.6 renamed the parameter for the options.
        options = "backend_options" if "backend_options" in inspect.signature(helper).parameters else "pg_options"
        with nccl_errors_raised():
            group, _ = helper(
                self._stream.world_size, 0, [], c10d.Backend(self._backend), c10d.PrefixStore(name, store),
                group_name=name, timeout=self._timeout, **{options: None},
            )  # fmt: skip
        world: Any = c10d._world
        world.pg_group_ranks[group] = {rank: rank for rank in range(self._stream.world_size)}
        self._group = group
        if self._is_closed:  # another thread called close() meanwhile
            self.close()

    @torch.no_grad()
    def send(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Send a version, tensor by tensor, in the order of the stream's pieces."""
        device = torch.device("cpu")
        if self._backend == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        group = self._group  # a reference: freeing a group with broadcasts in flight would wait for them
        waiting: list[tuple[Any, torch.Tensor]] = []
        under_way = 0
        try:
            for piece in self._stream.pieces:
                tensor = tensors[piece.name].detach().to(device).contiguous()
                waiting.append((dist.broadcast(tensor, 0, group=group, async_op=True), tensor))
                under_way += piece.nbytes
                if under_way > WINDOW_BYTES:
                    _finish(waiting)
                    under_way = 0
            _finish(waiting)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group without waiting for the other ranks, and release the port."""
        self._is_closed = True
        group, self._group = self._group, None
        self._store = None
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        if group is None:
            return
        if self._backend == "nccl":
            # Destroying the group would wait for broadcasts in flight. torch 2.4 has no function to abort a group.
            getattr(c10d, "_abort_process_group", dist.destroy_process_group)(group)
        else:
            dist.destroy_process_group(group)


def _finish(waiting: list[tuple[Any, torch.Tensor]]) -> None:
    for work, _ in waiting:
        work.wait()
    waiting.clear()

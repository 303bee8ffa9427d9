"""The worker that an engine's member lives in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from roost.cluster import lease_ports
from roost.rl.engine import Engine, EngineOutput, EnginePlace
from roost.rl.weights.channels import Channel, WeightDescription
from roost.rl.weights.ends import WeightReceiver
from roost.rl.weights.ipc import visible_uuids
from roost.worker import Worker

__all__ = ["EngineWorker", "MemberPorts"]

INIT_PORTS = 30
"""Consecutive ports for distributed init, besides one per data-parallel rank."""
ATTENTION_PORTS = 4
"""Further ones for data-parallel attention, besides one per data-parallel rank."""


@dataclass(frozen=True)
class MemberPorts:
    """What a member leased on its own node.

    Attributes:
        host: Address of that node, as measured there.
        server_port: For its HTTP server.
        nccl_port: For its collectives.
        first_port: First of the consecutive ports.
        num_ports: How many of those.
    """

    host: str
    server_port: int
    nccl_port: int
    first_port: int
    num_ports: int


class EngineWorker(Worker):
    """Hosts one member of an engine. The verbs are the engine's own; see :class:`roost.Engine`."""

    def __init__(self, factory: Callable[[], Engine]) -> None:
        self._factory = factory
        self._engine: Engine | None = None
        self._receiver: WeightReceiver | None = None
        self._leases: list[Any] = []
        self._url = ""

    @property
    def engine(self) -> Engine:
        """The engine, once it was started."""
        if self._engine is None:
            raise RuntimeError("the engine was not started")
        return self._engine

    # Starting and ending -------------------------------------------------------------------

    def lease(self, dp_size: int, dp_attention: bool) -> MemberPorts:
        """Leases the ports of this member on its node, for as long as it lives."""
        count = INIT_PORTS + dp_size + ((ATTENTION_PORTS + dp_size) if dp_attention else 0)
        server, nccl, run = lease_ports(1), lease_ports(1), lease_ports(count)
        self._leases = [server, nccl, run]
        host = str(ray.util.get_node_ip_address())
        return MemberPorts(host, server.port, nccl.port, run.port, count)

    def start_engine(self, place: EnginePlace) -> str:
        """Starts the engine; returns its URL, empty for members that serve nothing."""
        self._engine = self._factory()
        has_device = self.local_accelerator_rank >= 0 and torch.cuda.is_available()
        self._url = self._engine.start(replace(place, device="cuda:0" if has_device else "cpu"))
        return self._url

    def status_note(self) -> str:
        """Where it serves, and which weights."""
        if self._engine is None:
            return "no engine yet"
        return f"{self._url} weights {self._engine.version}".lstrip()

    def health(self) -> str:
        """Empty where the engine can serve, else what is missing."""
        return self.engine.health()

    def logs(self) -> str:
        """The engine's last lines."""
        return self._engine.logs() if self._engine is not None else ""

    def stop_engine(self) -> None:
        """Ends the engine; its process goes with the group."""
        if self._engine is not None:
            self._engine.stop()

    # Work ----------------------------------------------------------------------------------

    def generate(self, prompts: list[list[int]], params: Mapping[str, Any]) -> list[EngineOutput]:
        """Generates in this process, past router and server."""
        return self.engine.generate(prompts, dict(params))

    def pause(self, mode: str) -> None:
        """Holds generation."""
        self.engine.pause(mode)

    def resume(self) -> None:
        """Goes on with it."""
        self.engine.resume()

    def offload(self) -> None:
        """Frees the device's memory."""
        self.engine.offload()

    def onload(self) -> None:
        """Takes it back."""
        self.engine.onload()

    # Weights -------------------------------------------------------------------------------

    def describe_weights(self) -> WeightDescription:
        """The tensors that this member takes."""
        return WeightDescription(tuple(self.engine.shards()), self.engine.tensor_parallel, gpus=visible_uuids())

    def open_receiver(
        self, channels: Sequence[Channel], addresses: Mapping[str, Any], rank: int, timeout_s: float
    ) -> None:
        """Joins the channels that this member reads."""
        self.close_receiver()
        host = str(ray.util.get_node_ip_address())
        self._receiver = WeightReceiver(channels, addresses, rank, host, timeout_s)

    def receive_weights(self, version: int) -> None:
        """Waits for a version. It is staged: what the engine serves does not change."""
        if self._receiver is None:
            raise RuntimeError("this member has no channels")
        self._receiver.receive(version)

    def commit_weights(self, version: int, pause: str) -> int:
        """Puts what was staged to use, between two steps of the engine; returns the version."""
        if self._receiver is None:
            raise RuntimeError("this member has no channels")
        if self.engine.version == version:  # sent once more, because another engine died
            return version
        if pause != "keep":
            self.engine.pause(pause)
        try:
            self.engine.load_weights({**self._receiver.staged(), **self._empty_tensors()}, version)
        finally:
            if pause != "keep":
                self.engine.resume()
        return self.engine.version

    def _empty_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of no elements: nothing of them travels, and the engine wants them all the same."""
        described = self.engine.describe_weights().items()
        return {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (shape, kind) in described if 0 in shape}

    def close_receiver(self) -> None:
        """Leaves the channels."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

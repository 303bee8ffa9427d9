"""The worker process of one member of an engine."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roost.cluster import PortLease, lease_ports
from roost.cluster.ray_typed import node_address
from roost.engines.engine import Engine, EngineOutput, EnginePlace, WeightIntake
from roost.errors import Finding, Fix, RolloutError, printable
from roost.weights.aliasing import MemoryOwner
from roost.weights.buffers import StagedTensors
from roost.weights.endpoints import WeightReceiver
from roost.weights.ipc import visible_uuids
from roost.weights.progress import ABORT, COMMIT, ProgressAddress, SharedProgress
from roost.weights.streams import WeightDescription, WeightStream
from roost.worker import Worker

__all__ = ["EngineWorker", "MemberPorts"]

INIT_PORTS = 30
"""Consecutive ports for distributed initialisation, besides one for each data-parallel rank."""
ATTENTION_PORTS = 4
"""Further ports for data-parallel attention, besides one for each data-parallel rank."""
CHECK_PERIOD_S = 0.2
"""Seconds between two checks whether the engine has ended."""


@dataclass(frozen=True)
class MemberPorts:
    """The ports that a member has leased on its node.

    Attributes:
        host: Address of that node, as Ray knows it there.
        server_port: Port for the HTTP server.
        nccl_port: Port for collectives.
        first_port: First of the consecutive ports for distributed initialisation.
        num_ports: Number of these consecutive ports.
    """

    host: str
    server_port: int
    nccl_port: int
    first_port: int
    num_ports: int


class EngineWorker(Worker):
    """Runs one member of an engine. Most methods pass on to the same method of :class:`roost.Engine`."""

    def __init__(self, factory: Callable[[], Engine]) -> None:
        self._factory = factory
        self._engine: Engine | None = None
        self._receiver: WeightReceiver | None = None
        self._intake: WeightIntake | None = None
        self._memory_owner: MemoryOwner | None = None
        self._progress: SharedProgress | None = None
        self._slot = 0
        self._received = 0
        self._complete = (StagedTensors(), StagedTensors())
        self._leases: list[PortLease] = []
        self._url = ""

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            RuntimeError: The engine was not started.
        """
        if self._engine is None:
            raise RuntimeError("the engine was not started")
        return self._engine

    # Starting and ending -------------------------------------------------------------------

    def lease(self, dp_size: int, dp_attention: bool) -> MemberPorts:
        """Lease the ports of this member on its node, until the worker ends."""
        count = INIT_PORTS + dp_size + ((ATTENTION_PORTS + dp_size) if dp_attention else 0)
        server, nccl, run = lease_ports(1), lease_ports(1), lease_ports(count)
        self._leases = [server, nccl, run]
        host = node_address()
        return MemberPorts(host, server.port, nccl.port, run.port, count)

    def start_engine(self, place: EnginePlace) -> str:
        """Create and start the engine. Return its base URL; empty for members other than 0.

        Raises:
            RolloutError: The engine ran out of GPU memory (E202), or its start failed.
        """
        self._engine = self._factory()
        has_device = self.local_accelerator_rank >= 0 and torch.cuda.is_available()
        place = replace(place, device="cuda:0" if has_device else "cpu")
        try:
            self._url = self._engine.start(place)
        except torch.cuda.OutOfMemoryError as error:
            share = f"gpu_share: {min(1.0, place.gpu_share + 0.2):.1f}"
            fixes = (Fix("give it more of each GPU, or a smaller model", share),)
            message = f"it ran out of memory: {error}"
            raise RolloutError([Finding("E202", message, context=(place.share_text(),), fixes=fixes)]) from error
        if type(self._engine).ended is not Engine.ended:
            threading.Thread(
                target=self._exit_when_engine_ends, args=(self._engine,), name="engine-end", daemon=True
            ).start()
        return self._url

    def _exit_when_engine_ends(self, engine: Engine) -> None:
        """Exit this process once the engine can never serve again, so that the job's supervision detects its death."""
        while not (reason := engine.ended()):
            time.sleep(CHECK_PERIOD_S)
        sys.stderr.write(printable(f"the engine has ended: {reason}\n{engine.logs()}\n"))
        sys.stderr.flush()
        os._exit(1)

    def status_note(self) -> str:
        """Return the URL and the version of the weights, as a note on the state of this worker."""
        if self._engine is None:
            return "no engine yet"
        return f"{self._url} weights {self._engine.version}".lstrip()

    def health(self) -> str:
        """Return why the engine cannot serve; empty if it is healthy."""
        return self.engine.health()

    def logs(self) -> str:
        """Return the last lines of the engine's log."""
        return self._engine.logs() if self._engine is not None else ""

    def stop_engine(self) -> None:
        """Stop the engine. The process ends with its worker group."""
        if self._engine is not None:
            self._engine.stop()

    # Work ----------------------------------------------------------------------------------

    def generate(self, prompts: list[list[int]], params: Mapping[str, Any]) -> list[EngineOutput]:
        """Generate in this process, without the router and the server."""
        return self.engine.generate(prompts, dict(params))

    def pause(self, mode: str) -> None:
        """Pause generation; see :meth:`Engine.pause`."""
        self.engine.pause(mode)

    def resume(self) -> None:
        """Resume generation."""
        self.engine.resume()

    def offload(self) -> None:
        """Free the memory of the accelerators."""
        self.engine.offload()

    def onload(self) -> None:
        """Take the memory of the accelerators again."""
        self.engine.onload()

    # Weights -------------------------------------------------------------------------------

    def describe_weights(self) -> WeightDescription:
        """Return the tensors that this member needs, and how it can receive them."""
        engine = self.engine
        return WeightDescription(
            tuple(engine.shards()),
            engine.tensor_parallel,
            gpus=visible_uuids(),
            broadcast=engine.broadcast,
            broadcast_sender=engine.broadcast_sender,
            broadcast_ranks=engine.broadcast_ranks,
            takes_pieces=engine.takes_pieces,
        )

    def open_receiver(
        self, streams: Sequence[WeightStream], addresses: Mapping[str, Any], rank: int, timeout_s: float
    ) -> None:
        """Open the streams that this member reads; close those of before. Wait at most ``timeout_s`` for the senders."""
        self.close_receiver()
        host = node_address()
        self._intake = self.engine.intake(streams, addresses, rank, host, timeout_s)
        if self._intake is None:
            self._receiver = WeightReceiver(streams, addresses, rank, host, timeout_s)
            if self.engine.aliases_weights:
                self._memory_owner = self._receiver.owner()

    def receive_weights(self, version: int) -> None:
        """Wait for a version and stage it; the engine keeps serving the version before."""
        receiver = self._intake or self._receiver
        if receiver is None:
            raise RuntimeError("this member has no streams")
        receiver.receive(version)
        self._received = version

    def commit_weights(self, version: int, pause: str) -> int:
        """Load the staged version into the engine, between two generation steps; return the engine's version.

        Args:
            version: The version that was sent.
            pause: Mode for :meth:`Engine.pause` during the load; ``keep`` does not pause.
        """
        if self._receiver is None and self._intake is None:
            raise RuntimeError("this member has no streams")
        if self.engine.version == version and self._memory_owner is None:  # sent again because another engine died
            return version
        if pause != "keep":
            self.engine.pause(pause)
        try:
            if self._intake is not None:
                if self._received != version:
                    self._intake.receive(version)
                self._intake.commit(version)
            elif self._receiver is not None:
                named = self._with_empty_tensors(self._receiver.staged())
                if self._memory_owner is not None:
                    self.engine.alias_weights(named, version, self._memory_owner)
                else:
                    self.engine.load_weights(named, version)
        finally:
            if pause != "keep":
                self.engine.resume()
        return self.engine.version

    def open_progress(self, address: ProgressAddress, slot: int) -> bool:
        """Open the progress that :meth:`commit_when_ready` uses; return whether it is on this node."""
        self._progress, self._slot = SharedProgress.open(address), slot
        return self._progress is not None

    def commit_when_ready(self, version: int, pause: str, senders: Sequence[int], timeout_s: float) -> int:
        """Wait in the shared progress until all senders have written and the commit is allowed; then commit the weights."""
        progress = self._progress
        if progress is None:
            raise RuntimeError("this member has no shared progress")
        if progress.wait(
            lambda: (
                progress.get(COMMIT) == version and progress.all_at(senders, version) and progress.get(ABORT) != version
            ),
            timeout_s,
            lambda: progress.get(ABORT) == version,
        ):
            self.commit_weights(version, pause)
            progress.set(self._slot, version)
        return self.engine.version

    def _with_empty_tensors(self, staged: StagedTensors) -> StagedTensors:
        """Return the staged tensors with empty ones added: tensors without elements are not sent, but engines expect them."""
        if self._complete[0] is not staged:
            described = self.engine.describe_weights().items()
            empty = {
                name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (shape, kind) in described if 0 in shape
            }
            self._complete = (staged, StagedTensors({**staged, **empty}))
        return self._complete[1]

    def close_receiver(self) -> None:
        """Close the streams, and have the engine drop the trainer's tensors."""
        ends = [end for end in (self._intake, self._receiver, self._progress) if end is not None]
        try:
            if self._receiver is not None:
                self.engine.forget_sources()
        finally:
            self._memory_owner, self._complete = None, (StagedTensors(), StagedTensors())
            self._intake = self._receiver = self._progress = None
            self._received = 0
            for end in ends:
                end.close()

"""Weight sync: from a trainer to all engines, by the way that each engine's place allows.

A version travels first and is used later: it is staged beside the weights that engines serve, and
only when every part of it is there do they change over, between two steps of generation. So a
trainer that fails in the middle leaves every engine with the version that it had.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roost.cluster import CollectiveManager
from roost.errors import Finding, Fix, RolloutError, RoostError, WorkerDiedError, WorkerError, raise_problems
from roost.plan import Sharding, TensorShards, WeightTransport, plan_transfer
from roost.rl.weights.channels import Channel, WeightDescription, make_channels
from roost.rl.weights.files import publish_version
from roost.rl.weights.ipc import MovedError
from roost.worker import GroupResult, PerRank

if TYPE_CHECKING:
    from roost.cluster import Cluster
    from roost.rl.handles import EngineHandle
    from roost.rl.train import TrainGroup

__all__ = ["PAUSES", "SyncReport", "WeightSync"]

PAUSES = ("wait", "abort", "keep")
_NEAR = (WeightTransport.IPC, WeightTransport.SHARED_MEMORY)


@dataclass(frozen=True)
class SyncReport:
    """What a sync took.

    Attributes:
        version: The version that engines serve now.
        bytes_by_transport: What went over each transport, counted once per channel.
        seconds: How long each phase took: ``connect`` (the first time, and when engines came or went),
            ``transfer``, ``commit``.
        engines: How many engines have it.
    """

    version: int
    bytes_by_transport: dict[str, int]
    seconds: dict[str, float]
    engines: int


@dataclass
class _Targets:
    """Receivers that can be planned for at once: they cut their tensors in the same way."""

    tensors: tuple[TensorShards, ...]
    tensor_parallel: int
    members: list[tuple[EngineHandle, int]] = field(default_factory=list)


class WeightSync:
    """Sends the weights of one trainer to engines."""

    def __init__(self, cluster: Cluster, train: TrainGroup, folder: str, timeout_s: float) -> None:
        self.train = train
        self._cluster = cluster
        self._folder = folder
        self._timeout_s = timeout_s
        self._connected: tuple[object, ...] | None = None
        self._channels: list[Channel] = []
        self._gpus: list[tuple[str, ...]] = []
        self._members: list[tuple[EngineHandle, int]] = []

    def run(
        self, engines: Sequence[EngineHandle], version: int, pause: str, held_back: AbstractContextManager[object]
    ) -> SyncReport:
        """Sends a version to engines, and has them change over.

        Args:
            engines: All that are to have it.
            version: Greater than any before.
            pause: What happens to running generations.
            held_back: Entered while engines change over.

        Raises:
            RolloutError: Where it was not sent; every engine serves what it served before.
            WorkerDiedError: Where an engine or a rank of the trainer is gone.
        """
        clock = _Clock()
        if self._connected != self._identity(engines):
            with clock.phase("connect"):
                self._connect(engines)
        with clock.phase("transfer"):
            try:
                self._transfer(version)
            except WorkerError as error:
                if not isinstance(error.__cause__, MovedError):
                    raise
                self._connect(engines)  # its memory has moved: map it where it is now
                self._transfer(version)
        with clock.phase("commit"), held_back:
            self._commit(version, pause)
        sent: dict[str, int] = {}
        for channel in self._channels:
            sent[channel.kind.value] = sent.get(channel.kind.value, 0) + channel.nbytes
        return SyncReport(version, sent, clock.seconds, len(engines))

    def _identity(self, engines: Sequence[EngineHandle]) -> tuple[object, ...]:
        return (self.train.workers, *(engine.identity for engine in engines))

    # Connecting ----------------------------------------------------------------------------

    def _connect(self, engines: Sequence[EngineHandle]) -> None:
        """Compares both sides, plans who sends what, and opens the channels."""
        self.close()
        source = self._source()
        self._channels, self._members = [], []
        findings: list[Finding] = []
        classes, seen = _classes(engines, source, self._timeout_s)
        for number, targets in enumerate(classes):
            locations = tuple(engine.location(member) for engine, member in targets.members)
            replicas = len(targets.members) // targets.tensor_parallel
            side = Sharding(
                targets.tensors, tp=targets.tensor_parallel, dp=replicas, order="tp-pp-dp", locations=locations
            )
            try:
                flow = plan_transfer(source, side)
            except RoostError as error:
                findings += error.findings
                continue
            first = len(self._members)
            self._members += targets.members

            def kind_of(
                sender: int, target: int, members: Sequence[tuple[EngineHandle, int]] = targets.members
            ) -> WeightTransport:
                engine, member = members[target]
                kind = _kind(engine.transport(member), source.locations[sender], engine.location(member))
                can_map = member == 0 and bool(self._gpus[sender]) and set(self._gpus[sender]) <= seen[engine.identity]
                return WeightTransport.IPC if kind is WeightTransport.SHARED_MEMORY and can_map else kind

            prefix = f"{self.train.component}-weights-{number}"
            self._channels += make_channels(flow, kind_of, prefix, first)
        raise_problems(findings)
        self._open(source.tensors)
        self._connected = self._identity(engines)

    def _source(self) -> Sharding:
        """The trainer's side: what its ranks say together."""
        described: list[WeightDescription] = self.train.workers.describe_weights().wait(self._timeout_s)
        tensors: dict[str, TensorShards] = {}
        for description in described:
            for tensor in description.tensors:
                tensors.setdefault(tensor.name, tensor)
        self._gpus = [description.gpus for description in described]
        tp, pp = described[0].tensor_parallel, described[0].pipeline_parallel
        placements = self.train.plan.component(self.train.component).placements
        locations = tuple((p.cluster_node_rank, p.local_accelerator_rank) for p in placements)
        return Sharding(tuple(tensors.values()), tp=tp, pp=pp, dp=len(described) // (tp * pp), locations=locations)

    def _open(self, tensors: Sequence[TensorShards]) -> None:
        workers = self.train.workers
        own = [[channel for channel in self._channels if channel.source == rank] for rank in range(workers.world_size)]
        files = tensors if any(channel.kind is WeightTransport.FILE for channel in self._channels) else ()
        addresses: dict[str, Any] = {}
        for found in workers.open_channels(PerRank(own), files, self._folder, self._timeout_s).wait():
            addresses.update(found)
        collectives = CollectiveManager(self._cluster.managers)
        for channel in self._channels:
            if channel.kind is WeightTransport.BROADCAST:
                host, _, port = addresses[channel.id].rpartition(":")
                collectives.register(channel.id, host, int(port), 1 + len(channel.targets))
        waiting: list[GroupResult] = []
        for rank, (engine, member) in enumerate(self._members):
            read = [channel for channel in self._channels if rank in channel.targets]
            waiting += engine.call(member, "open_receiver", read, addresses, rank, self._timeout_s)
        waiting.append(workers.join_channels())
        _wait_all(waiting, self._timeout_s)

    # One version ---------------------------------------------------------------------------

    def _transfer(self, version: int) -> None:
        waiting = []
        for engine, member in self._members:
            waiting += engine.call(member, "receive_weights", version)
        waiting.append(self.train.workers.send_weights(version))
        try:
            _wait_all(waiting, self._timeout_s)
            if any(channel.kind is WeightTransport.FILE for channel in self._channels):
                self._publish(version)
        except BaseException:
            self._connected = None  # ends that failed are closed
            raise

    def _publish(self, version: int) -> None:
        try:
            publish_version(self._folder, version)
        except OSError as error:
            message = f"version {version} was not sent: {self._folder} does not have what trainers wrote: {error}"
            fixes = (Fix("a folder that all see, this process too", "RolloutManager(…, weights_folder=…)"),)
            raise RolloutError([Finding("S205", message, fixes=fixes)]) from error

    def _commit(self, version: int, pause: str) -> None:
        waiting = []
        for engine, member in self._members:
            waiting += engine.commit(member, version, pause, self._folder)
        try:
            _wait_all(waiting, self._timeout_s)
        except BaseException:
            self._connected = None
            raise
        for engine, _ in self._members:
            engine.version = version

    @property
    def maps_memory(self) -> bool:
        """Whether engines have mapped memory of the trainer's GPUs."""
        return any(channel.kind is WeightTransport.IPC for channel in self._channels)

    def close(self) -> None:
        """Closes all channels, as far as their ends are alive."""
        collectives = CollectiveManager(self._cluster.managers)
        waiting: list[GroupResult] = []
        with contextlib.suppress(RoostError):
            for engine, member in self._members:
                waiting += engine.call(member, "close_receiver")
            waiting.append(self.train.workers.close_channels())
        for result in waiting:
            with contextlib.suppress(RoostError):
                result.wait(timeout=30)
        for channel in self._channels:
            if channel.kind is WeightTransport.BROADCAST:
                with contextlib.suppress(Exception):
                    collectives.remove(channel.id)
        self._members, self._channels, self._connected = [], [], None


def _classes(
    engines: Sequence[EngineHandle], source: Sharding, timeout_s: float
) -> tuple[list[_Targets], dict[object, set[str]]]:
    """Engines whose members take the same tensors cut in the same way, together; and the GPUs that each sees."""
    asked = [engine.describe() for engine in engines]
    seen: dict[object, set[str]] = {}
    classes: dict[tuple[object, ...], _Targets] = {}
    for engine, result in zip(engines, asked, strict=True):
        described = result.wait(timeout_s)[0] if result is not None else WeightDescription(_whole(source.tensors))
        tp = described.tensor_parallel
        if tp not in (1, engine.num_members):
            message = f"{engine.name}: the engine cuts its tensors over {tp} members, and has {engine.num_members}"
            raise RolloutError([Finding("S202", message)])
        key = (described.tensors, tp)
        targets = classes.setdefault(key, _Targets(described.tensors, tp))
        targets.members += [(engine, member) for member in range(tp)]
        seen[engine.identity] = set(described.gpus)
    return list(classes.values()), seen


def _whole(tensors: Sequence[TensorShards]) -> tuple[TensorShards, ...]:
    """The same tensors, uncut."""
    return tuple(TensorShards(tensor.name, tensor.shape, tensor.dtype) for tensor in tensors)


def _kind(planned: WeightTransport, sender: tuple[int, int], receiver: tuple[int, int]) -> WeightTransport:
    """The transport between two processes: what was planned, where both are on one node."""
    if planned in _NEAR:
        return WeightTransport.SHARED_MEMORY if sender[0] == receiver[0] else WeightTransport.BROADCAST
    return planned


def _wait_all(results: Sequence[GroupResult], timeout_s: float) -> None:
    """Waits for all, also after a failure; raises the first cause: an error rather than what it entailed."""
    errors: list[RoostError] = []
    deadline = time.monotonic() + timeout_s + 5.0  # both ends have a timeout of their own, and say more
    for result in results:
        try:
            result.wait(max(1.0, deadline - time.monotonic()))
        except RoostError as error:
            errors.append(error)
    if not errors:
        return
    died = [error for error in errors if isinstance(error, WorkerDiedError)]
    torn = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    own = [error for error in errors if not any(text in str(error) for text in torn)]
    raise (died or own or errors)[0]


class _Clock:
    """Seconds of phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start

"""Weight sync: from a trainer to all engines, by the way that each engine's place allows.

A version travels first and is used later: it is staged beside the weights that engines serve, and
only when every part of it is there do they change over, between two steps of generation. So a
trainer that fails in the middle leaves every engine with the version that it had.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from roost.cluster import CollectiveManager
from roost.errors import (
    CallTimeoutError,
    Finding,
    Fix,
    RolloutError,
    RoostError,
    WorkerError,
    raise_problems,
)
from roost.plan import Sharding, TensorShards, WeightTransport
from roost.plan.transport import NEAR
from roost.weights.channels import Channel, WeightDescription
from roost.weights.files import discard_version, publish_version
from roost.weights.flags import FIRST, GO, STOP, Flags
from roost.weights.folder import WeightsFolder
from roost.weights.ipc import MovedError
from roost.weights.shard_files import FileShard, plan_files
from roost.weights.stoppable import STOP_S, FailureWatch
from roost.weights.transports import EngineTransfer, group_receivers
from roost.weights.waiting import are_over, wait_all
from roost.worker import GroupResult, PerRank
from roost.worker.deadline import Deadline
from roost.worker.results import LaneResult

if TYPE_CHECKING:
    from roost.cluster import Cluster
    from roost.engines.handles import EngineHandle
    from roost.rl.train import TrainGroup

__all__ = ["PAUSES", "SyncReport", "WeightSync"]

PAUSES = ("wait", "abort", "keep")
ENDS_SHARE = 0.9
"""The part of a timeout that both ends of a channel wait for each other: they give up first, and say more."""
STOPPED_S = 0.3
"""Seconds that ends have to return after they were told to stop, when the deadline has passed."""
CLOSE_S = 30.0
"""Seconds that ends may take to close their channels."""


@dataclass(frozen=True)
class SyncReport:
    """What a sync took.

    Attributes:
        version: The version that engines serve now.
        bytes_by_transport: What went over each transport, counted once per channel.
        seconds: How long each phase took: ``connect`` (the first time, and when engines came or went),
            ``transfer`` (where weights travel), ``commit``.
        engines: How many engines have it.
    """

    version: int
    bytes_by_transport: dict[str, int]
    seconds: dict[str, float]
    engines: int


class WeightSync:
    """Sends the weights of one trainer to engines.

    Attributes:
        begun: The last version that an engine may have.
    """

    def __init__(self, cluster: Cluster, train: TrainGroup, folder: WeightsFolder, timeout_s: float) -> None:
        self.train = train
        self._cluster = cluster
        self._weights_folder = folder
        self._folder = ""
        self._ends_s = ENDS_SHARE * timeout_s
        self._deadline = Deadline(timeout_s)
        self.begun = 0
        self._connected: tuple[object, ...] | None = None
        self._channels: list[Channel] = []
        self._files: list[FileShard] = []
        self._has_broadcasts = False
        self._gpus: list[tuple[str, ...]] = []
        self._members: list[tuple[EngineHandle, int]] = []
        self._flags: Flags | None = None

    def run(
        self,
        engines: Sequence[EngineHandle],
        version: int,
        pause: str,
        held_back: AbstractContextManager[object],
        deadline: Deadline,
        drain_s: float = 0.0,
    ) -> SyncReport:
        """Sends a version to engines, and has them change over.

        Args:
            engines: All that are to have it.
            version: Greater than any before.
            pause: What happens to running generations.
            held_back: Entered while engines change over.
            deadline: When it gives up, in whichever step it is.
            drain_s: Seconds that entering ``held_back`` may take beyond that, because running requests end first.

        Raises:
            RolloutError: Where it was not sent; every engine serves what it served before.
            WorkerDiedError: Where an engine or a rank of the trainer is gone.
        """
        self._deadline, clock = deadline, _Clock()
        if self._connected != self._identity(engines):
            with clock.phase("connect"):
                self._connect(engines)
        with contextlib.ExitStack() as stack:
            waiting = [held_back]

            def hold_back() -> None:
                while waiting:  # once, also where it is sent twice
                    stack.enter_context(waiting.pop())

            if self._is_in_place:
                with clock.phase("commit"):
                    self._again_where_moved(engines, lambda: self._read_in_place(version, pause, hold_back, drain_s))
            else:
                with clock.phase("transfer"):
                    self._again_where_moved(engines, lambda: self._transfer(version))
                with clock.phase("commit"):
                    hold_back()
                    self._commit(version, pause)
        for engine, _ in self._members:
            engine.version = version
        sent: dict[str, int] = {}
        for channel in self._channels:
            if channel.kind is not WeightTransport.FILE:
                sent[channel.kind.value] = sent.get(channel.kind.value, 0) + channel.nbytes
        if self._files:  # written once, whatever the number of readers
            sent[WeightTransport.FILE.value] = sum(shard.nbytes for shard in self._files if shard.file)
        return SyncReport(version, sent, clock.seconds, len(engines))

    def _identity(self, engines: Sequence[EngineHandle]) -> tuple[object, ...]:
        return (self.train.workers, *(engine.identity for engine in engines))

    # Connecting ----------------------------------------------------------------------------

    def _connect(self, engines: Sequence[EngineHandle]) -> None:
        """Compares both sides, plans who sends what, and opens the channels."""
        self.close(self._deadline)
        source = self._source()
        self._channels, self._members = [], []
        findings: list[Finding] = []
        for number, group in enumerate(group_receivers(engines, source, self._deadline)):
            first = len(self._members)
            try:
                made = EngineTransfer(group, source, self._gpus).channels(
                    f"{self.train.component}-weights-{number}", first
                )
            except RoostError as error:
                findings += error.findings
                continue
            self._members += group.members
            self._channels += made
        raise_problems(findings)
        self._open(source)
        self._connected = self._identity(engines)

    def _source(self) -> Sharding:
        """The trainer's side: what its ranks say together."""
        described: list[WeightDescription] = self.train.workers.describe_weights().wait(self._deadline.left_s())
        tensors: dict[str, TensorShards] = {}
        for description in described:
            for tensor in description.tensors:
                tensors.setdefault(tensor.name, tensor)
        self._gpus = [description.gpus for description in described]
        tp, pp = described[0].tensor_parallel, described[0].pipeline_parallel
        placements = self.train.plan.component(self.train.component).placements
        locations = tuple((p.cluster_node_rank, p.local_accelerator_rank) for p in placements)
        return Sharding(tuple(tensors.values()), tp=tp, pp=pp, dp=len(described) // (tp * pp), locations=locations)

    def _open(self, source: Sharding) -> None:
        workers = self.train.workers
        sent = [channel for channel in self._channels if channel.kind is not WeightTransport.FILE]
        own = [[channel for channel in sent if channel.source == rank] for rank in range(workers.world_size)]
        kinds = {channel.kind for channel in self._channels}
        self._has_broadcasts, has_files = WeightTransport.BROADCAST in kinds, WeightTransport.FILE in kinds
        self._folder = self._weights_folder.path() if has_files else ""
        self._files = plan_files(source) if has_files else []
        shards = {shard.rank: shard for shard in self._files}
        files = PerRank([shards.get(rank) for rank in range(workers.world_size)])
        addresses: dict[str, Any] = {channel.id: self._folder for channel in self._channels}
        for found in workers.open_channels(PerRank(own), files, self._folder, self._ends_s).wait(
            self._deadline.left_s()
        ):
            addresses.update(found)
        collectives = CollectiveManager(self._cluster.managers)
        for channel in self._channels:
            if channel.kind is WeightTransport.BROADCAST:
                host, _, port = addresses[channel.id].rpartition(":")
                collectives.register(channel.id, host, int(port), channel.world_size)
        waiting: list[GroupResult] = []
        for rank, (engine, member) in enumerate(self._members):
            read = [channel for channel in self._channels if rank in channel.targets]
            waiting += engine.call(member, "open_receiver", read, addresses, rank, self._ends_s)
        self._wait_for_both(waiting, [workers.join_channels()])
        if self._is_in_place:
            self._open_flags()

    def _open_flags(self) -> None:
        """Shares a page with both sides, where all are on this node."""
        workers = self.train.workers
        flags = self._flags = Flags(workers.world_size + len(self._members))
        waiting = [workers.open_flags(flags.address, FIRST)]
        for number, (engine, member) in enumerate(self._members):
            waiting += engine.call(member, "open_flags", flags.address, FIRST + workers.world_size + number)
        if all(all(result.wait(self._deadline.left_s())) for result in waiting):
            workers.open_lanes(range(workers.world_size), timeout_s=self._deadline.left_s())
            for engine, member in self._members:
                engine.open_lane(member, self._deadline.left_s())
        else:
            flags.close()
            self._flags = None

    # One version ---------------------------------------------------------------------------

    @property
    def _is_in_place(self) -> bool:
        """Whether engines read the trainer's own memory, so that nothing travels before they change over."""
        return all(channel.kind is WeightTransport.IPC for channel in self._channels)

    def _transfer(self, version: int) -> None:
        """Has a version staged everywhere."""
        waiting: list[GroupResult] = []
        for rank, (engine, member) in enumerate(self._members):
            if any(rank in channel.targets and channel.kind not in NEAR for channel in self._channels):
                waiting += engine.call(member, "receive_weights", version)
        sending = [self.train.workers.send_weights(version)]
        try:
            self._wait_for_both(waiting, sending)
            if any(shard.joined for shard in self._files):
                wait_all([self.train.workers.join_pieces(version)], self._deadline)
            if self._files:
                self._publish(version)
        except BaseException:
            self._connected = None  # ends that failed are closed
            if self._files:
                discard_version(self._folder, version)
            raise

    def _again_where_moved(self, engines: Sequence[EngineHandle], send: Callable[[], None]) -> None:
        """Sends; once more, with everything mapped anew, where the trainer's memory has moved."""
        try:
            send()
        except WorkerError as error:
            if not isinstance(error.__cause__, MovedError):
                raise
            self._connect(engines)
            send()

    def _read_in_place(self, version: int, pause: str, hold_back: Callable[[], object], drain_s: float) -> None:
        """Calls everybody at once: they wait for each other by flags, where they are all on one node."""
        flags, count = self._flags, self.train.workers.world_size
        if flags is None:
            try:
                sending = self.train.workers.send_weights(version)
                hold_back()
                wait_all([sending], self._deadline)
            except BaseException:
                self._connected = None  # ends that failed are closed
                raise
            self._commit(version, pause)
            return
        senders = range(FIRST, FIRST + count)
        done = range(FIRST + count, FIRST + count + len(self._members))
        waiting = [self.train.workers.begin(rank, "send_weights", version) for rank in range(count)]
        for engine, member in self._members:
            limit_s = self._deadline.left_s() + drain_s
            waiting.append(engine.begin(member, "commit_when_ready", version, pause, senders, limit_s))
        try:
            hold_back()
            flags.set(GO, version)
            is_done = flags.wait(
                lambda: flags.all_say(done, version), self._deadline.left_s(), lambda: are_over(waiting)
            )
            if not is_done:
                flags.set(STOP, version)
                wait_all(waiting, Deadline(self._deadline.left_s(at_least_s=STOPPED_S)))
                if not flags.all_say(done, version):  # nobody failed, and somebody was late
                    message = f"version {version} was not taken by all engines within {self._deadline.timeout_s:g} s"
                    raise CallTimeoutError([Finding("W203", message)])
        except BaseException:
            self._connected = None
            flags.set(STOP, version)  # before the look: who sees the senders' flags later sees this one too
            if flags.get(GO) == version and flags.all_say(senders, version):
                self.begun = version  # some engine may have it
            raise
        self.begun = version
        for result in waiting:
            if isinstance(result, LaneResult):
                result.forget()

    def _publish(self, version: int) -> None:
        try:
            publish_version(self._folder, version, self._files)
        except OSError as error:
            message = f"version {version} was not sent: {self._folder} does not have what trainers wrote: {error}"
            fixes = (Fix("a folder that all see, this process too", "RolloutManager(…, weights_folder=…)"),)
            raise RolloutError([Finding("S205", message, fixes=fixes)]) from error

    def _commit(self, version: int, pause: str) -> None:
        self.begun = version  # from here on an engine may have it, whatever happens
        waiting = []
        for engine, member in self._members:
            waiting += engine.commit(member, version, pause, self._folder)
        has_direct = any(channel.is_direct for channel in self._channels)
        sending = [self.train.workers.send_weights(version, True)] if has_direct else []
        try:
            self._wait_for_both(waiting, sending)
        except BaseException:
            self._connected = None
            raise

    def _wait_for_both(self, of_engines: list[GroupResult], of_trainer: list[GroupResult]) -> None:
        """Waits for calls of engines and of the trainer, which must not wait in a broadcast for an engine that failed."""
        watch = FailureWatch(of_engines, lambda error: self._stop_broadcasts(error.findings[0].message))
        with watch if of_trainer and self._has_broadcasts else contextlib.nullcontext():
            wait_all([*of_engines, *of_trainer], self._deadline)

    def _stop_broadcasts(self, reason: str) -> None:
        """Has all ranks of the trainer give up their broadcasts."""
        refs = self.train.workers.call_beside("stop_broadcasts", reason)
        ray.wait(refs, num_returns=len(refs), timeout=STOP_S)

    @property
    def maps_memory(self) -> bool:
        """Whether engines have mapped memory of the trainer's GPUs."""
        return any(channel.kind is WeightTransport.IPC for channel in self._channels)

    def close(self, deadline: Deadline | None = None) -> None:
        """Close all channels, as far as their ends are alive; wait for that at most half of what is left of a deadline."""
        limit = Deadline(CLOSE_S if deadline is None else min(CLOSE_S, deadline.left_s() / 2))
        collectives = CollectiveManager(self._cluster.managers)
        waiting: list[GroupResult] = []
        with contextlib.suppress(RoostError):
            if self._has_broadcasts:
                self._stop_broadcasts("their channels are closed")
            for engine, member in self._members:
                if engine.is_alive:
                    waiting += engine.call(member, "close_receiver")
            waiting.append(self.train.workers.close_channels())
        for result in waiting:
            with contextlib.suppress(RoostError):
                result.wait(limit.left_s())
        for channel in self._channels:
            if channel.kind is WeightTransport.BROADCAST:
                with contextlib.suppress(Exception):
                    collectives.remove(channel.id)
        self._members, self._channels, self._files, self._connected = [], [], [], None
        if self._flags is not None:
            self._flags.close()
            self._flags = None


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

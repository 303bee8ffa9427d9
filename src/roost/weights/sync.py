"""Weight sync: sends the weights of a trainer to all engines, over the transport that each engine's location allows.

A sync has two phases, as a two-phase commit. In the transfer, a version is staged beside the weights that engines
serve. In the commit, after all engines have the whole version, they change to it between two steps of generation. If
the transfer fails, all engines keep the version that they had.
"""

from __future__ import annotations

import contextlib
import logging
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
from roost.weights.files import discard_version, publish_version
from roost.weights.folder import WeightsFolder
from roost.weights.ipc import MovedError
from roost.weights.parties import CallResult, ManagedEngine, SyncEngine, SyncTrainer
from roost.weights.progress import ABORT, COMMIT, FIRST_RANK, SharedProgress
from roost.weights.shard_files import FileShard, plan_files
from roost.weights.stoppable import STOP_S, FailureWatch
from roost.weights.streams import WeightDescription, WeightStream
from roost.weights.transports import EngineTransfer, group_receivers
from roost.weights.waiting import have_ended, wait_all
from roost.worker import PerRank
from roost.worker.deadline import Deadline
from roost.worker.results import LaneResult

if TYPE_CHECKING:
    from roost.cluster import Cluster

__all__ = ["PAUSES", "SyncReport", "WeightSync"]

logger = logging.getLogger("roost")

PAUSES = ("wait", "abort", "keep")
ENDPOINTS_SHARE = 0.9
"""Share of the timeout after which endpoints stop waiting for each other: their errors say more than a timeout."""
ABORT_S = 0.3
"""Seconds that endpoints have to return after an abort, if the deadline has passed."""
CLOSE_S = 30.0
"""Most seconds to wait until endpoints are closed."""


@dataclass(frozen=True)
class SyncReport:
    """Bytes and times of a sync.

    Attributes:
        version: The version that engines serve now.
        bytes_by_transport: Bytes sent over each transport; a stream with several receivers counts once.
        seconds: Seconds of each phase: ``connect`` (in the first sync and when the engines have changed), ``transfer``
            (absent where engines read the trainer's memory in place) and ``commit``.
        engines: Number of engines that have the version.
    """

    version: int
    bytes_by_transport: dict[str, int]
    seconds: dict[str, float]
    engines: int


class WeightSync:
    """The sync of one trainer's weights to engines.

    Args:
        cluster: The cluster of the job.
        train: The trainer.
        folder: The folder for weights in files.
        timeout_s: Seconds that one sync may take.

    Attributes:
        train: The trainer.
        attempted_version: The latest version that an engine may serve, also after a sync that failed.
    """

    def __init__(self, cluster: Cluster, train: SyncTrainer, folder: WeightsFolder, timeout_s: float) -> None:
        self.train = train
        self._cluster = cluster
        self._weights_folder = folder
        self._folder = ""
        self._endpoints_s = ENDPOINTS_SHARE * timeout_s
        self._deadline = Deadline(timeout_s)
        self.attempted_version = 0
        self._connected: tuple[object, ...] | None = None
        self._streams: list[WeightStream] = []
        self._files: list[FileShard] = []
        self._has_broadcasts = False
        self._gpus: list[tuple[str, ...]] = []
        self._members: list[tuple[SyncEngine, int]] = []
        self._in_place: list[tuple[ManagedEngine, int]] = []
        self._progress: SharedProgress | None = None

    def run(
        self,
        engines: Sequence[SyncEngine],
        version: int,
        pause: str,
        hold: AbstractContextManager[object],
        deadline: Deadline,
        drain_s: float = 0.0,
    ) -> SyncReport:
        """Send a version to engines and have them serve it; block until all do.

        Args:
            engines: The engines.
            version: Number of the version, greater than all before.
            pause: What happens to running generations; one of :data:`PAUSES`.
            hold: Entered before engines commit, and left after: it keeps generation from running.
            deadline: Deadline of the whole sync.
            drain_s: Seconds beyond the deadline that entering ``hold`` may take, because running requests end first.

        Raises:
            RolloutError: The version was not sent; all engines serve the version that they served before.
            WorkerDiedError: An engine or a rank of the trainer has died.
        """
        self._deadline, clock = deadline, _Clock()
        if self._connected != self._identity(engines):
            with clock.phase("connect"):
                self._connect(engines)
        with contextlib.ExitStack() as stack:
            not_entered = [hold]

            def enter_hold() -> None:
                while not_entered:  # enter it once, also if the version is sent twice
                    stack.enter_context(not_entered.pop())

            if self._is_in_place:
                with clock.phase("commit"):
                    self._retry_if_moved(engines, lambda: self._read_in_place(version, pause, enter_hold, drain_s))
            else:
                with clock.phase("transfer"):
                    self._retry_if_moved(engines, lambda: self._transfer(version))
                with clock.phase("commit"):
                    enter_hold()
                    self._commit(version, pause)
        for engine, _ in self._members:
            engine.version = version
        sent: dict[str, int] = {}
        for stream in self._streams:
            if stream.transport is not WeightTransport.FILE:
                sent[stream.transport.value] = sent.get(stream.transport.value, 0) + stream.nbytes
        if self._files:  # each file is written once, whatever the number of readers
            sent[WeightTransport.FILE.value] = sum(shard.nbytes for shard in self._files if shard.file)
        return SyncReport(version, sent, clock.seconds, len(engines))

    def _identity(self, engines: Sequence[SyncEngine]) -> tuple[object, ...]:
        return (self.train.workers, *(engine.identity for engine in engines))

    # Connecting ----------------------------------------------------------------------------

    def _connect(self, engines: Sequence[SyncEngine]) -> None:
        """Compare the tensors of both sides, plan the transfer, and open the streams."""
        self.close(self._deadline)
        source = self._source()
        self._streams, self._members = [], []
        findings: list[Finding] = []
        for number, group in enumerate(group_receivers(engines, source, self._deadline)):
            first = len(self._members)
            try:
                made = EngineTransfer(group, source, self._gpus).streams(
                    f"{self.train.component}-weights-{number}", first
                )
            except RoostError as error:
                findings += error.findings
                continue
            self._members += group.members
            self._streams += made
        raise_problems(findings)
        self._open(source)
        self._connected = self._identity(engines)

    def _source(self) -> Sharding:
        """Return the sharding of the trainer, from the descriptions of its ranks."""
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
        """Open the endpoints of all streams on both sides; block until they are connected."""
        workers = self.train.workers
        sent = [stream for stream in self._streams if stream.transport is not WeightTransport.FILE]
        own = [[stream for stream in sent if stream.source == rank] for rank in range(workers.world_size)]
        transports = {stream.transport for stream in self._streams}
        self._has_broadcasts = WeightTransport.BROADCAST in transports
        has_files = WeightTransport.FILE in transports
        self._folder = self._weights_folder.path() if has_files else ""
        self._files = plan_files(source) if has_files else []
        shards = {shard.rank: shard for shard in self._files}
        files = PerRank([shards.get(rank) for rank in range(workers.world_size)])
        addresses: dict[str, Any] = {stream.id: self._folder for stream in self._streams}
        opening = workers.open_streams(PerRank(own), files, self._folder, self._endpoints_s)
        for found in opening.wait(self._deadline.left_s()):
            addresses.update(found)
        collectives = CollectiveManager(self._cluster.managers)
        for stream in self._streams:
            if stream.transport is WeightTransport.BROADCAST:
                host, _, port = addresses[stream.id].rpartition(":")
                collectives.register(stream.id, host, int(port), stream.world_size)
        waiting: list[CallResult] = []
        for rank, (engine, member) in enumerate(self._members):
            read = [stream for stream in self._streams if rank in stream.targets]
            waiting += engine.call(member, "open_receiver", read, addresses, rank, self._endpoints_s)
        self._wait_for_both(waiting, [workers.join_streams()])
        if self._is_in_place:
            self._open_progress()

    def _open_progress(self) -> None:
        """Share a page of memory for progress with trainer and engines, if all of them are on this node."""
        self._in_place = [(engine, rank) for engine, rank in self._members if isinstance(engine, ManagedEngine)]
        if len(self._in_place) < len(self._members):
            return
        workers = self.train.workers
        progress = self._progress = SharedProgress(workers.world_size + len(self._in_place))
        waiting: list[CallResult] = [workers.open_progress(progress.address, FIRST_RANK)]
        for number, (engine, member) in enumerate(self._in_place):
            waiting += engine.call(member, "open_progress", progress.address, FIRST_RANK + workers.world_size + number)
        if all(all(result.wait(self._deadline.left_s())) for result in waiting):
            workers.open_lanes(range(workers.world_size), timeout_s=self._deadline.left_s())
            for engine, member in self._in_place:
                engine.open_lane(member, self._deadline.left_s())
        else:
            progress.close()
            self._progress = None

    # One version ---------------------------------------------------------------------------

    @property
    def _is_in_place(self) -> bool:
        """Whether all engines read the trainer's memory in place, so that there is no transfer before the commit."""
        return all(stream.transport is WeightTransport.IPC for stream in self._streams)

    def _transfer(self, version: int) -> None:
        """Stage a version on all engines."""
        waiting: list[CallResult] = []
        for rank, (engine, member) in enumerate(self._members):
            if any(rank in stream.targets and stream.transport not in NEAR for stream in self._streams):
                waiting += engine.call(member, "receive_weights", version)
        sending: list[CallResult] = [self.train.workers.send_weights(version)]
        try:
            self._wait_for_both(waiting, sending)
            if any(shard.joined for shard in self._files):
                wait_all([self.train.workers.join_pieces(version)], self._deadline)
            if self._files:
                self._publish(version)
        except BaseException:
            self._connected = None  # endpoints that failed have closed themselves
            if self._files:
                discard_version(self._folder, version)
            raise

    def _retry_if_moved(self, engines: Sequence[SyncEngine], send: Callable[[], None]) -> None:
        """Send a version. If the trainer's tensors have moved to other memory, connect again and retry once."""
        try:
            send()
        except WorkerError as error:
            if not isinstance(error.__cause__, MovedError):
                raise
            self._connect(engines)
            send()

    def _read_in_place(self, version: int, pause: str, enter_hold: Callable[[], object], drain_s: float) -> None:
        """Have engines copy a version from the trainer's memory.

        On one node, all calls start at once, and trainer, engines and driver wait for each other through the shared
        progress. Otherwise the calls follow each other.
        """
        progress, count = self._progress, self.train.workers.world_size
        if progress is None:
            try:
                sending = self.train.workers.send_weights(version)
                enter_hold()
                wait_all([sending], self._deadline)
            except BaseException:
                self._connected = None  # endpoints that failed have closed themselves
                raise
            self._commit(version, pause)
            return
        senders = range(FIRST_RANK, FIRST_RANK + count)
        receivers = range(FIRST_RANK + count, FIRST_RANK + count + len(self._in_place))
        waiting = [self.train.workers.begin(rank, "send_weights", version) for rank in range(count)]
        for engine, member in self._in_place:
            limit_s = self._deadline.left_s() + drain_s
            waiting.append(engine.begin(member, "commit_when_ready", version, pause, senders, limit_s))
        try:
            enter_hold()
            progress.set(COMMIT, version)
            is_done = progress.wait(
                lambda: progress.all_at(receivers, version), self._deadline.left_s(), lambda: have_ended(waiting)
            )
            if not is_done:
                progress.set(ABORT, version)
                wait_all(waiting, Deadline(self._deadline.left_s(at_least_s=ABORT_S)))
                if not progress.all_at(receivers, version):  # no call failed, but one was late
                    message = f"not all engines loaded version {version} within {self._deadline.timeout_s:g} s"
                    raise CallTimeoutError([Finding("W203", message)])
        except BaseException:
            self._connected = None
            # Abort before reading the senders' slots: an engine that finds them finished later finds the abort, too.
            progress.set(ABORT, version)
            if progress.get(COMMIT) == version and progress.all_at(senders, version):
                self.attempted_version = version  # an engine may have loaded it
            raise
        self.attempted_version = version
        for result in waiting:
            if isinstance(result, LaneResult):
                result.forget()

    def _publish(self, version: int) -> None:
        try:
            publish_version(self._folder, version, self._files)
        except OSError as error:
            message = f"version {version} was not sent: {self._folder} lacks files that the trainer wrote: {error}"
            fixes = (Fix("use a folder that all nodes and this process share", "RolloutManager(…, weights_folder=…)"),)
            raise RolloutError([Finding("S205", message, fixes=fixes)]) from error

    def _commit(self, version: int, pause: str) -> None:
        """Have all engines load the version that was staged for them."""
        self.attempted_version = version  # from here on an engine may serve it, also after a failure
        waiting: list[CallResult] = []
        for engine, member in self._members:
            waiting += engine.commit(member, version, pause, self._folder)
        has_direct = any(stream.is_direct for stream in self._streams)
        sending: list[CallResult] = [self.train.workers.send_weights(version, True)] if has_direct else []
        try:
            self._wait_for_both(waiting, sending)
        except BaseException:
            self._connected = None
            raise

    def _wait_for_both(self, of_engines: Sequence[CallResult], of_trainer: Sequence[CallResult]) -> None:
        """Wait for calls of engines and trainer. If an engine fails, the trainer's broadcasts to it are aborted."""
        watch = FailureWatch(of_engines, lambda error: self._stop_broadcasts(error.findings[0].message))
        with watch if of_trainer and self._has_broadcasts else contextlib.nullcontext():
            wait_all([*of_engines, *of_trainer], self._deadline)

    def _stop_broadcasts(self, reason: str) -> None:
        """Abort the broadcasts of all ranks of the trainer; wait at most :data:`STOP_S` until they know."""
        refs = self.train.workers.call_beside("stop_broadcasts", reason)
        ray.wait(refs, num_returns=len(refs), timeout=STOP_S)

    @property
    def maps_memory(self) -> bool:
        """Whether engines map memory of the trainer's GPUs."""
        return any(stream.transport is WeightTransport.IPC for stream in self._streams)

    def close(self, deadline: Deadline | None = None) -> None:
        """Close the endpoints of all workers that are alive. Failures are logged.

        Args:
            deadline: Wait at most half of the time left, and never longer than :data:`CLOSE_S`.
        """
        limit = Deadline(CLOSE_S if deadline is None else min(CLOSE_S, deadline.left_s() / 2))
        collectives = CollectiveManager(self._cluster.managers)
        waiting: list[CallResult] = []
        with _errors_logged("the streams of weights were not closed", RoostError):
            if self._has_broadcasts:
                self._stop_broadcasts("their streams are closed")
            for engine, member in self._members:
                if engine.is_alive:
                    waiting += engine.call(member, "close_receiver")
            waiting.append(self.train.workers.close_streams())
        for result in waiting:
            with _errors_logged("a worker did not close its streams of weights", RoostError):
                result.wait(limit.left_s())
        for stream in self._streams:
            if stream.transport is WeightTransport.BROADCAST:
                with _errors_logged(f"the process group {stream.id} is still registered", Exception):
                    collectives.remove(stream.id)
        self._members, self._in_place = [], []
        self._streams, self._files, self._connected = [], [], None
        self._has_broadcasts = False
        if self._progress is not None:
            self._progress.close()
            self._progress = None


@contextlib.contextmanager
def _errors_logged(message: str, kind: type[Exception]) -> Iterator[None]:
    """Log errors of a kind, at level DEBUG: the worker may have died, which is reported where it is found."""
    try:
        yield
    except kind as error:
        logger.debug("%s: %s", message, error)


class _Clock:
    """A stopwatch for the phases of a sync."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start

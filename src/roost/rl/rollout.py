"""The rollout manager: engines, and what they need to work together."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from roost.cluster import Cluster
from roost.data.samples import SampleGroup
from roost.engines.engine import Engine
from roost.engines.handles import EngineHandle, ExternalEngine
from roost.engines.router import add_limit_s
from roost.engines.starting import EngineStarter
from roost.errors import (
    CallTimeoutError,
    ClusterError,
    Finding,
    RolloutError,
    RoostError,
    WorkerDiedError,
    WorkerError,
    counted,
)
from roost.plan import ComponentPlan, Plan
from roost.rl.fleet import Fleet, joined
from roost.rl.generating import Generator
from roost.rl.hub import BufferClient, LockClient
from roost.rl.hub_starting import HubStarter
from roost.rl.lost_engines import check_nodes_of, none_alive
from roost.rl.train import TrainGroup
from roost.weights.folder import WeightsFolder
from roost.weights.sync import PAUSES, SyncReport, WeightSync
from roost.worker import WorkerGroup
from roost.worker.deadline import Deadline
from roost.worker.group import kill_workers_of

__all__ = ["RolloutManager"]

ROLE = "rollout"
ABORT_S = 0.2
RESTARTS = 16
"""How many engines are started again at once."""
STOP_S = 10.0
"""Seconds that engines may take to close their streams and to stop, before their processes are ended."""
COMMAND_S = 600.0
"""Seconds that a command to all engines may take by default: pausing waits for running requests."""
REGISTER_S = 1.0
"""Seconds that the router has for each new engine, also when an update has used up all of its time."""
GO_ON_S = 0.3
"""Seconds to have engines go on when the deadline of an update has passed."""


class RolloutManager:
    """Starts the engines of a plan, and a hub with their router, buffer and lock.

    Every component with the role ``rollout`` gives a group of engines; those marked as placeholders
    only have their accelerators reserved.

    Args:
        cluster: The machines.
        plan: The plan of the job.
        engine: Makes an engine, in the process of each of its members: a class without arguments, or
            ``functools.partial(TorchEngine, …)``. A mapping gives each component its own.
        external: Addresses of engines that run elsewhere; a mapping gives the key that each of them asks for.
        capacity: How many groups of samples the buffer holds.
        router: Settings of the router, such as ``{"policy": "round_robin"}``; ``None``: no router.
        dp_size: Data-parallel ranks inside an engine: how many ports it needs.
        dp_attention: Whether those do data-parallel attention, which needs further ports.
        name: What the groups of workers are called after.
        start_timeout_s: How long engines may take to get healthy.
        sync_timeout_s: How long a weight update may wait for trainers, engines and the lock. With ``pause="wait"``
            it also waits for running calls of :meth:`generate` for as long as their own timeouts let them run.
        lock_ttl_s: How long the lock outlives a holder that died.
        silence_limit_s: How long an engine may leave its ``/health``, or the control lane of one of its processes,
            unanswered. One that hangs for longer is ended: its requests go to others, and :meth:`recover` starts it
            again.
        weights_folder: Where weights for external engines go; all of them must see it. Default: a private folder of
            this user on this machine, made when an engine needs it and removed by ``close()``, or by a later job.
        journal: Folder on node 0 for the buffer's journal, from which :meth:`recover` has the buffer back when the hub
            has died. Default: one in this user's private folder in the temporary directory. ``None``: no journal.
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        engine: Callable[[], Engine] | Mapping[str, Callable[[], Engine]],
        *,
        external: Sequence[str] | Mapping[str, str] = (),
        capacity: int = 1024,
        router: Mapping[str, Any] | None = {},
        dp_size: int = 1,
        dp_attention: bool = False,
        name: str = "rollout",
        start_timeout_s: float = 300.0,
        sync_timeout_s: float = 300.0,
        lock_ttl_s: float = 10.0,
        silence_limit_s: float = 60.0,
        weights_folder: str | None = None,
        journal: str | None = "",
    ) -> None:
        self.name = name
        self.version = 0
        self._cluster = cluster
        self._plan = plan
        self._starter = EngineStarter(cluster, plan, engine, dp_size, dp_attention, start_timeout_s)
        self._sync_timeout_s = sync_timeout_s
        self._silence_limit_s = silence_limit_s
        self._add_s = add_limit_s(router or {})
        self._engines: list[EngineHandle | ExternalEngine] = []
        self._groups: list[WorkerGroup] = []
        self._reservations: list[int] = []
        self._sync: WeightSync | None = None
        self._fleet: Fleet | None = None
        self._is_closed = False
        self._last_version = 0
        self._weights_folder = WeightsFolder(weights_folder)
        self._hub_starter = HubStarter(cluster, name, capacity, lock_ttl_s, router, journal)
        self._forget_closing = cluster.on_close(self.close)
        try:
            self._start(external)
        except BaseException:
            self.close()
            raise

    # Starting ------------------------------------------------------------------------------

    def _start(self, external: Sequence[str] | Mapping[str, str]) -> None:
        components = [component for component in self._plan.components if component.role == ROLE]
        if not components and not external:
            message = f"the plan has no component with the role {ROLE!r}, and no external engines were named"
            raise RolloutError([Finding("E201", message)])
        self._starter.check(components)
        with ThreadPoolExecutor(2 + len(components)) as pool:
            hub = pool.submit(self._hub_starter.start)
            started = [pool.submit(self._launch, c) for c in components if not c.placeholder]
            for component in components:
                if component.placeholder:
                    self._reservations.append(self._cluster.reserve(component.accelerators))
            errors = [error for error in (hub.exception(), *(one.exception() for one in started)) if error is not None]
            if errors:
                raise errors[0]
        link = self._hub_starter.link
        self.buffer, self.lock = BufferClient(link), LockClient(link)
        for future in started:
            self._engines += future.result()
        keys = external if isinstance(external, Mapping) else {}
        self._engines += [self._starter.find_external(address, keys.get(address, "")) for address in external]
        self._last_version = max(engine.version for engine in self._engines) if self._engines else 0
        self._fleet = Fleet(self.name, self._engines, link, self.url, self.key, self._silence_limit_s, self._add_s)
        self._fleet.register(self._engines)
        self._fleet.watch()
        self._generator = Generator(self.name, self._fleet, self.lock, self._cluster.check_open)

    def _launch(self, component: ComponentPlan) -> list[EngineHandle]:
        group = self._starter.launch(component)
        self._groups.append(group)
        return self._starter.start_all(component, group)

    # What there is -------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Address of the router; empty without one. It may be another one after :meth:`recover`."""
        return self._hub_starter.url

    @property
    def key(self) -> str:
        """What the router asks for: ``EngineClient(rollout.url, key=rollout.key)``; empty without one.

        A router that :meth:`recover` starts again has another one, unless ``router={"key": …}`` gives it.
        """
        return self._hub_starter.key

    @property
    def _hub(self) -> WorkerGroup:
        return self._hub_starter.group

    @property
    def engines(self) -> list[EngineHandle | ExternalEngine]:
        """All engines, dead ones too."""
        return list(self._engines)

    @property
    def _running(self) -> Fleet:
        if self._fleet is None:
            raise none_alive(self._cluster, self._engines)
        return self._fleet

    @property
    def alive_engines(self) -> list[EngineHandle | ExternalEngine]:
        """Those that run."""
        return self._running.alive

    def __repr__(self) -> str:
        return f"RolloutManager({self.name!r}, {counted(len(self._engines), 'engine')}, version {self.version})"

    # Work ----------------------------------------------------------------------------------

    def generate(
        self, groups: Sequence[SampleGroup], params: Mapping[str, Any], *, timeout_s: float = 600.0
    ) -> list[SampleGroup]:
        """Generates what is missing of groups of samples, and returns them in the same order.

        Each sample is a request of its own. Samples that an update cut off go on where they stopped.
        Requests of an engine that dies are sent to another; no sample comes twice. A weight update with
        ``pause="abort"`` returns groups that are not finished: put them into the buffer with ``put_partial``.

        Args:
            groups: What to generate. ``group.data["seed"]``, where it is there, keys the sampling: a whole number
                from 0 to 2**63 - 1. Samples of one group differ; the same groups give the same samples again.
            params: SGLang's sampling parameters.
            timeout_s: How long all of it may take.

        Raises:
            GenerationError: Requests failed or timed out (E108): which, at which engine, and why. The samples of
                the other requests are complete, and ``finished`` has the groups that are; the same call again
                generates only what is missing.
            RolloutError: No engine is alive (S204).
            ClusterError: The connection to Ray has ended (R115), or Ray's head is lost (R116).
        """
        if not self._running.serves:
            raise none_alive(self._cluster, self._engines)
        return self._generator.generate(groups, params, timeout_s)

    def pause(self, mode: str = "wait", *, timeout_s: float = COMMAND_S) -> None:
        """Hold generation on all engines. Raise ``CallTimeoutError`` if one does not answer in time, as all of these."""
        self._on_all("pause", mode, timeout_s=timeout_s)

    def resume(self, *, timeout_s: float = COMMAND_S) -> None:
        """Go on with generation."""
        self._on_all("resume", timeout_s=timeout_s)

    def offload(self, *, timeout_s: float = COMMAND_S) -> None:
        """Free the device memory of all engines; requests wait meanwhile."""
        self._on_all("offload", timeout_s=timeout_s)

    def onload(self, *, timeout_s: float = COMMAND_S) -> None:
        """Take that memory back."""
        self._on_all("onload", timeout_s=timeout_s)

    def _on_all(self, method: str, *args: Any, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        routes = {
            "resume": "continue_generation",
            "offload": "release_memory_occupation",
            "onload": "resume_memory_occupation",
        }
        results = []
        for engine in self.alive_engines:
            if isinstance(engine, ExternalEngine):
                if method == "pause":
                    engine.pause(args[0], deadline.left_s())
                else:
                    engine.post(routes[method], {}, deadline.left_s())
            else:
                results.append(engine.call_all(method, *args))
        for result in results:
            with contextlib.suppress(WorkerDiedError):  # nothing is left of it to do that
                result.wait(deadline.left_s())

    # Weights -------------------------------------------------------------------------------

    def update_weights(self, train: TrainGroup, pause: str = "wait") -> SyncReport:
        """Sends the weights of a trainer to all engines that are alive.

        They travel while engines go on serving what they have, and are put to use when all are there.

        Args:
            train: The trainer.
            pause: What happens to generation while engines change over. ``wait``: running requests are
                finished first. ``abort``: they return what there is of them. ``keep``: they go on with
                the new weights, and each token says which version made it; SGLang finishes them first.

        Raises:
            RolloutError: Where the weights do not fit, or were not sent. Engines keep what they have.
        """
        if pause not in PAUSES:
            message = f"pause is one of {', '.join(PAUSES)}, not {pause!r}"
            raise RolloutError([Finding("S201", message)])
        with self._running.changing:
            deadline = Deadline(self._sync_timeout_s)
            if self._sync is None or self._sync.train is not train:
                if self._sync is not None:
                    self._sync.close(deadline)
                self._sync = WeightSync(self._cluster, train, self._weights_folder, self._sync_timeout_s)
            version = self._last_version + 1
            report = self._send(self._sync, version, pause, deadline)
            self.version = self._last_version = version
            self._running.register(self.alive_engines, deadline.left_s(at_least_s=REGISTER_S))
            return report

    def _send(self, sync: WeightSync, version: int, pause: str, deadline: Deadline) -> SyncReport:
        """Sends a version; once more, where an engine died of it and others are left."""
        began_s = time.monotonic()
        while True:
            engines = self.alive_engines
            if not engines:
                raise none_alive(self._cluster, self._engines)
            try:
                drain_s = self._generator.left_s() if pause == "wait" else 0.0
                held_back = self._held_back(version, pause, deadline, drain_s)
                return sync.run(engines, version, pause, held_back, deadline, drain_s)
            except RoostError as error:
                self._last_version = max(self._last_version, sync.attempted_version)
                if not deadline.is_over:
                    self._running.find_dead(deadline.left_s())
                is_lost = not deadline.is_over and any(
                    not engine.is_alive for engine in engines
                )  # found now, or by the watching thread
                if is_lost and isinstance(error, WorkerError) and error.group != sync.train.workers.name:
                    continue
                if "S203" in error.codes and not deadline.is_over and self._running.find_dead_external():
                    continue
                if isinstance(error, WorkerError) or "W203" in error.codes:
                    what = f"version {version} was not sent, and engines keep version {self.version}"
                    if self._last_version == version:
                        what = f"version {version} is not on all engines; some may have version {self.version}"
                    message = f"{what}: {error.findings[0].message}"
                    context = error.findings[0].context
                    if isinstance(error, WorkerError):
                        context += tuple(error.remote_traceback.splitlines()[-20:])
                    context += self._running.troubles(began_s)
                    raise RolloutError([Finding("S205", message, context=context)]) from error
                raise

    @contextlib.contextmanager
    def _held_back(self, version: int, pause: str, deadline: Deadline, drain_s: float) -> Iterator[None]:
        """Keep generation off while engines change over; the wait for running requests, ``drain_s``, is extra."""
        if pause == "keep":
            yield
            return
        with contextlib.ExitStack() as undo:
            lock = self.lock.exclusive(f"{self.name}: weight update {version}", deadline.left_s(at_least_s=drain_s))
            if pause == "abort":
                undo.callback(self._resume_by, deadline)
                with self._aborting(deadline):
                    undo.enter_context(lock)
            else:
                asked_s = time.monotonic()
                undo.enter_context(lock)
                deadline.extend(min(drain_s, time.monotonic() - asked_s))
            if deadline.is_over:  # nothing was changed yet, and nothing shall be
                message = f"the time of {deadline.timeout_s:g} s was over before engines could change over"
                raise CallTimeoutError([Finding("W203", message)])
            yield

    @contextlib.contextmanager
    def _aborting(self, deadline: Deadline) -> Iterator[None]:
        """Has what runs return; again and again, for requests that were on their way."""
        has_lock = threading.Event()

        def abort() -> None:
            while not has_lock.is_set():
                with contextlib.suppress(RoostError):
                    self.pause("abort", timeout_s=deadline.left_s())
                has_lock.wait(ABORT_S)

        thread = threading.Thread(target=abort, name=f"{self.name}-abort", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_lock.set()
            thread.join()

    def _resume_by(self, deadline: Deadline) -> None:
        """Have engines go on; one that does not answer until then is found by the thread that looks after them."""
        with contextlib.suppress(CallTimeoutError):
            self.resume(timeout_s=deadline.left_s(at_least_s=GO_ON_S))

    def unmap_weights(self) -> None:
        """Has engines let go of the trainer's memory, so that it can be freed; the next update maps it again."""
        with self._running.changing:
            if self._sync is not None and self._sync.maps_memory:
                self._sync.close()

    # Those that die ------------------------------------------------------------------------

    def find_dead(self) -> list[EngineHandle]:
        """Looks which engines are gone; takes them out of the router, and returns the new ones."""
        return self._running.find_dead()

    def recover(self) -> list[EngineHandle | ExternalEngine]:
        """Starts what died again: the hub, the router, and engines, on the same accelerators; returns the engines.

        So are those elsewhere that answer again. All serve once the next weight update has reached them.

        A hub that died comes back on node 0 with the buffer as it was: groups that were taken are still taken, and
        what a call took whose answer was lost is given back. Repeat calls that raised an error. The lock is free once
        the leases of the old hub have run out (``lock_ttl_s``), and the router has all engines that got requests.

        Raises:
            ClusterError: The managers of the job have died (R150).
            RoostError: Some did not start, or the router did not take them; the others are back all the same. Call it
                again to try again.
        """
        with self._running.changing:
            is_new = self._hub_starter.recover()
            self.find_dead()
            if is_new and self.url:
                self._running.find_dead_external()  # the router would wait for them
                with contextlib.suppress(RoostError):  # what it did not take is tried again below
                    self._running.use_router(self.url, self.key)
            gone = self._running.gone()
            with ThreadPoolExecutor(RESTARTS) as pool:
                failures = [error for error in pool.map(self._bring_back, gone) if error is not None]
            back = [engine for engine in gone if engine.is_alive]
            self._last_version = max(self._last_version, *(engine.version for engine in back), 0)
            try:
                self._running.register([engine for engine in self.alive_engines if self._may_serve(engine, back)])
            except RoostError as error:
                failures.append(error)
            if failures:
                raise joined(failures)
            return back

    def _may_serve(self, engine: EngineHandle | ExternalEngine, back: Sequence[EngineHandle | ExternalEngine]) -> bool:
        """Whether an engine has the weights that requests are for: those that are just back wait for an update."""
        return self.version == 0 or (engine.version == self.version and engine not in back)

    def _bring_back(self, engine: EngineHandle | ExternalEngine) -> RoostError | None:
        """Starts an engine again, or sees whether one elsewhere answers; returns what went wrong."""
        try:
            if isinstance(engine, EngineHandle):
                check_nodes_of(self._cluster, engine)
                self._groups.append(self._starter.restart(engine))
            elif not engine.health():
                engine.version = engine.ask_version()
                engine.is_alive = True
        except RoostError as error:
            return error
        return None

    # Ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends engines, router and hub, and gives everything back."""
        if self._is_closed:
            return
        self._is_closed = True
        self._forget_closing()
        if self._fleet is not None:
            self._fleet.close()
            for engine in self._running.hung():
                engine.is_alive = False  # its processes are killed below, and nothing waits for it
        deadline = Deadline(STOP_S)
        if self._sync is not None:
            with contextlib.suppress(RoostError):
                self._sync.close(deadline)
        self._stop_engines(deadline)
        self._end_processes()
        for group in self._groups:
            with contextlib.suppress(RoostError):
                group.close()
        self._hub_starter.close()
        for token in self._reservations:
            self._cluster.release(token)
        self._weights_folder.close()

    def _end_processes(self) -> None:
        """End the processes of all groups at once: one that hangs is waited for, and it is waited for together."""
        if self._cluster.is_open:
            kill_workers_of({group: range(group.world_size) for group in self._groups if group.binding is not None})

    def _stop_engines(self, deadline: Deadline) -> None:
        """Lets engines end by themselves; those that do not in time end with their processes."""
        stopping = []
        for engine in self._engines:
            if isinstance(engine, EngineHandle) and engine.is_alive:
                with contextlib.suppress(ClusterError):  # Ray has ended them, with the connection to the cluster
                    stopping.append(engine.call_all("stop_engine"))
        for result in stopping:
            with contextlib.suppress(RoostError):
                result.wait(deadline.left_s())

    def __enter__(self) -> RolloutManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

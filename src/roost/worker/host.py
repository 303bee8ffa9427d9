"""The actor in which a worker lives.

It is generic: it takes an environment, and only then a pickled class. So nothing of the user's is
imported before its variables are set, and no second interpreter start is paid for (Ray's
``runtime_env`` costs one per worker). Beside the user's methods it has a control lane, which answers
while they run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle

from roost.cluster.guards import guard_actor
from roost.cluster.ports import PortLease, lease_ports
from roost.errors import ClusterError
from roost.hardware import AcceleratorType
from roost.worker.binding import Attestation
from roost.worker.calls import CONSTRUCTOR, CallRecord
from roost.worker.context import WorkerContext, install_context
from roost.worker.lane import LaneAddress, LaneServer
from roost.worker.processes import look_at
from roost.worker.strangers import find_strangers
from roost.worker.worker import Worker

__all__ = ["AsyncHost", "Host"]

NOTE_LENGTH = 200
IDLE_S = 0.2
"""After so long without a call, none is on its way."""
_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "MANPATH")


class _AnyHost:
    """What hosts of all workers have: the control lane, and the constructor."""

    def __init__(self, rank: int, environment: Mapping[str, str], accelerator_type: str, wants_port: bool) -> None:
        self._rank = rank
        self._type = AcceleratorType.get(accelerator_type)
        self._port: PortLease | None = lease_ports() if wants_port else None
        self._worker: Any = None
        self._record = CallRecord()
        self._began = time.monotonic()
        self._lane: LaneServer | None = None
        set_environment(environment)
        self._warden = guard_actor()

    # Control lane --------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def attest(
        self, asks_driver: bool = False, looks_for_strangers: bool = False, own: Sequence[int] = ()
    ) -> tuple[Attestation, int]:
        """What this process finds, and the port that rank 0 leased.

        Args:
            asks_driver: Whether to ask the driver library which accelerators this process sees.
            looks_for_strangers: Whether it sees who holds memory of this node's accelerators.
            own: Processes that are no strangers.
        """
        context, facts = ray.get_runtime_context(), look_at(os.getpid())
        variable = self._type.visible_devices_variable if self._type else ""
        ask = self._type.visible_uuids if self._type and asks_driver else None
        holders = self._type.holders if self._type and looks_for_strangers else None
        uuids, strangers, driver_error = None, [], ""
        try:
            uuids = ask() if ask is not None else None
            strangers = find_strangers(holders(), own) if holders is not None else []
        except ClusterError as error:
            driver_error = str(error.findings[0])
        attestation = Attestation(
            self._rank,
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            sys.executable,
            os.environ.get(variable) if variable else None,
            tuple(uuids) if uuids is not None else None,
            tuple(strangers),
            driver_error,
            facts.started if facts is not None else 0,
        )
        return attestation, self._port.port if self._port else 0

    @ray.method(concurrency_group="control", enable_task_events=False)
    def state(self, with_usage: bool = False) -> dict[str, Any]:
        """What this worker is doing; of several calls the one that runs longest.

        Args:
            with_usage: Also how much of this node's accelerators is used, where their vendor tells.
        """
        call, since_s, running = self._record.longest()
        is_starting = self._worker is None
        found: dict[str, Any] = {
            "rank": self._rank,
            "pid": os.getpid(),
            "state": "starting" if is_starting else "busy" if running else "ready",
            "call": "" if is_starting else call,
            "since_s": time.monotonic() - self._began if is_starting else since_s,
            "running": 0 if is_starting else running,
            "calls": self._record.started,
            "errors": self._record.failed,
            "last_error": self._record.last_error(),
            "note": _note_of(self._worker),
        }
        if with_usage:
            ask = self._type.usage if self._type else None
            found["usage"] = ask() if ask is not None else []
        return found

    @ray.method(concurrency_group="control")
    def timeline(self, last_s: float) -> dict[str, Any]:
        """The calls of the last seconds; see :meth:`CallRecord.timeline`."""
        return self._record.timeline(last_s)

    @ray.method(concurrency_group="control")
    def open_lane(self) -> LaneAddress:
        """A shorter way for calls."""
        if self._lane is None:
            self._lane = LaneServer(self, str(ray.util.get_node_ip_address()))
        return self._lane.address

    @ray.method(concurrency_group="control")
    def call_beside(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the worker at once, also while it is busy; only methods that do not wait."""
        return getattr(self._worker, method)(*args)

    @ray.method(concurrency_group="control")
    def clock(self) -> float:
        """What the clock of this node says."""
        return time.time()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """The stack of every thread of this worker."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            parts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
        return "\n".join(parts)

    # The user's lane -----------------------------------------------------------------------

    def construct(
        self, pickled: bytes, context: WorkerContext, environment: Mapping[str, str], paths: Sequence[str]
    ) -> None:
        """Sets what is known only now, then loads the user's class and makes the worker.

        What the driver can import, its workers can, where the files are on their node too.
        """
        self._warden.poll()  # it has made itself independent by now, and left a zombie
        set_environment(environment)
        install_context(context)
        sys.path.extend(path for path in paths if path not in sys.path and os.path.exists(path))
        number = self._record.begin(CONSTRUCTOR)
        try:
            cls, args, kwargs = cloudpickle.loads(pickled)
            with _errors_that_travel("the constructor"):
                self._worker = cls(*args, **kwargs)
        except BaseException as error:
            self._record.end(number, error)
            raise
        self._record.end(number)

    def _wait_for_turn(self, after: int) -> None:
        """Wait until so many calls were begun, and none runs; -1: not at all.

        Calls that never begin, because their arguments cannot be had, are not waited for.
        """
        idle_since = time.monotonic()
        while after >= 0 and (self._record.is_busy or self._record.started < after):
            if self._record.is_busy:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > IDLE_S:
                break
            time.sleep(5e-5)


class Host(_AnyHost):
    """Hosts one worker, whose calls run in threads: one at a time, unless ``max_concurrency`` allows more."""

    def __init__(self, rank: int, environment: Mapping[str, str], accelerator_type: str, wants_port: bool) -> None:
        super().__init__(rank, environment, accelerator_type, wants_port)
        self._looping = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
        """Calls a method of the worker; returns its value and how long it took."""
        number = self._record.begin(method)
        try:
            with _errors_that_travel(f"{method}()"):
                value = getattr(self._worker, method)(*args, **kwargs)
                if inspect.iscoroutine(value):
                    value = self._complete(value)
        except BaseException as error:
            self._record.end(number, error)
            raise
        return value, self._record.end(number)

    def call_value(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As :meth:`call`, without how long it took."""
        return self.call(method, args, kwargs)[0]

    def call_in_lane(self, method: str, args: tuple[Any, ...], after: int) -> Any:
        """As :meth:`call_value`, through the lane: once so many calls were begun, and none runs; -1: at once."""
        self._wait_for_turn(after)
        return self.call(method, args, {})[0]

    def _complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Waits for a coroutine. All of a worker share one loop, also those of calls that run at once."""
        with self._looping:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()

        async def outcome() -> tuple[Any, SystemExit | None]:
            try:
                return await coroutine, None
            except SystemExit as error:  # it would end the loop
                return None, error

        value, left = asyncio.run_coroutine_threadsafe(outcome(), self._loop).result()
        if left is not None:
            raise left
        return value


class AsyncHost(_AnyHost):
    """Hosts one worker whose calls interleave on one event loop: Ray makes this class an asyncio actor.

    A call lets others run where it awaits. Ordinary methods run on the loop too, so that they run one at a time.
    """

    def construct(
        self, pickled: bytes, context: WorkerContext, environment: Mapping[str, str], paths: Sequence[str]
    ) -> None:
        """As for other workers; Ray runs it on the loop, as all methods outside the control lane."""
        self._loop = asyncio.get_running_loop()
        super().construct(pickled, context, environment, paths)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
        """Calls a method of the worker; returns its value and how long it took."""
        number = self._record.begin(method)
        try:
            with _errors_that_travel(f"{method}()"):
                value = getattr(self._worker, method)(*args, **kwargs)
                if inspect.iscoroutine(value):
                    value = await value
        except BaseException as error:
            self._record.end(number, error)
            raise
        return value, self._record.end(number)

    async def call_value(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As :meth:`call`, without how long it took."""
        return (await self.call(method, args, kwargs))[0]

    def call_in_lane(self, method: str, args: tuple[Any, ...], after: int) -> Any:
        """As :meth:`call_value`, from a thread of the lane: once so many calls were begun, and none runs; -1: at once."""
        self._wait_for_turn(after)
        return asyncio.run_coroutine_threadsafe(self.call_value(method, args, {}), self._loop).result()


def _note_of(worker: Any) -> str:
    """What a worker says about itself, in one line; empty where it says nothing, or cannot."""
    try:
        return str(worker.status_note() if isinstance(worker, Worker) else "")[:NOTE_LENGTH]
    except Exception:  # code of the user's, which must not hide the state of the worker
        return ""


@contextlib.contextmanager
def _errors_that_travel(what: str) -> Iterator[None]:
    """Makes errors of the user's code such that the caller gets them: no exit, nothing that cannot be unpickled."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"{what} called sys.exit({error.code!r})") from None
    except Exception as error:
        try:
            pickle.loads(cloudpickle.dumps(error))  # noqa: S301
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


def set_environment(environment: Mapping[str, str]) -> None:
    """Sets variables; those that hold paths are put before what is there, and no path twice."""
    for name, value in environment.items():
        if name in _PATHS:
            first = [part for part in value.split(os.pathsep) if part]
            rest = [part for part in os.environ.get(name, "").split(os.pathsep) if part and part not in first]
            value = os.pathsep.join([*first, *rest])
        os.environ[name] = value

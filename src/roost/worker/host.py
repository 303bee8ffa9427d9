"""The Ray actor that hosts a worker.

The actor is generic: it sets environment variables first, and then loads the pickled class of the worker. So no module
of the user is imported before its variables are set, and no second start of the interpreter is needed (variables in
Ray's ``runtime_env`` cost one per worker). Methods of the concurrency group ``control`` answer while the user's methods
run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
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
from roost.cluster.ray_typed import node_address, pickled
from roost.errors import ClusterError
from roost.hardware import AcceleratorType
from roost.worker.binding import Attestation
from roost.worker.calls import CONSTRUCTOR, CallRecord
from roost.worker.context import WorkerContext, install_context
from roost.worker.foreign_processes import find_foreign_processes
from roost.worker.lane import LaneAddress, LaneServer
from roost.worker.processes import look_at
from roost.worker.worker import Worker

__all__ = ["AsyncHost", "Host"]

logger = logging.getLogger("roost")

NOTE_LENGTH = 200
IDLE_S = 0.2
"""A worker that has been idle for so many seconds has no call in flight."""
POLL_S = 5e-5
_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "MANPATH")


class _AnyHost:
    """What both kinds of hosts share: the control methods, and the construction of the worker."""

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

    # Control methods: they answer while the user's methods run ----------------------------

    @ray.method(concurrency_group="control")
    def attest(
        self, asks_driver: bool = False, finds_foreign: bool = False, own: Sequence[int] = ()
    ) -> tuple[Attestation, int]:
        """Return the attestation of this process, and the port that rank 0 leased (0 on other ranks).

        Args:
            asks_driver: Whether to ask the driver library for the UUIDs of the visible accelerators.
            finds_foreign: Whether to look for foreign processes on this node's accelerators.
            own: Pids of processes that are not foreign.
        """
        context, facts = ray.get_runtime_context(), look_at(os.getpid())
        variable = self._type.visible_devices_variable if self._type else ""
        ask = self._type.visible_uuids if self._type and asks_driver else None
        holders = self._type.holders if self._type and finds_foreign else None
        uuids, foreign, driver_error = None, [], ""
        try:
            uuids = ask() if ask is not None else None
            foreign = find_foreign_processes(holders(), own) if holders is not None else []
        except ClusterError as error:
            driver_error = str(error.findings[0])
        attestation = Attestation(
            self._rank,
            context.get_node_id(),
            node_address(),
            os.getpid(),
            sys.executable,
            os.environ.get(variable) if variable else None,
            tuple(uuids) if uuids is not None else None,
            tuple(foreign),
            driver_error,
            facts.started if facts is not None else 0.0,
        )
        return attestation, self._port.port if self._port else 0

    @ray.method(concurrency_group="control", enable_task_events=False)
    def state(self, with_usage: bool = False) -> dict[str, Any]:
        """Return the state of this worker; ``call`` is the call that has been running longest.

        Args:
            with_usage: Whether to add the usage of this node's accelerators, if their vendor reports it.
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
        """Return the calls of the last seconds; see :meth:`CallRecord.timeline`."""
        return self._record.timeline(last_s)

    @ray.method(concurrency_group="control")
    def duration_of(self, call_id: str) -> float | None:
        """Return the seconds that a finished call took; see :meth:`CallRecord.duration_of`."""
        return self._record.duration_of(call_id)

    @ray.method(concurrency_group="control")
    def open_lane(self) -> LaneAddress:
        """Start the lane of this worker unless it runs, and return its address."""
        if self._lane is None:
            self._lane = LaneServer(self, node_address())
        return self._lane.address

    @ray.method(concurrency_group="control")
    def call_beside(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the worker at once, also while it is busy; only methods that do not wait."""
        return getattr(self._worker, method)(*args)

    @ray.method(concurrency_group="control")
    def clock(self) -> float:
        """Return the time by this node's clock."""
        return time.time()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """Return the Python stack of every thread of this worker."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            parts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
        return "\n".join(parts)

    # The user's code -----------------------------------------------------------------------

    def construct(
        self, pickled_class: bytes, context: WorkerContext, environment: Mapping[str, str], paths: Sequence[str]
    ) -> None:
        """Set the environment and the context, then load the user's class and call its constructor.

        Args:
            pickled_class: The class, and the arguments of its constructor.
            context: The context of the worker.
            environment: Variables that are known only now, such as ``MASTER_PORT``.
            paths: Import paths of the driver; those that exist on this node are added to this process's.
        """
        self._warden.poll()  # the child that made the warden independent has ended, and is a zombie until polled
        set_environment(environment)
        install_context(context)
        sys.path.extend(path for path in paths if path not in sys.path and os.path.exists(path))
        number = self._record.begin(CONSTRUCTOR)
        try:
            cls, args, kwargs = cloudpickle.loads(pickled_class)
            with _portable_errors("the constructor"):
                self._worker = cls(*args, **kwargs)
        except BaseException as error:
            self._record.end(number, error)
            raise
        self._record.end(number)

    def _wait_for_turn(self, after: int) -> None:
        """Wait until so many calls have begun and none is running; -1: do not wait.

        A call that never begins, because Ray cannot fetch its arguments, is waited for only as long as :data:`IDLE_S`.
        """
        idle_since = time.monotonic()
        while after >= 0 and (self._record.is_busy or self._record.started < after):
            if self._record.is_busy:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > IDLE_S:
                break
            time.sleep(POLL_S)


class Host(_AnyHost):
    """Host of a worker whose calls run in threads: one at a time unless ``max_concurrency`` allows more."""

    def __init__(self, rank: int, environment: Mapping[str, str], accelerator_type: str, wants_port: bool) -> None:
        super().__init__(rank, environment, accelerator_type, wants_port)
        self._looping = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], call_id: str = "") -> Any:
        """Call a method of the worker and return its value; a coroutine is waited for.

        Args:
            method: Name of the method.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            call_id: Id by which :meth:`duration_of` finds the call.
        """
        number = self._record.begin(method, call_id)
        try:
            with _portable_errors(f"{method}()"):
                value = getattr(self._worker, method)(*args, **kwargs)
                if inspect.iscoroutine(value):
                    value = self._complete(value)
        except BaseException as error:
            self._record.end(number, error)
            raise
        self._record.end(number)
        return value

    def call_in_lane(self, method: str, args: tuple[Any, ...], after: int) -> Any:
        """Call a method of the worker, once ``after`` calls have begun and none is running; -1: at once."""
        self._wait_for_turn(after)
        return self.call(method, args, {})

    def _complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a coroutine and return its value. All coroutines of a worker share one event loop."""
        with self._looping:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()

        async def outcome() -> tuple[Any, SystemExit | None]:
            try:
                return await coroutine, None
            except SystemExit as error:  # as an exception it would end the event loop
                return None, error

        value, exit_error = asyncio.run_coroutine_threadsafe(outcome(), self._loop).result()
        if exit_error is not None:
            raise exit_error
        return value


class AsyncHost(_AnyHost):
    """Host of a worker whose calls interleave on one event loop: Ray makes this class an asyncio actor.

    Other calls run while one awaits. Ordinary methods run on the loop too, so only one of them runs at a time.
    """

    def construct(
        self, pickled_class: bytes, context: WorkerContext, environment: Mapping[str, str], paths: Sequence[str]
    ) -> None:
        """See :meth:`_AnyHost.construct`; Ray runs it on the event loop, like all methods that are not control methods."""
        self._loop = asyncio.get_running_loop()
        super().construct(pickled_class, context, environment, paths)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], call_id: str = "") -> Any:
        """Call a method of the worker and return its value; see :meth:`Host.call`."""
        number = self._record.begin(method, call_id)
        try:
            with _portable_errors(f"{method}()"):
                value = getattr(self._worker, method)(*args, **kwargs)
                if inspect.iscoroutine(value):
                    value = await value
        except BaseException as error:
            self._record.end(number, error)
            raise
        self._record.end(number)
        return value

    def call_in_lane(self, method: str, args: tuple[Any, ...], after: int) -> Any:
        """Call a method of the worker from a thread of the lane; see :meth:`Host.call_in_lane`."""
        self._wait_for_turn(after)
        return asyncio.run_coroutine_threadsafe(self.call(method, args, {}), self._loop).result()


def _note_of(worker: Any) -> str:
    """Return the worker's ``status_note``; empty if it has none or fails."""
    try:
        return str(worker.status_note() if isinstance(worker, Worker) else "")[:NOTE_LENGTH]
    except Exception:  # the user's code; the state of the worker is reported without it
        logger.debug("status_note() failed", exc_info=True)
        return ""


@contextlib.contextmanager
def _portable_errors(what: str) -> Iterator[None]:
    """Replace exceptions of the user's code that would not reach the caller: ``SystemExit``, and unpicklable ones."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"{what} called sys.exit({error.code!r})") from None
    except Exception as error:
        try:
            pickle.loads(pickled(error))  # noqa: S301
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


def set_environment(environment: Mapping[str, str]) -> None:
    """Set environment variables. Paths are put in front of those that a variable has, and no path is listed twice."""
    for name, value in environment.items():
        if name in _PATHS:
            first = [part for part in value.split(os.pathsep) if part]
            rest = [part for part in os.environ.get(name, "").split(os.pathsep) if part and part not in first]
            value = os.pathsep.join([*first, *rest])
        os.environ[name] = value

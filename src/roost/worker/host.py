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
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle

from roost.cluster.ports import PortLease, lease_ports
from roost.hardware import AcceleratorType
from roost.worker import warden
from roost.worker.binding import Attestation
from roost.worker.context import WorkerContext, install_context

__all__ = ["Host"]

_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "MANPATH")


class Host:
    """Hosts one worker: see the module."""

    def __init__(self, rank: int, environment: Mapping[str, str], accelerator_type: str, wants_port: bool) -> None:
        self._rank = rank
        self._type = AcceleratorType.get(accelerator_type)
        self._port: PortLease | None = lease_ports() if wants_port else None
        self._worker: Any = None
        self._running: dict[int, tuple[str, float]] = {}
        self._calls = 0
        self._errors = 0
        self._counting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        marker = uuid.uuid4().hex
        os.environ["ROOST_WORKER"] = marker
        set_environment(environment)
        self._warden = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", str(warden.__file__), str(os.getpid()), marker],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
        )

    # Control lane --------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def attest(self) -> tuple[Attestation, int]:
        """What this process finds, and the port that rank 0 leased."""
        context = ray.get_runtime_context()
        variable = self._type.visible_devices_variable if self._type else ""
        ask = self._type.visible_uuids if self._type else None
        uuids = ask() if ask is not None else None
        attestation = Attestation(
            self._rank,
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            sys.executable,
            os.environ.get(variable) if variable else None,
            tuple(uuids) if uuids is not None else None,
        )
        return attestation, self._port.port if self._port else 0

    @ray.method(concurrency_group="control")
    def state(self) -> dict[str, Any]:
        """What this worker is doing; of several calls the one that runs longest."""
        busy = next(iter(list(self._running.values())), None)
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "state": "starting" if self._worker is None else "busy" if busy else "ready",
            "call": busy[0] if busy else "",
            "since_s": time.monotonic() - busy[1] if busy else 0.0,
            "calls": self._calls,
            "errors": self._errors,
        }

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
        cls, args, kwargs = cloudpickle.loads(pickled)
        with _errors_that_travel("the constructor"):
            self._worker = cls(*args, **kwargs)

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
        """Calls a method of the worker; returns its value and how long it took."""
        with self._counting:
            self._calls += 1
            number, started = self._calls, time.monotonic()
            self._running[number] = (method, started)
        try:
            with _errors_that_travel(f"{method}()"):
                value = getattr(self._worker, method)(*args, **kwargs)
                if inspect.iscoroutine(value):
                    value = self._complete(value)
        except BaseException:
            self._errors += 1
            raise
        finally:
            del self._running[number]
        return value, time.monotonic() - started

    def call_value(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As :meth:`call`, without how long it took."""
        return self.call(method, args, kwargs)[0]

    def _complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Waits for a coroutine. All of a worker share one loop, also those of calls that run at once."""
        with self._counting:
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

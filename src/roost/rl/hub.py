"""The hub: one small process on node 0 that has a rollout's buffer, lock and router.

Calls reach it through a lane, where each has a thread of its own. Ray runs at most :data:`CONCURRENCY` calls of the
hub at once, so a call that waits there would keep out others: a full set of blocked ``take()`` calls would wait for
a ``put()`` that cannot begin.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from roost.errors import CallTimeoutError, RoostError, WorkerDiedError, WorkerError
from roost.rl.buffer import DataBuffer
from roost.rl.lock import HeldLock, Kind, LeaseLock
from roost.rl.router import Router
from roost.worker import GroupResult, Worker, WorkerGroup
from roost.worker.results import LaneResult

__all__ = ["CONCURRENCY", "BufferClient", "Hub", "HubLink", "LockClient"]

CONCURRENCY = 64
"""How many calls Ray runs in the hub at once."""
ANSWER_S = 30.0
"""Seconds to wait for the reply to a call beyond the time that the call itself may wait in the hub."""
TURN_S = 1.0
"""Seconds that a call may wait inside the hub where it had to come through Ray; then it is sent again."""
_WAITING = {
    "put": inspect.signature(DataBuffer.put),
    "put_partial": inspect.signature(DataBuffer.put_partial),
    "take": inspect.signature(DataBuffer.take),
    "acquire": inspect.signature(LeaseLock.acquire),
}
"""Calls that may wait in the hub, all of them with a ``timeout_s``."""
_LATE = {"B102", "B103", "L101"}
"""What they raise when that time is over."""


class Hub(Worker):
    """Holds what engines and trainers share; its children end with it."""

    def __init__(self, capacity: int, lock_ttl_s: float, router: Mapping[str, Any] | None, key: str = "") -> None:
        self._buffer = DataBuffer(capacity)
        self._lock = LeaseLock(lock_ttl_s)
        self._router: Router | None = None
        if router is not None:
            self._router = Router(host=str(ray.util.get_node_ip_address()), **{"key": key, **router})
            self._router.start()

    def status_note(self) -> str:
        """Where the router serves."""
        return f"router {self.url()}" if self._router is not None else ""

    def url(self) -> str:
        """Where the router serves; empty where there is none."""
        return self._router.url if self._router is not None else ""

    def buffer(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}) -> Any:
        """Calls the buffer."""
        return getattr(self._buffer, method)(*args, **kwargs)

    def lock(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}) -> Any:
        """Calls the lock."""
        return getattr(self._lock, method)(*args, **kwargs)

    def router(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}) -> Any:
        """Calls the router."""
        return getattr(self._router, method)(*args, **kwargs) if self._router is not None else None


class HubLink:
    """Calls the parts of a hub, from any process of the job and from many threads at once."""

    def __init__(self, hub: WorkerGroup) -> None:
        hub.open_lanes([0], in_order=False)
        self.group = hub

    def call(self, part: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the hub's ``buffer``, ``lock`` or ``router``, and return its value.

        Errors of Roost that the method raises arrive as they are.
        """
        try:
            result = self.group.begin_in_lane(0, part, method, args, kwargs)
            if result is not None:
                return _value_of(result, _patience_s(part, method, args, kwargs))
        except WorkerDiedError:
            pass  # perhaps only the connection has ended, which Ray knows
        return self._call_through_ray(part, method, args, kwargs)

    def _call_through_ray(self, part: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call without the lane, which a firewall may forbid; a call that waits leaves the hub after each turn."""
        send = getattr(self.group, part)
        if method not in _WAITING:
            return _value_of(send(method, args, kwargs), _patience_s(part, method, args, kwargs))
        given = _WAITING[method].bind(None, *args, **kwargs).arguments
        del given["self"]
        limit_s = given.get("timeout_s")
        deadline = float("inf") if limit_s is None else time.monotonic() + limit_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                return _value_of(send(method, (), {**given, "timeout_s": min(TURN_S, left_s)}))
            except CallTimeoutError as error:
                if left_s <= TURN_S or not _LATE & set(error.codes):
                    raise


def _patience_s(part: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """Seconds to wait for the reply to a call; ``None``: as long as the hub is alive."""
    if method not in _WAITING:
        return ANSWER_S if part == "lock" else None
    limit_s: float | None = _WAITING[method].bind(None, *args, **kwargs).arguments.get("timeout_s")
    return None if limit_s is None else limit_s + ANSWER_S


def _value_of(result: GroupResult | LaneResult, timeout_s: float | None = None) -> Any:
    try:
        return result.wait(timeout_s)[0]
    except WorkerError as error:
        if isinstance(error.__cause__, RoostError):
            raise error.__cause__ from None
        raise


class BufferClient:
    """The buffer of a rollout, from any process of the job; its methods are those of :class:`DataBuffer`."""

    def __init__(self, link: HubLink) -> None:
        self._link = link

    @staticmethod
    def attach(name: str = "rollout-hub") -> BufferClient:
        """The buffer of a rollout that another process of this job manages."""
        return BufferClient(HubLink(WorkerGroup.attach(name)))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        found = getattr(DataBuffer, method, None)
        if method.startswith("_") or not callable(found):
            raise AttributeError(f"a buffer has no {method!r}")
        call = partial(self._link.call, "buffer", method)
        if "who" in inspect.signature(found).parameters:  # else it would be the name of a thread of the hub
            return partial(call, who=f"{threading.current_thread().name} of process {os.getpid()}")
        return call


class LockClient:
    """The lock of a rollout, from any process of the job."""

    def __init__(self, link: HubLink) -> None:
        self._link = link
        self._ttl_s: float = self.state()["ttl_s"]

    @staticmethod
    def attach(name: str = "rollout-hub") -> LockClient:
        """The lock of a rollout that another process of this job manages."""
        return LockClient(HubLink(WorkerGroup.attach(name)))

    def shared(self, holder: str, timeout_s: float) -> HeldLock:
        """What generation holds: many may, as long as nobody updates weights."""
        return self._hold("shared", holder, timeout_s)

    def exclusive(self, holder: str, timeout_s: float) -> HeldLock:
        """What a weight update holds: nobody else does meanwhile."""
        return self._hold("exclusive", holder, timeout_s)

    def state(self) -> Any:
        """Who holds it, and who waits."""
        return self._link.call("lock", "state")

    def _hold(self, kind: Kind, holder: str, timeout_s: float) -> HeldLock:
        call = partial(self._link.call, "lock")
        return HeldLock(
            partial(call, "acquire"),
            partial(call, "renew"),
            partial(call, "release"),
            kind,
            holder,
            timeout_s=timeout_s,
            ttl_s=self._ttl_s,
        )

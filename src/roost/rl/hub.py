"""The hub: one small process on node 0 that has a rollout's buffer, lock and router."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray

from roost.errors import RoostError, WorkerDiedError, WorkerError
from roost.rl.buffer import DataBuffer
from roost.rl.lock import HeldLock, Kind, LeaseLock
from roost.rl.router import Router
from roost.worker import GroupResult, Worker, WorkerGroup
from roost.worker.results import LaneResult

__all__ = ["CONCURRENCY", "BufferClient", "Hub", "LockClient", "call_hub"]

CONCURRENCY = 64
"""How many callers may wait in the hub at once."""
ANSWER_S = 30.0
"""How much longer than the call itself the lock's answer may take."""


class Hub(Worker):
    """Holds what engines and trainers share; its children end with it."""

    def __init__(self, capacity: int, lock_ttl_s: float, router: Mapping[str, Any] | None) -> None:
        self._buffer = DataBuffer(capacity)
        self._lock = LeaseLock(lock_ttl_s)
        self._router: Router | None = None
        if router is not None:
            self._router = Router(host=str(ray.util.get_node_ip_address()), **router)
            self._router.start()

    def status_note(self) -> str:
        """Where the router serves."""
        return f"router {self.url()}" if self._router is not None else ""

    def url(self) -> str:
        """Where the router serves; empty where there is none."""
        return self._router.url if self._router is not None else ""

    def buffer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the buffer."""
        return getattr(self._buffer, method)(*args, **kwargs)

    def lock(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the lock."""
        return getattr(self._lock, method)(*args, **kwargs)

    def router(self, method: str, *args: Any) -> Any:
        """Calls the router."""
        return getattr(self._router, method)(*args) if self._router is not None else None


def call_hub(hub: WorkerGroup, part: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a part of the hub; its errors arrive as they are."""
    return _value_of(getattr(hub, part)(method, *args, **kwargs))


def _value_of(result: GroupResult | LaneResult, timeout_s: float | None = None) -> Any:
    try:
        return result.wait(timeout_s)[0]
    except WorkerError as error:
        if isinstance(error.__cause__, RoostError):
            raise error.__cause__ from None
        raise


class BufferClient:
    """The buffer of a rollout, from any process of the job; its methods are those of :class:`DataBuffer`."""

    def __init__(self, hub: WorkerGroup) -> None:
        self._hub = hub

    @staticmethod
    def attach(name: str = "rollout-hub") -> BufferClient:
        """The buffer of a rollout that another process of this job manages."""
        return BufferClient(WorkerGroup.attach(name))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_") or not callable(getattr(DataBuffer, method, None)):
            raise AttributeError(f"a buffer has no {method!r}")
        return partial(call_hub, self._hub, "buffer", method)


class LockClient:
    """The lock of a rollout, from any process of the job."""

    def __init__(self, hub: WorkerGroup) -> None:
        self._hub = hub
        hub.open_lanes([0], in_order=False)  # every generation takes the lock, and those who wait must not fill the hub
        self._ttl_s: float = self.state()["ttl_s"]

    @staticmethod
    def attach(name: str = "rollout-hub") -> LockClient:
        """The lock of a rollout that another process of this job manages."""
        return LockClient(WorkerGroup.attach(name))

    def shared(self, holder: str, timeout_s: float) -> HeldLock:
        """What generation holds: many may, as long as nobody updates weights."""
        return self._hold("shared", holder, timeout_s)

    def exclusive(self, holder: str, timeout_s: float) -> HeldLock:
        """What a weight update holds: nobody else does meanwhile."""
        return self._hold("exclusive", holder, timeout_s)

    def state(self) -> Any:
        """Who holds it, and who waits."""
        return self._call("state")

    def _call(self, method: str, *args: Any, timeout_s: float = 0.0) -> Any:
        try:
            return _value_of(self._hub.begin(0, "lock", method, *args), timeout_s + ANSWER_S)
        except WorkerDiedError:  # or only the connection ended
            return _value_of(self._hub.lock(method, *args), timeout_s + ANSWER_S)

    def _hold(self, kind: Kind, holder: str, timeout_s: float) -> HeldLock:
        return HeldLock(
            partial(self._call, "acquire", timeout_s=timeout_s),
            partial(self._call, "renew"),
            partial(self._call, "release"),
            kind,
            holder,
            timeout_s=timeout_s,
            ttl_s=self._ttl_s,
        )

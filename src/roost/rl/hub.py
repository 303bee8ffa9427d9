"""The hub: one small process on node 0 that has a rollout's buffer, lock and router.

It can die, and a new one takes its place under the same name (:mod:`roost.rl.hub_starting`): the buffer comes back
from its journal, and locks are free once the leases of the old hub have run out. A :class:`HubLink` finds the new hub
by itself, and gives back what calls took whose answers were lost with the old one.

Calls reach it through a lane, where each has a thread of its own. Ray runs at most :data:`CONCURRENCY` calls of the
hub at once, so a call that waits there would keep out others: a full set of blocked ``take()`` calls would wait for
a ``put()`` that cannot begin.
"""

from __future__ import annotations

import inspect
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from roost.cluster.log_files import plain_name, remove_old, session_folder
from roost.cluster.ray_typed import node_address
from roost.cluster.runtime_folder import temporary_folder
from roost.data.buffer import DataBuffer
from roost.data.journaled_buffer import JournaledBuffer
from roost.data.lock import HeldLock, LeaseLock, LockMode
from roost.engines.router import Router
from roost.errors import (
    CallTimeoutError,
    ClusterError,
    Finding,
    Fix,
    RolloutError,
    RoostError,
    WorkerDiedError,
    WorkerError,
)
from roost.worker import GroupResult, Worker, WorkerGroup
from roost.worker.results import LaneResult

__all__ = ["CONCURRENCY", "BufferClient", "Hub", "HubLink", "LockClient"]

CONCURRENCY = 64
"""How many calls Ray runs in the hub at once."""
TOKENS = 1 << 32
"""Tokens of leases that one hub may give before they could be taken for those of its successor."""
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
_ROUTER_WAITS = {"add": inspect.signature(Router.add), "remove": inspect.signature(Router.remove)}
"""Calls of the router that wait for an engine, with a ``timeout_s``, too."""
_LATE = {"B102", "B103", "L101"}
"""What they raise when that time is over."""


class Hub(Worker):
    """Holds what engines and trainers share; its children end with it."""

    def __init__(
        self,
        capacity: int,
        lock_ttl_s: float,
        router: Mapping[str, Any] | None,
        journal: str | None = None,
        incarnation: int = 1,
    ) -> None:
        self._buffer = self._make_buffer(capacity, journal, incarnation > 1)
        self._lock = LeaseLock(lock_ttl_s, after_token=(incarnation - 1) * TOKENS)
        self._router: Router | None = None
        if router is not None:
            self._router = Router(host=node_address(), **router)
            self._router.start()

    def _make_buffer(self, capacity: int, folder: str | None, continues: bool) -> DataBuffer:
        if folder is None:
            return DataBuffer(capacity)
        namespace = os.environ.get("ROOST_NAMESPACE") or "roost"
        name = plain_name(f"roost-{namespace}-{self.group_name}")
        if not folder:
            # Not in the folder of the Ray session: Ray lets every user rename what is in there. The name has the
            # session, because another Ray of this user may have a job of the same namespace.
            folder = os.path.join(temporary_folder(), "journals")
            name += f"-{os.path.basename(session_folder())}"
            if not continues:
                remove_old(folder)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return JournaledBuffer(capacity, os.path.join(folder, f"{name}.journal"), continues=continues)

    def notes(self) -> list[str]:
        """What the user should know of the buffer that this hub began with."""
        if isinstance(self._buffer, JournaledBuffer):
            return self._buffer.notes
        return ["the buffer had no journal: it is empty"]

    def remove_journal(self) -> None:
        """Remove the journal: the job is over."""
        if isinstance(self._buffer, JournaledBuffer):
            self._buffer.remove_journal()

    def start_router(self) -> tuple[str, str]:
        """Start the router again, at its old address where that is still free; return its URL and its new key."""
        if self._router is not None:
            try:
                self._router.start()
            except RolloutError:  # it gave its ports back
                self._router.start()
        return self.router_access()

    def status_note(self) -> str:
        """Where the router serves."""
        return f"router {self.url()}" if self._router is not None else ""

    def url(self) -> str:
        """Where the router serves; empty where there is none."""
        return self.router_access()[0]

    def router_access(self) -> tuple[str, str]:
        """Return the URL and the key of the router; both are empty where there is none."""
        return (self._router.url, self._router.key) if self._router is not None else ("", "")

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
    """Calls the parts of a hub, from any process of the job and from many threads at once.

    Attributes:
        group: The hub.
    """

    def __init__(self, hub: WorkerGroup) -> None:
        hub.open_lanes([0], in_order=False)
        self.group = hub
        self._unanswered: list[str] = []  # tickets of calls whose answers were lost
        self._changing = threading.Lock()

    def call(self, part: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the hub's ``buffer``, ``lock`` or ``router``, and return its value.

        Errors of Roost that the method raises arrive as they are. Where the hub has died and another has taken its
        place, the call is sent to that one: every call can be repeated.

        Raises:
            RolloutError: The hub has died (S210).
        """
        while True:
            group = self.group
            try:
                self._undo_unanswered(group)
                return self._call(group, part, method, args, kwargs)
            except WorkerDiedError as error:
                with self._changing:
                    self._unanswered += [kwargs["ticket"]] if kwargs.get("ticket") else []
                if not self._find_successor(group):
                    raise _hub_died(group, error) from error

    def connect(self, hub: WorkerGroup) -> None:
        """Call another hub from now on, which has taken the place of one that died."""
        hub.open_lanes([0], in_order=False)
        self.group = hub

    def _undo_unanswered(self, group: WorkerGroup) -> None:
        """Give back what calls took whose answers were lost; a hub that died may have noted them as answered."""
        with self._changing:
            tickets, self._unanswered = self._unanswered, []
        try:
            if tickets:
                self._call(group, "buffer", "undo_takes", (tickets,), {})
        except BaseException:
            with self._changing:
                self._unanswered += tickets
            raise

    def _find_successor(self, dead: WorkerGroup) -> bool:
        """Connect to the hub that has the name now; return whether it is another one."""
        if self.group is dead:
            try:
                found = WorkerGroup.attach(dead.name, dead.cluster)
                if found.actor_id(0) == dead.actor_id(0):
                    return False
                self.connect(found)
            except (ClusterError, WorkerError):
                return False
        return True

    def _call(self, group: WorkerGroup, part: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            result = group.begin_in_lane(0, part, method, args, kwargs)
            if result is not None:
                return _value_of(result, _patience_s(part, method, args, kwargs))
        except WorkerDiedError:  # perhaps only the connection has ended, which Ray knows
            if kwargs.get("ticket"):
                _value_of(group.buffer("undo_takes", ([kwargs["ticket"]],)), ANSWER_S)
        return self._call_through_ray(group, part, method, args, kwargs)

    def _call_through_ray(
        self, group: WorkerGroup, part: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call without the lane, which a firewall may forbid; a call that waits leaves the hub after each turn."""
        send = getattr(group, part)
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


def _hub_died(hub: WorkerGroup, error: WorkerDiedError) -> RolloutError:
    node_rank = hub.node_rank_of(0)
    where = f"node {node_rank} ({hub.cluster.get_node_ip(node_rank)})"
    message = f"the hub {hub.name!r}, which has the buffer, the lock and the router, has died on {where}"
    fixes = (
        Fix("start it again, with what was in the buffer", "rollout.recover()  in the process of the RolloutManager"),
        *error.findings[0].fixes,
    )
    return RolloutError([Finding("S210", message, context=(error.findings[0].message,), fixes=fixes)])


def _patience_s(part: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """Seconds to wait for the reply to a call; ``None``: as long as the hub is alive."""
    if part == "router":
        if method not in _ROUTER_WAITS:
            return ANSWER_S
        given = _ROUTER_WAITS[method].bind(None, *args, **kwargs)
        given.apply_defaults()
        return ANSWER_S + (given.arguments["timeout_s"] or 0.0)
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
        parameters = inspect.signature(found).parameters
        if "caller" in parameters:  # else it would be the name of a thread of the hub
            call = partial(call, caller=f"{threading.current_thread().name} of process {os.getpid()}")
        if "ticket" in parameters:
            return lambda *args, **kwargs: call(*args, **{"ticket": secrets.token_hex(8), **kwargs})
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

    def _hold(self, mode: LockMode, holder: str, timeout_s: float) -> HeldLock:
        call = partial(self._link.call, "lock")
        return HeldLock(
            partial(call, "acquire"),
            partial(call, "renew"),
            partial(call, "release"),
            mode,
            holder,
            timeout_s=timeout_s,
            ttl_s=self._ttl_s,
        )

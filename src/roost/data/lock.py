"""The lock around weights: many may generate, or one may update. Leases end by themselves when a holder dies.

``LeaseLock`` is the lock: a plain class for many threads of one process. ``HeldLock`` is how a holder uses it,
from the same process or through an actor: it renews the lease while a block runs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from roost.data.wait_queue import some
from roost.errors import CallTimeoutError, Finding, RolloutError, RoostError, shown

__all__ = ["HeldLock", "LeaseLock"]

Kind = Literal["shared", "exclusive"]

REMEMBERED = 1_000
"""Of so many leases that ended, the lock can say how."""


@dataclass(slots=True)
class _Lease:
    token: int
    kind: str
    holder: str
    since_s: float
    until_s: float


@dataclass(slots=True)
class _Waiter:
    kind: str
    holder: str
    since_s: float
    deadline_s: float
    lease: _Lease | None = None
    woken: threading.Event = field(default_factory=threading.Event)


class LeaseLock:
    """Shared or exclusive leases, in the order in which they were asked for.

    Nobody overtakes: shared leases that are asked for after an exclusive one wait behind it, so neither side
    starves. Do not ask for a second lease while you hold one: you may wait for yourself.

    Args:
        ttl_s: A lease that was not renewed for so long ends, and the next one gets the lock.
        clock: Tells the time; for tests.
        after_token: The lock replaces one that was lost, whose tokens were at most this. Its leases have ended, but
            their holders may count on them for another ``ttl_s``: nobody else gets a lease before.
    """

    def __init__(
        self, ttl_s: float = 10.0, clock: Callable[[], float] = time.monotonic, *, after_token: int = 0
    ) -> None:
        if not ttl_s > 0:
            raise RolloutError([Finding("L105", f"ttl_s is a number above 0, not {shown(ttl_s)}")])
        self.ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last_token = after_token
        self._leases: dict[int, _Lease] = {}
        if after_token:
            now_s = clock()
            holder = "holders under the lock before this one"
            self._leases[after_token] = _Lease(after_token, "exclusive", holder, now_s, now_s + ttl_s)
        self._waiters: list[_Waiter] = []
        self._ended: OrderedDict[int, tuple[_Lease, str, float]] = OrderedDict()

    def acquire(self, kind: Kind, holder: str, timeout_s: float) -> int:
        """Waits for a lease.

        Args:
            kind: ``shared`` (generation: many at once) or ``exclusive`` (a weight update: alone).
            holder: A name for messages.
            timeout_s: How long to wait.

        Returns:
            Its token. Tokens only grow: who is asked to do something under a lease can refuse a token that is
            smaller than one that it has seen.

        Raises:
            CallTimeoutError: Not in time (L101): who holds it, since when, and who waits.
        """
        if kind not in ("shared", "exclusive"):
            raise RolloutError([Finding("L105", f"a lease is 'shared' or 'exclusive', not {shown(kind)}")])
        with self._lock:
            now_s = self._clock()
            waiter = _Waiter(kind, holder, now_s, now_s + timeout_s)
            self._waiters.append(waiter)
        try:
            while True:
                with self._lock:
                    now_s = self._settle()
                    if waiter.lease is not None:
                        return waiter.lease.token
                    if now_s >= waiter.deadline_s:
                        raise self._late(waiter, now_s)
                    waiter.woken.clear()
                    wake_s = min([waiter.deadline_s, *(lease.until_s for lease in self._leases.values())])
                waiter.woken.wait(max(0.0, wake_s - now_s))
        except BaseException:
            with self._lock:
                self._withdraw(waiter)
            raise

    def renew(self, token: int) -> float:
        """Extends a lease by ``ttl_s`` from now.

        Returns:
            ``ttl_s``: how long it holds without another renewal.

        Raises:
            RolloutError: It ended before (L102), or is none that was given (L103).
        """
        with self._lock:
            now_s = self._settle()
            self._held(token, now_s).until_s = now_s + self.ttl_s
            return self.ttl_s

    def release(self, token: int) -> None:
        """Ends a lease.

        Raises:
            RolloutError: It ended before (L102), or is none that was given (L103).
        """
        with self._lock:
            now_s = self._settle()
            self._end(self._held(token, now_s), "released", now_s)
            self._settle(now_s)

    def state(self) -> dict[str, Any]:
        """Who holds it since when, and who waits, as plain values."""
        with self._lock:
            now_s = self._settle()
            holders = [
                {
                    "token": one.token, "kind": one.kind, "holder": one.holder,
                    "held_s": now_s - one.since_s, "ends_in_s": one.until_s - now_s,
                }
                for one in self._leases.values()
            ]  # fmt: skip
            waiters = [{"kind": w.kind, "holder": w.holder, "waited_s": now_s - w.since_s} for w in self._waiters]
            return {"ttl_s": self.ttl_s, "last_token": self._last_token, "holders": holders, "waiters": waiters}

    # With the lock held --------------------------------------------------------------------

    def _settle(self, now_s: float | None = None) -> float:
        """Ends leases that ran out, and gives leases to those in front of the line."""
        now_s = self._clock() if now_s is None else now_s
        for lease in [lease for lease in self._leases.values() if lease.until_s <= now_s]:
            self._end(lease, f"was not renewed for {self.ttl_s:g} s", lease.until_s)
        while self._waiters and self._is_free_for(self._waiters[0].kind):
            waiter = self._waiters.pop(0)
            self._last_token += 1
            waiter.lease = _Lease(self._last_token, waiter.kind, waiter.holder, now_s, now_s + self.ttl_s)
            self._leases[self._last_token] = waiter.lease
            waiter.woken.set()
        for waiter in self._waiters:
            if waiter.deadline_s <= now_s:
                waiter.woken.set()
        return now_s

    def _is_free_for(self, kind: str) -> bool:
        if kind == "exclusive":
            return not self._leases
        return all(lease.kind == "shared" for lease in self._leases.values())

    def _end(self, lease: _Lease, how: str, when_s: float) -> None:
        del self._leases[lease.token]
        self._ended[lease.token] = (lease, how, when_s)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _withdraw(self, waiter: _Waiter) -> None:
        """Somebody waits no longer; a lease that came at the same moment goes back."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif waiter.lease is not None and waiter.lease.token in self._leases:
            self._end(waiter.lease, "released", self._clock())
        self._settle()

    def _held(self, token: int, now_s: float) -> _Lease:
        lease = self._leases.get(token)
        if lease is not None:
            return lease
        if token not in self._ended:
            is_old = isinstance(token, int) and 0 < token <= self._last_token
            message = f"lease {shown(token)} " + ("ended long ago" if is_old else "was never given")
            raise RolloutError([Finding("L102" if is_old else "L103", message, context=self._described(now_s))])
        lease, how, when_s = self._ended[token]
        what = how if how != "released" else "it was released before"
        message = f"the {lease.kind} lease {token} of {lease.holder} ended {now_s - when_s:.1f} s ago: {what}"
        raise RolloutError([Finding("L102", message, context=self._described(now_s))])

    def _described(self, now_s: float) -> tuple[str, ...]:
        held = [f"{one.holder} ({one.kind}, {now_s - one.since_s:.1f} s)" for one in self._leases.values()]
        waits = [f"{one.holder} ({one.kind}, {now_s - one.since_s:.1f} s)" for one in self._waiters]
        return (f"held by {some(held) or 'nobody'}", f"in line: {some(waits) or 'nobody'}")

    def _late(self, waiter: _Waiter, now_s: float) -> CallTimeoutError:
        message = f"{waiter.holder} waited {now_s - waiter.since_s:.1f} s for the {waiter.kind} lock"
        rule = f"a holder that does not renew loses it after {self.ttl_s:g} s"
        return CallTimeoutError([Finding("L101", message, context=self._described(now_s), rule=rule)])


class HeldLock:
    """Holds a lease while a block runs, and renews it from a thread::

        with HeldLock(lock.acquire, lock.renew, lock.release, "exclusive", "trainer", timeout_s=60) as held:
            send_weights(fence=held.token)

    Leaving the block raises when the lease was lost meanwhile: somebody else may have had the lock. An exception
    of the block itself goes first; :attr:`lost` tells then.

    Args:
        acquire: Called with kind, holder and timeout; gives the token.
        renew: Called with the token, from a thread, three times per ``ttl_s``.
        release: Called with the token.
        kind: ``shared`` or ``exclusive``.
        holder: A name for messages.
        timeout_s: How long to wait for it.
        ttl_s: That of the lock.
        clock: Tells the time; for tests.
    """

    def __init__(
        self,
        acquire: Callable[[Kind, str, float], int],
        renew: Callable[[int], object],
        release: Callable[[int], object],
        kind: Kind,
        holder: str,
        *,
        timeout_s: float,
        ttl_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._acquire, self._renew, self._release = acquire, renew, release
        self.kind: Kind = kind
        self.holder = holder
        self.timeout_s = timeout_s
        self.ttl_s = ttl_s
        self.lost: RolloutError | None = None
        self._clock = clock
        self._token = 0
        self._renewed_s = 0.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def token(self) -> int:
        """The token of the lease; 0 before there is one."""
        return self._token

    @property
    def is_held(self) -> bool:
        """Whether the lease holds for certain: it was renewed less than ``ttl_s`` ago."""
        if self._thread is None or self._stopped.is_set() or self.lost is not None:
            return False
        return self._clock() - self._renewed_s < self.ttl_s

    def __enter__(self) -> HeldLock:
        if self._thread is not None:
            raise RolloutError([Finding("L105", "a HeldLock is for one block; make another one")])
        asked_s = self._clock()
        self._token = self._acquire(self.kind, self.holder, self.timeout_s)
        if self._clock() - asked_s > self.ttl_s / 3:  # given at some time since: only a renewal tells until when
            asked_s = self._clock()
            self._renew(self._token)
        self._renewed_s = asked_s
        self._thread = threading.Thread(target=self._keep, name=f"lease-{self._token}", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_certain = self.is_held
        self._stopped.set()
        if self._thread is not None and not is_certain:
            self._thread.join(self.ttl_s)  # until it is known whether the lease was lost
        if self.lost is None:
            try:
                self._release(self._token)
            except Exception as problem:
                self._lose(problem)
            else:
                return  # it was held until now; a renewal that comes too late says nothing
        else:  # it may still hold: who lost it need not be who was asked
            with contextlib.suppress(Exception):
                self._release(self._token)
        if self.lost is not None and error is None:
            raise self.lost

    def _keep(self) -> None:
        """Renews until the block ends. What fails on the way is tried again as long as the lease may hold."""
        while not self._stopped.wait(self.ttl_s / 3):
            asked_s = self._clock()
            try:
                self._renew(self._token)
                self._renewed_s = asked_s
            except Exception as problem:
                if not _is_over(problem) and self._clock() - self._renewed_s < self.ttl_s:
                    continue
                self._lose(problem)
                return

    def _lose(self, problem: Exception) -> None:
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        message = f"{self.holder} lost the {self.kind} lease {self._token} while it was in use"
        rule = "what was done since may have met others: do it again under a new lease"
        self.lost = RolloutError([Finding("L104", message, context=(first,), rule=rule)])
        self.lost.__cause__ = problem


def _is_over(problem: BaseException | None) -> bool:
    """Whether the lock itself said that a lease ended; through an actor it is the cause of another error."""
    while problem is not None:
        if isinstance(problem, RoostError) and {"L102", "L103"} & set(problem.codes):
            return True
        problem = problem.__cause__
    return False

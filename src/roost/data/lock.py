"""The lock around weights: a shared lease for each generation, an exclusive one for a weight update.

Leases expire, so the death of a holder frees the lock. ``LeaseLock`` is the lock: a thread-safe class of one process.
``HeldLock`` is the client, in the same process or through an actor: it renews a lease while a block runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from roost.data.wait_queue import abbreviated
from roost.errors import CallTimeoutError, Finding, RolloutError, RoostError, shown

__all__ = ["HeldLock", "LeaseLock", "LockMode"]

logger = logging.getLogger("roost")

LockMode = Literal["shared", "exclusive"]

REMEMBERED = 1_000
"""Number of ended leases for which the lock remembers how they ended."""


@dataclass(slots=True)
class _Lease:
    token: int
    mode: LockMode
    holder: str
    since_s: float
    until_s: float


@dataclass(slots=True)
class _Waiter:
    mode: LockMode
    holder: str
    since_s: float
    deadline_s: float
    lease: _Lease | None = None
    woken: threading.Event = field(default_factory=threading.Event)


class LeaseLock:
    """A lock with shared and exclusive leases, granted first come, first served.

    A shared lease that is requested after an exclusive one waits behind it, so neither mode starves the other. A holder
    must not request a second lease: it could wait for itself.

    Args:
        ttl_s: Seconds after which a lease that is not renewed expires.
        clock: Returns the time in seconds; tests replace it.
        after_token: Largest possible token of a lost lock that this one replaces. Holders of leases of the lost lock
            may rely on them for up to ``ttl_s``, so the first lease is granted after that time.
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
            holder = "holders of the lock before this one"
            self._leases[after_token] = _Lease(after_token, "exclusive", holder, now_s, now_s + ttl_s)
        self._waiters: list[_Waiter] = []
        self._ended: OrderedDict[int, tuple[_Lease, str, float]] = OrderedDict()

    def acquire(self, mode: LockMode, holder: str, timeout_s: float) -> int:
        """Block until a lease is granted.

        Args:
            mode: ``shared`` (generation: many holders at once) or ``exclusive`` (a weight update: one holder).
            holder: Name of the holder, for messages.
            timeout_s: Seconds to wait.

        Returns:
            The token of the lease. Each lease has a larger token than the one before it, so that a callee can use the
            token for fencing: it refuses a token smaller than one that it has seen.

        Raises:
            CallTimeoutError: The lease was not granted in time (L101). The error names holders and waiters.
        """
        if mode not in ("shared", "exclusive"):
            raise RolloutError([Finding("L105", f"a lease is 'shared' or 'exclusive', not {shown(mode)}")])
        with self._lock:
            now_s = self._clock()
            waiter = _Waiter(mode, holder, now_s, now_s + timeout_s)
            self._waiters.append(waiter)
        try:
            while True:
                with self._lock:
                    now_s = self._settle()
                    if waiter.lease is not None:
                        return waiter.lease.token
                    if now_s >= waiter.deadline_s:
                        raise self._timed_out(waiter, now_s)
                    waiter.woken.clear()
                    wake_s = min([waiter.deadline_s, *(lease.until_s for lease in self._leases.values())])
                waiter.woken.wait(max(0.0, wake_s - now_s))
        except BaseException:
            with self._lock:
                self._withdraw(waiter)
            raise

    def renew(self, token: int) -> float:
        """Extend a lease by ``ttl_s`` from now.

        Returns:
            Seconds until the lease expires: ``ttl_s``.

        Raises:
            RolloutError: The lease has ended (L102), or no lease has this token (L103).
        """
        with self._lock:
            now_s = self._settle()
            self._held(token, now_s).until_s = now_s + self.ttl_s
            return self.ttl_s

    def release(self, token: int) -> None:
        """End a lease.

        Raises:
            RolloutError: The lease has ended before (L102), or no lease has this token (L103).
        """
        with self._lock:
            now_s = self._settle()
            self._end(self._held(token, now_s), "released", now_s)
            self._settle(now_s)

    def state(self) -> dict[str, Any]:
        """Return holders and waiters with their times in seconds, as JSON values."""
        with self._lock:
            now_s = self._settle()
            holders = [
                {
                    "token": one.token, "mode": one.mode, "holder": one.holder,
                    "held_s": now_s - one.since_s, "ends_in_s": one.until_s - now_s,
                }
                for one in self._leases.values()
            ]  # fmt: skip
            waiters = [{"mode": w.mode, "holder": w.holder, "waited_s": now_s - w.since_s} for w in self._waiters]
            return {"ttl_s": self.ttl_s, "last_token": self._last_token, "holders": holders, "waiters": waiters}

    # Called with self._lock held -------------------------------------------------------------

    def _settle(self, now_s: float | None = None) -> float:
        """End expired leases, grant leases to the first waiters, and return the time."""
        now_s = self._clock() if now_s is None else now_s
        for lease in [lease for lease in self._leases.values() if lease.until_s <= now_s]:
            self._end(lease, f"was not renewed for {self.ttl_s:g} s", lease.until_s)
        while self._waiters and self._is_free_for(self._waiters[0].mode):
            waiter = self._waiters.pop(0)
            self._last_token += 1
            waiter.lease = _Lease(self._last_token, waiter.mode, waiter.holder, now_s, now_s + self.ttl_s)
            self._leases[self._last_token] = waiter.lease
            waiter.woken.set()
        for waiter in self._waiters:
            if waiter.deadline_s <= now_s:
                waiter.woken.set()
        return now_s

    def _is_free_for(self, mode: LockMode) -> bool:
        if mode == "exclusive":
            return not self._leases
        return all(lease.mode == "shared" for lease in self._leases.values())

    def _end(self, lease: _Lease, how: str, when_s: float) -> None:
        del self._leases[lease.token]
        self._ended[lease.token] = (lease, how, when_s)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _withdraw(self, waiter: _Waiter) -> None:
        """Remove a waiter; a lease that was granted to it in the meantime is released."""
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
            message = f"lease {shown(token)} " + ("ended long ago" if is_old else "was never granted")
            raise RolloutError([Finding("L102" if is_old else "L103", message, context=self._described(now_s))])
        lease, how, when_s = self._ended[token]
        reason = how if how != "released" else "it was released before"
        message = f"the {lease.mode} lease {token} of {lease.holder} ended {now_s - when_s:.1f} s ago: {reason}"
        raise RolloutError([Finding("L102", message, context=self._described(now_s))])

    def _described(self, now_s: float) -> tuple[str, ...]:
        held = [f"{one.holder} ({one.mode}, {now_s - one.since_s:.1f} s)" for one in self._leases.values()]
        waits = [f"{one.holder} ({one.mode}, {now_s - one.since_s:.1f} s)" for one in self._waiters]
        return (f"held by {abbreviated(held) or 'nobody'}", f"waiting: {abbreviated(waits) or 'nobody'}")

    def _timed_out(self, waiter: _Waiter, now_s: float) -> CallTimeoutError:
        message = f"{waiter.holder} waited {now_s - waiter.since_s:.1f} s for the {waiter.mode} lock"
        rule = f"a lease that is not renewed expires after {self.ttl_s:g} s"
        return CallTimeoutError([Finding("L101", message, context=self._described(now_s), rule=rule)])


class HeldLock:
    """A context manager that holds a lease and renews it from a thread::

        with HeldLock(lock.acquire, lock.renew, lock.release, "exclusive", "trainer", timeout_s=60) as held:
            send_weights(fence=held.token)

    Leaving the block raises L104 if the lease was lost, because another holder may have had the lock. If the block
    itself raises, its exception propagates and only :attr:`lost` has the loss. One object serves one block.

    Args:
        acquire: :meth:`LeaseLock.acquire` of the lock: called with mode, holder and timeout, returns the token.
        renew: :meth:`LeaseLock.renew` of the lock: called with the token, from a thread, three times per ``ttl_s``.
        release: :meth:`LeaseLock.release` of the lock: called with the token.
        mode: ``shared`` or ``exclusive``.
        holder: Name of the holder, for messages.
        timeout_s: Seconds to wait for the lease.
        ttl_s: ``ttl_s`` of the lock.
        clock: Returns the time in seconds; tests replace it.

    Attributes:
        lost: The error if the lease was lost, else ``None``.
    """

    def __init__(
        self,
        acquire: Callable[[LockMode, str, float], int],
        renew: Callable[[int], object],
        release: Callable[[int], object],
        mode: LockMode,
        holder: str,
        *,
        timeout_s: float,
        ttl_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._acquire, self._renew, self._release = acquire, renew, release
        self.mode: LockMode = mode
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
        """Token of the lease; 0 before the block is entered."""
        return self._token

    @property
    def is_held(self) -> bool:
        """Whether the lease is certainly held: it was renewed less than ``ttl_s`` ago."""
        if self._thread is None or self._stopped.is_set() or self.lost is not None:
            return False
        return self._clock() - self._renewed_s < self.ttl_s

    def __enter__(self) -> HeldLock:
        if self._thread is not None:
            raise RolloutError([Finding("L105", "a HeldLock serves one block; create another one")])
        requested_s = self._clock()
        self._token = self._acquire(self.mode, self.holder, self.timeout_s)
        if self._clock() - requested_s > self.ttl_s / 3:
            # The lease was granted after the request was sent, so its expiry is unknown until the first renewal.
            requested_s = self._clock()
            self._renew(self._token)
        self._renewed_s = requested_s
        self._thread = threading.Thread(target=self._renew_until_stopped, name=f"lease-{self._token}", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_certain = self.is_held
        self._stopped.set()
        if self._thread is not None and not is_certain:
            self._thread.join(self.ttl_s)  # the renewal in flight shows whether the lease was lost
        if self.lost is None:
            try:
                self._release(self._token)
            except Exception as problem:
                self._lose(problem)
            else:
                return  # the lease was held until now, whatever a late renewal reports
        else:  # the renewals failed, but the lock may still count the lease as held
            try:
                self._release(self._token)
            except Exception as problem:
                logger.debug("lease %s of %s, which was lost, was not released: %s", self._token, self.holder, problem)
        if self.lost is not None and error is None:
            raise self.lost

    def _renew_until_stopped(self) -> None:
        """Renew the lease until the block ends. A renewal that fails is retried for as long as the lease may be held."""
        while not self._stopped.wait(self.ttl_s / 3):
            requested_s = self._clock()
            try:
                self._renew(self._token)
                self._renewed_s = requested_s
            except Exception as problem:
                if not _has_ended(problem) and self._clock() - self._renewed_s < self.ttl_s:
                    logger.debug("a renewal of lease %s of %s failed: %s", self._token, self.holder, problem)
                    continue
                self._lose(problem)
                return

    def _lose(self, problem: Exception) -> None:
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        message = f"{self.holder} lost the {self.mode} lease {self._token} while it was in use"
        rule = "another holder may have had the lock since: repeat the work under a new lease"
        self.lost = RolloutError([Finding("L104", message, context=(first,), rule=rule)])
        self.lost.__cause__ = problem


def _has_ended(problem: BaseException | None) -> bool:
    """Return whether the lock reported that a lease ended. Through an actor, its error is the cause of another one."""
    while problem is not None:
        if isinstance(problem, RoostError) and {"L102", "L103"} & set(problem.codes):
            return True
        problem = problem.__cause__
    return False

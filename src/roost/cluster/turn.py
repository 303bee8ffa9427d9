"""The reservation turn: one Roost job at a time reserves accelerators on a Ray cluster.

The turn is a lease in Ray's internal key-value store. The store can create a key atomically, but it can neither
compare-and-set a value nor delete a key on a condition. Turns are therefore numbered, with a key for each: the
process that creates the key of number ``n + 1`` has the turn; it may try as soon as turn ``n`` is over or has expired. The newest
key is never deleted, so two processes that see the same turn expire cannot both succeed it.

Clocks of different machines are never compared. A holder renews its turn by counting up; a waiting process measures on
its own monotonic clock how long the count has stood still.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from roost.errors import Finding, ReservationError

__all__ = ["ReservationTurn", "reservation_turn"]

LEASE_S = 15.0
"""Seconds without a renewal after which a turn has expired."""

RENEW_S = 3.0
"""Seconds between two renewals of a turn."""
REPLY_S = 5.0
"""Seconds to wait for Ray's GCS to answer one request."""

logger = logging.getLogger("roost")

_NAMESPACE = b"roost"
_PREFIX = b"reservation-turn:"


@dataclass(frozen=True)
class _Record:
    """The value of a turn's key."""

    owner: str
    renewals: int = 0
    is_over: bool = False

    def encode(self) -> bytes:
        return json.dumps(vars(self)).encode()


class ReservationTurn:
    """A turn of this process; made by :func:`reservation_turn`."""

    def __init__(self, number: int, record: _Record, renew_s: float) -> None:
        self._number = number
        self._record = record
        self._renew_s = renew_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="reservation-turn", daemon=True)
        self._thread.start()

    def is_mine(self) -> bool:
        """Return whether this process still has the turn; once the turn has expired, another process may take the next."""
        return max(_numbers(), default=0) == self._number

    def _renew(self) -> None:
        while not self._is_over.wait(self._renew_s):
            self._record = replace(self._record, renewals=self._record.renewals + 1)
            try:
                _put(self._number, self._record)
            except RayError as error:  # the next renewal may succeed; is_mine() notices a lost turn
                logger.debug("the turn to reserve was not renewed: %s", error)

    def _end(self) -> None:
        self._is_over.set()
        self._thread.join()  # each request has a limit of REPLY_S
        try:
            _put(self._number, replace(self._record, is_over=True))
        except RayError as error:
            logger.warning("the turn to reserve was not ended, and expires after %g s: %s", LEASE_S, error)


@contextlib.contextmanager
def reservation_turn(
    deadline: float, *, lease_s: float = LEASE_S, renew_s: float = RENEW_S
) -> Iterator[ReservationTurn]:
    """Wait for the turn to reserve, and hold it for the body of the ``with`` statement.

    A background thread renews the turn. If its holder dies, it expires after ``lease_s``.

    Args:
        deadline: When to give up, on the clock of ``time.monotonic``.
        lease_s: Seconds without a renewal after which the turn of another process counts as expired.
        renew_s: Seconds between renewals.

    Raises:
        ReservationError: Another job had the turn until the deadline (R204); the message names that job.
        RayError: Ray's GCS does not answer.
    """
    started = time.monotonic()
    context = ray.get_runtime_context()
    mine = _Record(f"{context.get_job_id()}:{os.getpid()}:{random.getrandbits(64):x}")
    patience = _Patience(lease_s)
    while True:
        number, record = _newest()
        if record is None or record.is_over or patience.is_exhausted(number, record):
            if _take(number + 1, mine):
                break
        elif time.monotonic() > deadline:
            job, pid, _ = record.owner.split(":")
            waited = time.monotonic() - started
            message = (
                f"waited {waited:.1f} s for the turn to reserve, which another Roost job has (job {job}, process {pid})"
            )
            rule = "jobs on one Ray cluster reserve accelerators one after another"
            raise ReservationError([Finding("R204", message, rule=rule)])
        time.sleep(0.02 + random.random() * 0.05)  # noqa: S311
    turn = ReservationTurn(number + 1, mine, renew_s)
    try:
        yield turn
    finally:
        turn._end()


class _Patience:
    """Measures how long the turn of another process has not been renewed."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._seen: tuple[int, _Record] | None = None
        self._since = 0.0

    def is_exhausted(self, number: int, record: _Record) -> bool:
        """Return whether this turn was seen unchanged for longer than the lease."""
        now = self._clock()
        if self._seen != (number, record):
            self._seen, self._since = (number, record), now
        return now - self._since > self._lease_s


def _take(number: int, mine: _Record) -> bool:
    """Create the key of a turn; return whether this process has the turn now."""
    client = _store()
    client.internal_kv_put(_key(number), mine.encode(), False, _NAMESPACE, timeout=REPLY_S)
    # Ray may repeat the request, and then report that the key existed: the value shows which process created it.
    if client.internal_kv_get(_key(number), _NAMESPACE, timeout=REPLY_S) != mine.encode():
        return False
    numbers = _numbers()
    has_turn = max(numbers, default=0) == number  # else other processes have taken and ended turns in the meantime
    for unused in [other for other in numbers if other < number] if has_turn else [number]:
        client.internal_kv_del(_key(unused), False, _NAMESPACE, timeout=REPLY_S)
    return has_turn


def _newest() -> tuple[int, _Record | None]:
    """Return the number and the record of the newest turn; 0 and ``None`` if there was none."""
    while True:
        number = max(_numbers(), default=0)
        if not number:
            return 0, None
        found = _store().internal_kv_get(_key(number), _NAMESPACE, timeout=REPLY_S)
        if found is not None:  # else a newer turn began, and its holder deleted this one
            return number, _Record(**json.loads(found))


def _store() -> Any:
    """Return the client of Ray's key-value store."""
    return internal_kv.internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]


def _numbers() -> list[int]:
    keys = _store().internal_kv_keys(_PREFIX, _NAMESPACE, timeout=REPLY_S)
    return [int(key[len(_PREFIX) :]) for key in keys]


def _put(number: int, record: _Record) -> None:
    _store().internal_kv_put(_key(number), record.encode(), True, _NAMESPACE, timeout=REPLY_S)


def _key(number: int) -> bytes:
    return _PREFIX + str(number).encode()

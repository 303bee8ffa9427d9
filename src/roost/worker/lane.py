"""A lane: a socket beside Ray's calls, for the few that are made so often, or so fast, that a call is too slow.

A call through Ray takes one or two milliseconds; through a lane it is a tenth of that. Those who wait in
a lane are not among the calls that a worker can take at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from ray import cloudpickle

__all__ = ["LaneAddress", "LaneCall", "LaneClient", "LaneError", "LaneServer"]

CONNECT_S = 2.0
SPARE_S = 10.0
"""How long the other end may take to say what it owes."""
KEEPING = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""After so many seconds an idle connection is tried, and how often until it counts as ended."""
RETRY_S = 0.1
"""After so long a server that could not take a client tries again."""


@dataclass(frozen=True)
class LaneAddress:
    """Where a lane is, and what its clients must know.

    Attributes:
        host: Its host.
        port: Its port.
        key: Shared by both ends.
    """

    host: str
    port: int
    key: bytes = field(repr=False)


class LaneError(Exception):
    """A call that failed at the other end.

    Attributes:
        cause: What it raised.
        trace: Its traceback, as text.
    """

    def __init__(self, cause: BaseException, trace: str) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.trace = trace


class LaneServer:
    """Answers calls of methods of one object, each connection in a thread of its own.

    Args:
        target: The object.
        host: The address to listen on.
    """

    def __init__(self, target: object, host: str) -> None:
        self._target = target
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=256)
        self.address = LaneAddress(host, self._socket.getsockname()[1], secrets.token_bytes(32))
        threading.Thread(target=self._accept, name="lane", daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                taken, _ = self._socket.accept()
            except OSError:  # closed, or one client that cannot be taken now
                time.sleep(RETRY_S)
            else:
                threading.Thread(target=self._serve, args=(taken,), name="lane", daemon=True).start()

    def _serve(self, taken: socket.socket) -> None:
        with contextlib.suppress(Exception), taken, _connection(taken) as connection:  # a client that goes, goes
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            _limit(taken, 0)
            taken.close()  # the connection has its own
            while True:
                method, args = connection.recv()
                answer: tuple[Any, str]
                try:
                    answer = (getattr(self._target, method)(*args), "")
                except Exception as error:
                    answer = (error, traceback.format_exc())
                connection.send_bytes(_packed(answer))

    def close(self) -> None:
        """Takes no more clients."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread that accepts
        self._socket.close()


def _connection(made: socket.socket) -> Connection:
    """A connection that sends at once, is known to firewalls while it is idle, and ends soon after the other machine.

    Until :func:`_limit` says otherwise, nothing is waited for longer than the first words may take.
    """
    made.settimeout(None)
    _limit(made, SPARE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPING.items():
        if hasattr(socket, name):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(os.dup(made.fileno()))


def _limit(made: socket.socket, seconds: float) -> None:
    """How long a connection is waited for to say something; 0: as long as it takes."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


def _packed(answer: tuple[Any, str]) -> bytes:
    """An answer as bytes, by value where its class is the driver's own; as text where that cannot be."""
    try:
        return bytes(cloudpickle.dumps(answer))
    except Exception as error:
        value, trace = answer
        told = RuntimeError(f"{type(value).__name__}: {value}")
        return bytes(cloudpickle.dumps((told, trace or f"it cannot be sent: {error!r}")))


class LaneClient:
    """Calls through a lane, from any thread.

    Args:
        address: Where it is.
    """

    def __init__(self, address: LaneAddress) -> None:
        self._address = address
        self._free: list[_Link] = []

    def begin(self, method: str, *args: Any) -> LaneCall:
        """Sends a call; its answer is waited for later.

        Raises:
            ConnectionError: Where the lane cannot be reached.
        """
        while True:
            try:
                link, is_new = self._free.pop(), False
            except IndexError:  # also where another thread was faster
                link, is_new = _Link(self._connect()), True
            try:
                while link.owed:  # answers that nobody waited for
                    if not link.connection.poll(SPARE_S):
                        raise TimeoutError("the answer to an earlier call does not come")
                    link.connection.recv_bytes()
                    link.owed -= 1
                link.connection.send_bytes(cloudpickle.dumps((method, args)))  # by value, as calls through Ray do
            except (OSError, EOFError) as error:
                link.connection.close()
                if is_new:
                    raise ConnectionError(str(error)) from error
            else:
                return LaneCall(link, self._free)

    def _connect(self) -> Connection:
        with socket.create_connection((self._address.host, self._address.port), CONNECT_S) as made:
            connection = _connection(made)
            try:
                answer_challenge(connection, self._address.key)
                deliver_challenge(connection, self._address.key)
                _limit(made, 0)
            except Exception as error:
                connection.close()
                raise ConnectionError(str(error)) from error
            return connection


@dataclass
class _Link:
    """A connection, and how many answers nobody has read yet."""

    connection: Connection
    owed: int = 0


class LaneCall:
    """A call that is under way."""

    def __init__(self, link: _Link, free: list[_Link]) -> None:
        self._link: _Link | None = link
        self._free = free
        self._answer: tuple[Any, str] = (None, "")
        self._end: OSError | EOFError | None = None

    def done(self) -> bool:
        """Whether its answer, or the end of the connection, is there."""
        return self._link is None or self._link.connection.poll(0)

    def result(self, timeout_s: float | None = None) -> Any:
        """What came back.

        Raises:
            LaneError: Where the method raised something.
            EOFError: Where the other end is gone; also ``OSError``.
            TimeoutError: Where nothing came in time.
        """
        if self._link is not None:
            if not self._link.connection.poll(timeout_s):
                raise TimeoutError
            link, self._link = self._link, None
            try:
                self._answer = link.connection.recv()
            except (OSError, EOFError) as error:
                self._end = error
                link.connection.close()
            except Exception as error:
                message = f"it raised an exception, or returned a value, that cannot be loaded here: {error}"
                self._answer = (RuntimeError(message), traceback.format_exc())
            if self._end is None:
                self._free.append(link)
        if self._end is not None:  # also when it is asked again
            raise self._end
        value, trace = self._answer
        if trace:
            raise LaneError(value, trace)
        return value

    def forget(self) -> None:
        """Nobody wants the answer."""
        if self._link is not None:
            self._link.owed += 1
            self._free.append(self._link)
            self._link = None

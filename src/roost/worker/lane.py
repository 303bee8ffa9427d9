"""Lanes: calls of one object through a socket, for calls that are too frequent for Ray.

A call through Ray takes one or two milliseconds, a call through a lane about a tenth of that. A call that blocks in a
lane does not count towards the calls that a worker runs at once (``max_concurrency``).

Both ends authenticate each other with a shared key. Requests and replies are pickles.
"""

from __future__ import annotations

import contextlib
import logging
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

from roost.cluster.ray_typed import pickled

__all__ = ["LaneAddress", "LaneCall", "LaneClient", "LaneError", "LaneServer"]

logger = logging.getLogger("roost")

CONNECT_S = 2.0
"""Seconds to wait for a connection."""
REPLY_S = 10.0
"""Seconds to wait for the reply to an earlier call, or for a step of the handshake, before the connection is given up."""
KEEPING = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""TCP keep-alive: seconds until an idle connection is probed, seconds between probes, failed probes until it has ended."""
RETRY_S = 0.1
"""Seconds until a server that could not accept a client tries again."""


@dataclass(frozen=True)
class LaneAddress:
    """What a client must know of a lane.

    Attributes:
        host: Address on which the server listens.
        port: Port on which the server listens.
        key: Secret that both ends share.
    """

    host: str
    port: int
    key: bytes = field(repr=False)


class LaneError(Exception):
    """A call that raised an exception in the server.

    Attributes:
        cause: The exception.
        trace: Its traceback, as text.
    """

    def __init__(self, cause: BaseException, trace: str) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.trace = trace


class LaneServer:
    """Server of a lane: calls methods of one object for its clients, each connection in a thread of its own.

    Args:
        target: The object.
        host: The address to listen on; the kernel chooses the port.
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
                accepted, _ = self._socket.accept()
            except OSError:  # the server was closed, or has no file descriptor left for this client
                time.sleep(RETRY_S)
            else:
                threading.Thread(target=self._serve, args=(accepted,), name="lane", daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        try:
            with accepted, _connection(accepted) as connection:
                deliver_challenge(connection, self.address.key)
                answer_challenge(connection, self.address.key)
                _set_receive_timeout(accepted, 0)
                accepted.close()  # the connection has a descriptor of its own
                while True:
                    method, args = connection.recv()
                    reply: tuple[Any, str]
                    try:
                        reply = (getattr(self._target, method)(*args), "")
                    except Exception as error:
                        reply = (error, traceback.format_exc())
                    connection.send_bytes(_packed(reply))
        except (OSError, EOFError):
            pass  # a client that disconnects needs no cleanup
        except Exception as error:  # no key, or a request that cannot be unpickled here
            logger.debug("a connection to a lane was closed: %r", error)

    def close(self) -> None:
        """Stop accepting clients; existing connections stay."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread that accepts
        self._socket.close()


def _connection(made: socket.socket) -> Connection:
    """Return a connection over a duplicate of a socket: no delay of small messages, TCP keep-alive.

    Keep-alive shows firewalls that an idle connection is in use, and ends it soon after the other node is lost. The
    receive timeout is :data:`REPLY_S`, for the handshake.
    """
    made.settimeout(None)
    _set_receive_timeout(made, REPLY_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPING.items():
        if hasattr(socket, name):  # some systems lack them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(os.dup(made.fileno()))


def _set_receive_timeout(made: socket.socket, timeout_s: float) -> None:
    """Set the timeout of receiving, on the socket and all its duplicates; 0: none."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(timeout_s), 0))


def _packed(reply: tuple[Any, str]) -> bytes:
    """Return a reply as bytes; one that cannot be pickled becomes a ``RuntimeError`` with its text."""
    try:
        return pickled(reply)
    except Exception as error:
        value, trace = reply
        substitute = RuntimeError(f"{type(value).__name__}: {value}")
        return pickled((substitute, trace or f"it cannot be sent: {error!r}"))


class LaneClient:
    """Client of a lane. Thread-safe: each call in flight has a connection of its own, and connections are reused.

    Args:
        address: Address of the lane.
    """

    def __init__(self, address: LaneAddress) -> None:
        self._address = address
        self._idle: list[_Client] = []

    def begin(self, method: str, *args: Any) -> LaneCall:
        """Send a call, and return without waiting for its reply.

        A connection that has ended is replaced by a new one.

        Raises:
            ConnectionError: The server cannot be reached.
        """
        while True:
            try:
                client, is_new = self._idle.pop(), False
            except IndexError:  # none, or another thread took the last one
                client, is_new = _Client(self._connect()), True
            try:
                client.discard_replies()
                client.connection.send_bytes(pickled((method, args)))
            except (OSError, EOFError) as error:
                client.connection.close()
                if is_new:
                    raise ConnectionError(str(error)) from error
            else:
                return LaneCall(client, self._idle)

    def _connect(self) -> Connection:
        with socket.create_connection((self._address.host, self._address.port), CONNECT_S) as made:
            connection = _connection(made)
            try:
                answer_challenge(connection, self._address.key)
                deliver_challenge(connection, self._address.key)
                _set_receive_timeout(made, 0)
            except Exception as error:
                connection.close()
                raise ConnectionError(str(error)) from error
            return connection


@dataclass
class _Client:
    """A connection, and the number of replies on it that will be discarded."""

    connection: Connection
    unwanted: int = 0

    def discard_replies(self) -> None:
        """Receive the unwanted replies; raise ``TimeoutError`` if one takes longer than :data:`REPLY_S`."""
        while self.unwanted:
            if not self.connection.poll(REPLY_S):
                raise TimeoutError("the reply to an earlier call does not arrive")
            self.connection.recv_bytes()
            self.unwanted -= 1


class LaneCall:
    """A call in flight, made by :meth:`LaneClient.begin`."""

    def __init__(self, client: _Client, idle: list[_Client]) -> None:
        self._client: _Client | None = client  # until the reply is here, or unwanted
        self._idle = idle
        self._reply: tuple[Any, str] = (None, "")
        self._broken: OSError | EOFError | None = None

    def done(self) -> bool:
        """Return at once whether the reply has arrived, or the connection has ended."""
        return self._client is None or self._client.connection.poll(0)

    def result(self, timeout_s: float | None = None) -> Any:
        """Return the value of the call. Blocks at most ``timeout_s``; default: until the connection ends.

        Raises:
            LaneError: The method raised an exception.
            EOFError: The connection has ended; also ``OSError``.
            TimeoutError: The reply did not arrive in time; it has no ``errno``.
        """
        if self._client is not None:
            if not self._client.connection.poll(timeout_s):
                raise TimeoutError
            client, self._client = self._client, None
            try:
                self._reply = client.connection.recv()
            except (OSError, EOFError) as error:
                self._broken = error
                client.connection.close()
            except Exception as error:
                message = f"it raised an exception, or returned a value, that cannot be loaded here: {error}"
                self._reply = (RuntimeError(message), traceback.format_exc())
            if self._broken is None:
                self._idle.append(client)
        if self._broken is not None:  # also if result() is called again
            raise self._broken
        value, trace = self._reply
        if trace:
            raise LaneError(value, trace)
        return value

    def forget(self) -> None:
        """Discard the reply when it arrives; this call must not be used any more."""
        if self._client is not None:
            self._client.unwanted += 1
            self._idle.append(self._client)
            self._client = None

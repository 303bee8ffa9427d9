"""Blocking HTTP calls: one request at a time, from plain threads.

Roost has two HTTP clients. Requests for samples go through aiohttp, which keeps thousands of them in flight. Everything
else (commands to engines and to the router, health checks) goes through this module, on urllib: these calls come one at
a time from threads that wait for the answer, and would otherwise need an event loop in each of these threads. A health
check must not share an event loop with requests either, or a busy loop would make a healthy engine look hung.

Proxies of the environment are ignored: servers are reached directly.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from roost.engines.keys import headers_of
from roost.errors import Finding, Fix, RolloutError

__all__ = ["Reply", "ask", "send"]

ERROR_BYTES = 2000
"""Bytes of an error's body that are read at most."""


@dataclass(frozen=True)
class Reply:
    """The answer of a server.

    Attributes:
        status: HTTP status.
        body: The whole body; of an error (status 400 and up) the first 2,000 bytes.
    """

    status: int
    body: bytes

    @property
    def is_error(self) -> bool:
        """Whether the status is 400 or higher."""
        return self.status >= 400

    @property
    def text(self) -> str:
        """The body as text; bytes that are not UTF-8 are replaced."""
        return self.body.decode(errors="replace")


def send(
    url: str,
    method: str = "GET",
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    *,
    key: str = "",
    socket_path: str = "",
) -> Reply:
    """Send a request and return the server's answer, whatever its status.

    Args:
        url: The URL. With ``socket_path`` its host is only a name.
        method: The HTTP method.
        body: Sent as JSON; ``None`` sends no body.
        timeout_s: Seconds to wait for the connection, and again for each part of the answer.
        key: The server's key, sent in the header ``Authorization``; empty sends none.
        socket_path: The Unix socket on which the server listens; empty: the host and port of the URL.

    Raises:
        OSError: The server does not answer, or the URL or the answer is malformed.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers_of(key)}
    opener = _unix_opener(socket_path) if socket_path else _opener
    try:
        request = urllib.request.Request(url, method=method, data=data, headers=headers)  # noqa: S310
        with opener.open(request, timeout=timeout_s) as answer:
            return Reply(answer.status, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.read(ERROR_BYTES))
    except (http.client.HTTPException, ValueError) as error:
        raise ConnectionError(str(error)) from error


def ask(
    url: str,
    method: str = "GET",
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    code: str = "E111",
    *,
    key: str = "",
    socket_path: str = "",
) -> Any:
    """Send a request and return the answer, parsed where it is JSON, as text where it is not.

    Args:
        url: See :func:`send`, as for the others except ``code``.
        method: The HTTP method.
        body: Sent as JSON.
        timeout_s: Seconds to wait for the connection, and again for each part of the answer.
        code: The code of errors.
        key: The server's key.
        socket_path: The Unix socket on which the server listens.

    Raises:
        RolloutError: The server does not answer, or answers with an error status; with the text of that answer.
            E113: the server refuses the key, or needs one and none was given.
    """
    try:
        reply = send(url, method, body, timeout_s, key=key, socket_path=socket_path)
    except OSError as error:
        raise RolloutError([Finding(code, f"{method} {url} does not answer: {error}")]) from error
    if reply.status == 401:
        what = "refuses the key that it was shown" if key else "asks for a key, and none is known"
        fixes = (Fix("give it", 'RolloutManager(…, external={"http://…": KEY})'),)
        raise RolloutError([Finding("E113", f"{method} {url} {what}", fixes=fixes)])
    if reply.is_error:
        raise RolloutError([Finding(code, f"{method} {url} answered {reply.status}: {reply.text}")])
    try:
        return json.loads(reply.body) if reply.body else None
    except ValueError:
        return reply.text


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str, host: str, *, timeout: float, **options: Any) -> None:
        super().__init__(host, timeout=timeout, **options)
        self._path = path
        self._timeout_s = timeout

    def connect(self) -> None:
        """Connect, and wait where the server has not accepted earlier connections yet.

        A Python socket with a timeout does not block in the kernel, so that a full backlog would be an error at once.
        Here the kernel waits, for as long as the socket's send timeout.
        """
        self.sock = socket.socket(socket.AF_UNIX)
        limit = struct.pack("ll", int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.sock.connect(self._path)
        self.sock.settimeout(self._timeout_s)

    def send(self, data: Any) -> None:
        """Send data; a server that has replied and closed the connection before it read the body is no error.

        http.client sends the body after the headers, and some routes of vLLM reply without reading a body. Reading the
        reply fails if there is none.
        """
        with contextlib.suppress(BrokenPipeError):
            super().send(data)


class _UnixHandler(urllib.request.HTTPHandler):
    """Sends every request to one Unix socket, whatever the host of its URL."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_UnixConnection, self._path), request)


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _unix_opener(socket_path: str) -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _UnixHandler(socket_path))

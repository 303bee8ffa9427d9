"""Port leases.

Another process can bind a free port at any time, so finding a free port and closing it again is a race. A lease holds
two sockets per port in the process that leases. The first socket has a name in the kernel's abstract namespace, which
makes the lease unique among all users of the network namespace. The second one is bound to the port and keeps other
processes away until the owner binds it; a server that sets ``SO_REUSEADDR`` can bind beside it. A hostile user can set
that option, too, so once the owner's server listens, :meth:`PortLease.exclude_others` keeps all others away, also after
that server has ended; :func:`is_own_server` tells whether the listening server is the owner's. When the process dies,
the kernel closes both sockets. No file is used, so other users cannot interfere by preparing one.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from types import TracebackType

from roost.errors import ClusterError, Finding, Fix

__all__ = ["PortLease", "is_own_server", "lease_ports"]

LOWEST = 20_000
"""Lowest port that is leased: above Ray's own range (10002-19999)."""
LISTENS = "0A"
"""The state of a listening socket in ``/proc/net/tcp``."""


def _bounds() -> tuple[int, int]:
    """Return the first port, and the one after the last; the range excludes the kernel's ephemeral ports."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            first, last = (int(word) for word in file.read().split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999
    if first > LOWEST + 1000:
        return LOWEST, first
    return (last + 1, 65_536) if last < 64_536 else (LOWEST, 65_536)


class PortLease:
    """Consecutive ports that belong to this process until they are released or the process ends.

    Attributes:
        port: The first port.
        count: Number of ports.
    """

    def __init__(self, port: int, locks: list[socket.socket], sockets: list[socket.socket]) -> None:
        self.port = port
        self.count = len(locks)
        self._locks = locks
        self._sockets = sockets

    @property
    def ports(self) -> range:
        """All leased ports."""
        return range(self.port, self.port + self.count)

    def hand_over(self) -> int:
        """Close the sockets that are bound to the ports, for a server that cannot bind beside them.

        The lease stays, so no other lease gets the ports. Returns the first port.
        """
        for held in self._sockets:
            held.close()
        self._sockets.clear()
        return self.port

    def exclude_others(self) -> None:
        """Let no further socket bind these ports or listen on them; a server that listens already goes on.

        Linux lets two sockets bind a port if both set ``SO_REUSEADDR`` and neither listens. The held sockets give up
        the option here.
        """
        self._set_reuse(0)

    def admit_server(self) -> None:
        """Undo :meth:`exclude_others`, so that a server that sets ``SO_REUSEADDR`` can bind."""
        self._set_reuse(1)

    def _set_reuse(self, value: int) -> None:
        for held in self._sockets:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, value)

    def release(self) -> None:
        """Release the ports. Safe to call twice."""
        self.hand_over()
        for lock in self._locks:
            lock.close()
        self._locks.clear()

    def __enter__(self) -> PortLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"PortLease({self.port}, count={self.count})"


_picking = threading.Lock()


def lease_ports(count: int = 1, host: str = "") -> PortLease:
    """Lease consecutive ports on this node.

    Args:
        count: Number of ports.
        host: The address that the owner will bind; default all addresses.

    Raises:
        ClusterError: No such run of ports is free, or the number is out of range (R120).
    """
    low, high = _bounds()
    if not 1 <= count <= high - low:
        raise ClusterError([Finding("R120", f"from 1 to {high - low} consecutive ports can be leased, not {count}")])
    starts = range(low, high - count + 1)
    first = random.SystemRandom().randrange(len(starts))
    with _picking:
        index = 0
        while index < len(starts):
            start = starts[(first + index) % len(starts)]
            lease, taken = _try(start, count, host)
            if lease is not None:
                return lease
            index += max(1, taken - start + 1)
    message = f"no {count} consecutive ports are free between {low} and {high - 1}"
    fixes = (Fix("see which processes use them", "ss -tlnp"),)
    raise ClusterError([Finding("R120", message, fixes=fixes)])


def is_own_server(port: int) -> bool:
    """Return whether somebody listens on a port of this machine, and nobody but processes of this user do."""
    users = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{name}", encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
            users += [int(row[7]) for row in rows if row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == port]
    return bool(users) and set(users) == {os.getuid()}


def _try(start: int, count: int, host: str) -> tuple[PortLease | None, int]:
    """Return a lease that begins at a port; or ``None``, and the port that is in use."""
    locks: list[socket.socket] = []
    sockets: list[socket.socket] = []
    for port in range(start, start + count):
        lock = _lock(port)
        held = _bind(host, port) if lock is not None else None
        if lock is not None:
            locks.append(lock)
        if held is None:
            PortLease(start, locks, sockets).release()
            return None, port
        sockets.append(held)
    return PortLease(start, locks, sockets), start


def _lock(port: int) -> socket.socket | None:
    """Bind the abstract name of a port; return ``None`` if another lease has it.

    Abstract names belong to a network namespace, as ports do. They have no owner and no permissions: the first process
    to bind a name has it. The socket does not listen, so no process can connect to it.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0roost-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock


def _bind(host: str, port: int) -> socket.socket | None:
    """Return a socket that is bound to a port; ``None`` if the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        probe.bind((host, port))  # without SO_REUSEADDR this fails if any socket is bound to the port
    except OSError:
        probe.close()
        return None
    probe.close()
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError:
        held.close()
        return None
    return held

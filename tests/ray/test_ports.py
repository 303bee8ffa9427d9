"""Leases of ports: unique on the machine, held, and given back by the kernel."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
from ray_drivers import Driver

from roost import ClusterError, lease_ports

RAY_RANGE = range(10_002, 20_000)


def ephemeral() -> range:
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        low, high = map(int, file.read().split())
    return range(low, high + 1)


def can_bind(port: int, reuse: bool = False) -> bool:
    with socket.socket() as server:
        if reuse:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


@pytest.mark.parametrize("count", [1, 2, 33])
def test_a_lease_is_a_run_of_held_ports(count: int) -> None:
    with lease_ports(count) as lease:
        assert list(lease.ports) == [lease.port + i for i in range(count)]
        assert not any(can_bind(port) for port in lease.ports)
    assert all(can_bind(port) for port in lease.ports)


def test_a_server_that_reuses_addresses_takes_a_leased_port_as_it_is() -> None:
    with (
        lease_ports() as lease,
        socket.create_server(("127.0.0.1", lease.port)) as server,
        socket.create_connection(("127.0.0.1", lease.port), 5) as client,
    ):
        accepted, _ = server.accept()
        accepted.close()
        assert client.getpeername()[1] == lease.port


def test_a_server_that_wants_the_port_bare_gets_it_handed_over_and_nobody_else_leases_it() -> None:
    with lease_ports(2) as lease:
        assert not can_bind(lease.port)
        assert lease.hand_over() == lease.port
        assert can_bind(lease.port)
        assert list(lease.ports) == [lease.port, lease.port + 1]
        code = f"from roost.cluster import ports\nresult = ports._try({lease.port}, 1, '')[0] is None"
        with Driver() as other:
            assert other(code) is True
            lease.release()
            assert other(code) is False


def test_ports_keep_out_of_the_ranges_of_the_kernel_and_of_ray() -> None:
    with contextlib.ExitStack() as held:
        leases = [held.enter_context(lease_ports(2)) for _ in range(150)]
        ports = {port for lease in leases for port in lease.ports}
        assert len(ports) == 300
        assert not ports & set(RAY_RANGE)
        assert not ports & set(ephemeral())
        assert min(ports) > 1023


def test_a_port_that_somebody_serves_is_not_leased() -> None:
    from roost.cluster import ports

    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert ports._try(taken, 1, "") == (None, taken)


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_a_run_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ClusterError, match=r"consecutive ports can be leased, not " + str(count)):
        lease_ports(count)


_MANY = """
import os, sys
from roost.cluster.ports import lease_ports

go, went = os.pipe()
for _ in range(8):
    if not os.fork():
        os.close(went)
        os.read(go, 1)  # all at once
        leases = [lease_ports(1 + i % 3) for i in range(60)]
        os.write(1, (" ".join(str(port) for lease in leases for port in lease.ports) + "\\n").encode())
        sys.stdin.read()
        os._exit(0)
os.close(went)
"""


def test_eight_processes_at_once_never_lease_the_same_port() -> None:
    # One process that forks: the eight need Ray to be imported only once.
    with subprocess.Popen([sys.executable, "-c", _MANY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as processes:
        assert processes.stdin is not None
        assert processes.stdout is not None
        found = [[int(word) for word in processes.stdout.readline().split()] for _ in range(8)]
        processes.stdin.close()
    assert [len(ports) for ports in found] == [120] * 8
    assert len({port for ports in found for port in ports}) == 960


def test_the_death_of_the_owner_gives_its_ports_back(eventually: Callable[..., None]) -> None:
    with Driver() as owner:
        port = owner("from roost import lease_ports\nlease = lease_ports(3)\nresult = lease.port")
        assert not any(can_bind(port + i) for i in range(3))
        owner.kill()
        eventually(lambda: all(can_bind(port + i) for i in range(3)))
        assert owner_of(port) is None


def owner_of(port: int) -> str | None:
    """What holds the name that stands for a port, as the kernel lists it."""
    with open("/proc/net/unix", encoding="ascii") as names:
        return next((line for line in names if line.endswith(f" @roost-port-{port}\n")), None)


_OPENED = """
import sys
from roost.cluster.ports import lease_ports

lease_ports().release()  # what Python loads at the first use is not meant
touched = []
sys.addaudithook(lambda event, args: touched.append(str(args[0])) if event in ("open", "os.mkdir", "os.chmod") else None)
with lease_ports(3) as lease:
    print(touched)
"""


def test_leases_depend_on_no_file_that_another_user_could_prepare() -> None:
    done = subprocess.run([sys.executable, "-c", _OPENED], capture_output=True, text=True, check=True)
    assert done.stdout == "['/proc/sys/net/ipv4/ip_local_port_range']\n"


_OTHER_USER = """
import os, sys
from roost.cluster import ports

ports.lease_ports().release()  # Python loads what it needs for this while it can
os.setgid(65534)
os.setuid(65534)
with ports.lease_ports() as own:
    own.hand_over()
    print(own.port, flush=True)
    for line in sys.stdin:
        print(ports._try(int(line), 1, "")[0] is not None, flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_users_keep_off_each_others_leases_also_after_the_hand_over() -> None:
    from roost.cluster import ports

    with (
        subprocess.Popen(
            [sys.executable, "-c", _OTHER_USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
        lease_ports() as lease,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        assert ports._try(theirs, 1, "") == (None, theirs)
        lease.hand_over()
        answers = []
        for _ in range(2):
            other.stdin.write(f"{lease.port}\n")
            other.stdin.flush()
            answers.append(other.stdout.readline().strip())
            lease.release()
        other.stdin.close()
    assert answers == ["False", "True"]

"""A short way for calls; here to a lock."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from roost.data.lock import LeaseLock
from roost.errors import RoostError
from roost.worker import lane
from roost.worker.lane import LaneAddress, LaneClient, LaneError, LaneServer


def ask(client: LaneClient, method: str, *args: Any) -> Any:
    try:
        return client.begin(method, *args).result(40.0)
    except LaneError as error:
        raise error.cause from None


def test_calls_and_their_errors_come_through() -> None:
    server = LaneServer(LeaseLock(10.0), "127.0.0.1")
    client = LaneClient(server.address)
    token = ask(client, "acquire", "exclusive", "one", 1.0)
    assert ask(client, "state")["ttl_s"] == 10.0
    with pytest.raises(RoostError, match="waited"):
        ask(client, "acquire", "shared", "two", 0.05)
    ask(client, "release", token)
    with pytest.raises(RoostError, match="ended"):
        ask(client, "release", token)
    server.close()


def test_those_who_wait_do_not_hold_up_others() -> None:
    server = LaneServer(LeaseLock(600.0), "127.0.0.1")
    client = LaneClient(server.address)
    token = ask(client, "acquire", "exclusive", "one", 1.0)
    waiting = [threading.Thread(target=ask, args=(client, "acquire", "shared", str(n), 30.0)) for n in range(80)]
    for thread in waiting:
        thread.start()
    ask(client, "renew", token)
    ask(client, "release", token)
    for thread in waiting:
        thread.join(30)
    assert not any(thread.is_alive() for thread in waiting)
    server.close()


def test_who_does_not_know_the_key_is_refused() -> None:
    server = LaneServer(LeaseLock(10.0), "127.0.0.1")
    wrong = LaneAddress(server.address.host, server.address.port, b"another key")
    with pytest.raises(ConnectionError):
        LaneClient(wrong).begin("state")
    assert ask(LaneClient(server.address), "state")["ttl_s"] == 10.0
    server.close()


def test_a_silent_server_is_given_up_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "REPLY_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConnectionError):
        LaneClient(LaneAddress("127.0.0.1", silent.getsockname()[1], b"key")).begin("state")


def test_a_connection_that_has_ended_is_replaced() -> None:
    server = LaneServer(LeaseLock(10.0), "127.0.0.1")
    client = LaneClient(server.address)
    ask(client, "state")
    client._idle[0].connection.close()
    assert ask(client, "state")["ttl_s"] == 10.0
    client._idle[0].connection.close()
    server.close()
    with pytest.raises(ConnectionError):
        client.begin("state")


def test_an_unwanted_reply_is_not_returned_to_the_next_call() -> None:
    server = LaneServer(LeaseLock(10.0), "127.0.0.1")
    client = LaneClient(server.address)
    first = client.begin("acquire", "exclusive", "one", 1.0)
    first.forget()
    assert ask(client, "state")["ttl_s"] == 10.0
    assert len(client._idle) == 1
    server.close()


def test_what_a_method_raises_comes_with_its_traceback() -> None:
    server = LaneServer(LeaseLock(10.0), "127.0.0.1")
    with pytest.raises(LaneError) as caught:
        LaneClient(server.address).begin("acquire").result(10.0)
    assert isinstance(caught.value.cause, TypeError)
    assert "acquire()" in caught.value.trace
    server.close()


DYING = """
import os, time
from roost.worker.lane import LaneServer
class Target:
    def die(self):
        os._exit(1)
class Own(Exception):
    pass
def fail(self):
    raise Own("of a class that is in this program only")
Target.fail = fail
address = LaneServer(Target(), "127.0.0.1").address
print(address.port, address.key.hex(), flush=True)
time.sleep(60)
"""


def test_the_end_of_the_other_side_is_told_as_often_as_it_is_asked_for() -> None:
    other = subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        port, key = other.stdout.readline().split()
        client = LaneClient(LaneAddress("127.0.0.1", int(port), bytes.fromhex(key)))
        with pytest.raises(LaneError, match="of a class that is in this program only"):
            client.begin("fail").result(30.0)
        call = client.begin("die")
        for _ in range(2):
            with pytest.raises((EOFError, OSError)):
                call.result(30.0)
        assert call.done()
    finally:
        other.kill()
        other.communicate()


def test_a_server_that_is_closed_takes_no_more_clients() -> None:
    server = LaneServer(LeaseLock(10.0), "127.0.0.1")
    server.close()
    with pytest.raises(ConnectionError):
        LaneClient(server.address).begin("state")


def test_an_answer_that_cannot_be_pickled_is_an_error() -> None:
    class Target:
        def lock(self) -> object:
            return threading.Lock()

    server = LaneServer(Target(), "127.0.0.1")
    with pytest.raises(LaneError, match="lock"):
        LaneClient(server.address).begin("lock").result(10.0)
    server.close()

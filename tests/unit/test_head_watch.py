"""The watch over Ray's head, with sockets in place of its GCS. Ports stay bound, so no other process can take them."""

import logging
import socket
import threading
import time

import pytest

from roost import ClusterError
from roost.cluster.losses import HeadWatch

WAIT_S = 60


def until(check):
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def gcs():
    """A port that is bound: it refuses connections until ``listen`` is called, and again after ``shutdown``."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


@pytest.fixture
def watch(gcs):
    made = []

    def make(ends_after_s, is_wanted=lambda: True):
        address = "{}:{}".format(*gcs.getsockname())
        made.append(HeadWatch(address, "node 0 (127.0.0.1)", is_wanted, ends_after_s=ends_after_s, every_s=0.02))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert not one._thread.is_alive()


def test_a_head_that_does_not_answer_is_lost_and_named(gcs, watch, caplog):
    caplog.set_level(logging.CRITICAL, "roost")
    head = watch(0.4)
    until(lambda: head.is_lost)
    with pytest.raises(ClusterError) as caught:
        head.check()
    assert caught.value.codes == ("R116",)
    text = str(caught.value)
    assert "Ray's head, node 0 (127.0.0.1), is gone: its GCS at 127.0.0.1:" in text
    assert "Connection refused" in text
    assert "Ray ends a driver 0.4 s after the loss of its GCS" in text
    until(lambda: caplog.records)
    assert "node 0 (127.0.0.1), is gone" in caplog.text
    assert not head.answers()


def test_a_head_that_answers_is_not_lost_however_long_it_runs(gcs, watch):
    gcs.listen(4096)
    head = watch(0.0)  # the first failure would count
    seen = []
    accepting = threading.Thread(target=lambda: seen.extend(gcs.accept()[0].close() for _ in range(5)), daemon=True)
    accepting.start()
    until(lambda: len(seen) == 5)
    assert not head.is_lost
    head.check()
    assert head.answers()


def test_a_head_that_comes_back_is_not_lost_any_more(gcs, watch):
    head = watch(0.0)
    until(lambda: head.is_lost)
    gcs.listen(4096)
    until(lambda: not head.is_lost)
    gcs.shutdown(socket.SHUT_RDWR)
    until(lambda: head.is_lost)


def test_a_head_is_not_lost_before_half_of_the_time_has_passed(gcs, watch):
    head = watch(1000.0)
    until(lambda: head._fault)
    assert not head.is_lost
    head.check()
    head.give_up()
    assert head.is_lost


def test_the_thread_ends_when_nobody_wants_it(watch):
    wanted = threading.Event()
    wanted.set()
    head = watch(1000.0, wanted.is_set)
    until(lambda: head._fault)
    assert head._thread.is_alive()
    wanted.clear()
    until(lambda: not head._thread.is_alive())


@pytest.mark.parametrize(("said", "limit_s"), [("600", 600.0), ("", 60.0), ("soon", 60.0)])
def test_ray_says_when_it_ends_a_driver(gcs, monkeypatch, said, limit_s):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", said)
    head = HeadWatch(f"127.0.0.1:{gcs.getsockname()[1]}", "node 0", lambda: False)
    head.close()
    assert head._ends_after_s == limit_s

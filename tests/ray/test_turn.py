"""The turn to reserve: one process at a time, whatever becomes of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import ray
from ray_drivers import Driver

import roost
from roost.cluster import turn
from roost.cluster.turn import reservation_turn
from roost.testing import LocalRay

LONG_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def connection(four_nodes: LocalRay) -> Iterator[None]:
    ray.init(namespace="tests", logging_level="warning")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def other(four_nodes: LocalRay) -> Iterator[Driver]:
    with Driver() as driver:
        driver(
            """
import time, ray
from roost.cluster.turn import reservation_turn
ray.init(logging_level="warning")
result = ray.get_runtime_context().get_job_id()
"""
        )
        yield driver


def contend(count: int, lease_s: float) -> list[int]:
    """Take the turn from several threads at once; return how many had it at the same time, at each change."""
    inside, seen, guard = 0, [], threading.Lock()
    start = threading.Barrier(count)

    def enter() -> None:
        nonlocal inside
        start.wait()
        for _ in range(3):
            with reservation_turn(time.monotonic() + LONG_S, lease_s=lease_s):
                with guard:
                    inside += 1
                    seen.append(inside)
                time.sleep(0.01)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_one_at_a_time_has_the_turn() -> None:
    assert contend(6, LONG_S) == [1] * 18


def test_the_turn_of_a_holder_that_was_killed_expires() -> None:
    with Driver() as victim:
        victim(
            """
import time, ray
from roost.cluster.turn import reservation_turn
ray.init(logging_level="warning")
held = reservation_turn(time.monotonic() + 120)
held.__enter__()
"""
        )
        number, record = turn._newest()
        assert record is not None
        assert not record.is_over
        victim.kill()
    with reservation_turn(time.monotonic() + LONG_S, lease_s=1.0):
        assert turn._newest()[0] == number + 1


def test_many_that_see_a_turn_expire_do_not_have_the_next_one_together() -> None:
    number, _ = turn._newest()
    for _ in range(5):
        number += 1
        turn._put(number, turn._Record("0a000000:1:abc"))  # a holder that died
        together = threading.Barrier(8)
        winners = []

        def take(number: int = number, together: threading.Barrier = together, winners: list[str] = winners) -> None:
            mine = turn._Record(f"0b000000:2:{threading.get_ident()}")
            together.wait()
            if turn._take(number + 1, mine):
                winners.append(mine.owner)

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        number += 1
    turn._put(number, turn._Record("0b000000:2:abc", is_over=True))


def test_a_turn_of_the_past_cannot_be_taken() -> None:
    with reservation_turn(time.monotonic() + LONG_S):
        pass
    number, _ = turn._newest()
    with reservation_turn(time.monotonic() + LONG_S) as held:
        assert not turn._take(number, turn._Record("0b000000:2:late"))
        assert held.is_mine()
        assert turn._numbers() == [number + 1]


def test_a_holder_renews_its_turn_and_learns_that_it_was_taken(eventually: Callable[..., None]) -> None:
    with reservation_turn(time.monotonic() + LONG_S, renew_s=0.05) as held:
        number, record = turn._newest()
        assert record is not None
        eventually(lambda: turn._newest()[1].renewals > record.renewals + 1, 60)
        assert held.is_mine()
        turn._put(number + 1, turn._Record("0b000000:2:abc"))
        assert not held.is_mine()
    assert turn._newest() == (number + 1, turn._Record("0b000000:2:abc"))  # another's turn is not ended
    turn._put(number + 1, turn._Record("0b000000:2:abc", is_over=True))


def test_a_turn_that_does_not_come_names_who_has_it(other: Driver) -> None:
    job = other(
        "held = reservation_turn(time.monotonic() + 120)\nheld.__enter__()\nresult = ray.get_runtime_context().get_job_id()"
    )
    try:
        with (
            pytest.raises(roost.ReservationError, match=rf"job {job}, process {other.pid}") as caught,
            reservation_turn(time.monotonic() + 0.5),
        ):
            pass
        assert caught.value.codes == ("R204",)
    finally:
        other("held.__exit__(None, None, None)")


def test_a_renewed_turn_does_not_expire_however_long_it_is_held() -> None:
    now = 0.0
    patience = turn._Patience(10.0, clock=lambda: now)
    record = turn._Record("0a000000:1:abc")
    assert not patience.is_exhausted(3, record)
    now = 10.0
    assert not patience.is_exhausted(3, record)
    renewed = turn._Record("0a000000:1:abc", renewals=1)
    now = 19.0
    assert not patience.is_exhausted(3, renewed)
    now = 28.0
    assert not patience.is_exhausted(3, renewed)
    now = 29.5
    assert patience.is_exhausted(3, renewed)
    assert not patience.is_exhausted(4, renewed)

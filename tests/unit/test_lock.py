"""The lock around weights: leases, turns, and holders that die."""

import threading
import time

import pytest

from roost import CallTimeoutError, LeaseLock, RolloutError
from roost.data.lock import HeldLock

WAIT_S = 60


class Clock:
    """Time stands still until somebody moves it."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lock(clock):
    return LeaseLock(10.0, clock=clock)


def in_background(call):
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it still waits"
        return found[0]

    return result


def until(check):
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def waiters(lock):
    return [one["holder"] for one in lock.state()["waiters"]]


def holders(lock):
    return [one["holder"] for one in lock.state()["holders"]]


def test_many_share_and_one_is_alone(lock):
    shared = [lock.acquire("shared", f"engine-{n}", 0) for n in range(3)]
    assert shared == [1, 2, 3]
    with pytest.raises(CallTimeoutError):
        lock.acquire("exclusive", "trainer", 0)
    for token in shared:
        lock.release(token)
    assert lock.acquire("exclusive", "trainer", 0) == 4
    for kind in ("shared", "exclusive"):
        with pytest.raises(TimeoutError):
            lock.acquire(kind, "other", 0)


def test_a_timeout_says_who_holds_it_since_when_and_who_waits(lock, clock):
    lock.acquire("exclusive", "trainer", 0)
    clock.now_s += 3
    late = in_background(lambda: lock.acquire("shared", "engine-0", 5))
    until(lambda: waiters(lock) == ["engine-0"])
    clock.now_s += 5.5
    lock.state()
    error = late()
    assert error.codes == ("L101",)
    for part in (
        "engine-0 waited 5.5 s for the shared lock",
        "held by trainer (exclusive, 8.5 s)",
        "waiting: engine-0",
    ):
        assert part in str(error)
    assert waiters(lock) == []


def test_a_waiting_writer_blocks_new_readers_and_each_has_its_turn(lock):
    first = lock.acquire("shared", "reader-0", 0)
    writer = in_background(lambda: lock.acquire("exclusive", "writer", WAIT_S))
    until(lambda: waiters(lock) == ["writer"])
    readers = []
    for name in ("reader-1", "reader-2"):
        readers.append(in_background(lambda name=name: lock.acquire("shared", name, WAIT_S)))
        until(lambda name=name: name in waiters(lock))
    assert holders(lock) == ["reader-0"]
    lock.release(first)
    token = writer()
    assert (token, holders(lock)) == (2, ["writer"])
    lock.release(token)
    assert sorted(result() for result in readers) == [3, 4]


def test_a_writer_that_gives_up_lets_readers_pass(lock, clock):
    lock.acquire("shared", "reader-0", 0)
    writer = in_background(lambda: lock.acquire("exclusive", "writer", 5))
    until(lambda: waiters(lock) == ["writer"])
    reader = in_background(lambda: lock.acquire("shared", "reader-1", 8))
    until(lambda: len(waiters(lock)) == 2)
    clock.now_s += 6
    lock.state()
    assert isinstance(writer(), CallTimeoutError)
    assert reader() == 2


def test_a_holder_that_dies_frees_it(lock, clock):
    dead = lock.acquire("exclusive", "trainer", 0)
    next_one = in_background(lambda: lock.acquire("shared", "engine-0", WAIT_S))
    until(lambda: waiters(lock) == ["engine-0"])
    clock.now_s += 9
    assert holders(lock) == ["trainer"]
    clock.now_s += 1
    assert holders(lock) == ["engine-0"]
    assert next_one() == dead + 1
    clock.now_s += 2
    for call in (lock.renew, lock.release):
        with pytest.raises(RolloutError) as caught:
            call(dead)
        assert caught.value.codes == ("L102",)
        text = "the exclusive lease 1 of trainer ended 2.0 s ago: was not renewed for 10 s"
        assert text in str(caught.value)
        assert "held by engine-0 (shared, 2.0 s)" in str(caught.value)


def test_a_dead_holder_wakes_who_waits_without_anybody_asking():
    lock = LeaseLock(0.05)
    lock.acquire("exclusive", "dead", 0)
    assert lock.acquire("exclusive", "alive", WAIT_S) == 2


def test_renewing_keeps_it(lock, clock):
    token = lock.acquire("shared", "engine-0", 0)
    for _ in range(5):
        clock.now_s += 9
        assert lock.renew(token) == 10.0
    (one,) = lock.state()["holders"]
    assert one == {"token": 1, "mode": "shared", "holder": "engine-0", "held_s": 45.0, "ends_in_s": 10.0}
    lock.release(token)
    with pytest.raises(RolloutError, match="released before") as caught:
        lock.release(token)
    assert caught.value.codes == ("L102",)


def test_wrong_calls(lock):
    with pytest.raises(RolloutError, match="never granted") as caught:
        lock.release(7)
    assert caught.value.codes == ("L103",)
    for call in (lambda: lock.acquire("write", "x", 0), lambda: LeaseLock(0), lambda: LeaseLock(float("nan"))):
        with pytest.raises(RolloutError) as caught:
            call()
        assert caught.value.codes == ("L105",)


def test_many_threads_are_never_together_with_a_writer():
    lock, inside, wrong = LeaseLock(10.0), [], []

    def work(number):
        kind = "exclusive" if number % 3 == 0 else "shared"
        for _ in range(15):
            token = lock.acquire(kind, f"{kind}-{number}", WAIT_S)
            inside.append(kind)
            if kind == "exclusive" and len(inside) > 1:
                wrong.append(list(inside))
            inside.remove(kind)
            lock.release(token)

    results = [in_background(lambda number=number: work(number)) for number in range(6)]
    assert [result() for result in results] == [None] * 6
    assert wrong == []
    assert lock.state()["last_token"] == 90


# The holder's side -------------------------------------------------------------------------------


def held_lock(lock, mode="exclusive", **kwargs):
    calls = {"acquire": lock.acquire, "renew": lock.renew, "release": lock.release}
    ttl_s = kwargs.pop("ttl_s", lock.ttl_s)
    calls |= kwargs
    return HeldLock(**calls, mode=mode, holder="trainer", timeout_s=WAIT_S, ttl_s=ttl_s)


def test_a_block_holds_it():
    lock = LeaseLock(10.0)
    held = held_lock(lock)
    assert not held.is_held
    with held:
        assert held.is_held
        assert holders(lock) == ["trainer"]
        assert held.token == 1
    assert not held.is_held
    assert holders(lock) == []
    with pytest.raises(RolloutError, match="one block"), held:
        pass


def test_a_long_block_renews():
    lock, renewed = LeaseLock(600.0), []

    def renew(token):
        renewed.append(token)
        return lock.renew(token)

    with held_lock(lock, renew=renew, ttl_s=0.03) as held:
        until(lambda: len(renewed) > 5)
        assert held.lost is None
    assert set(renewed) == {1}


def test_a_lost_lease_raises_at_the_end_of_the_block(clock):
    lock = LeaseLock(10.0, clock=clock)
    held = held_lock(lock, ttl_s=0.03)

    def lose():
        clock.now_s += 11
        until(lambda: held.lost is not None)
        assert not held.is_held

    with pytest.raises(RolloutError, match="trainer lost the exclusive lease 1") as caught, held:
        lose()
    assert caught.value.codes == ("L104",)
    assert caught.value.__cause__.codes == ("L102",)
    assert "ended" in str(caught.value)


def test_a_lease_that_was_lost_unnoticed_is_noticed_at_the_end(clock):
    lock = LeaseLock(10.0, clock=clock)
    with pytest.raises(RolloutError) as caught, held_lock(lock):
        clock.now_s += 11
    assert caught.value.codes == ("L104",)


def test_a_lost_lease_is_known_through_an_actor_too(clock):
    lock = LeaseLock(10.0, clock=clock)

    def renew(token):
        try:
            return lock.renew(token)
        except RolloutError as error:
            raise RuntimeError("a worker raised") from error

    held = held_lock(lock, renew=renew, ttl_s=0.03, clock=Clock())  # by its own clock it would still hold

    def lose():
        clock.now_s += 11
        until(lambda: held.lost is not None)

    with pytest.raises(RolloutError, match="lost"), held:
        lose()


def test_an_exception_of_the_block_goes_first(clock):
    lock = LeaseLock(10.0, clock=clock)
    held = held_lock(lock)

    def fail():
        clock.now_s += 11
        raise KeyError("own")

    with pytest.raises(KeyError), held:
        fail()
    assert held.lost.codes == ("L104",)
    with pytest.raises(KeyError), held_lock(lock):
        raise KeyError("own")
    assert holders(lock) == []


def test_renewals_that_fail_are_tried_again_while_the_lease_may_hold(clock):
    lock, calls = LeaseLock(60.0), []

    def renew(token):
        calls.append(token)
        if len(calls) == 1:
            raise ConnectionError("no answer")
        return lock.renew(token)

    with held_lock(lock, renew=renew, ttl_s=0.03, clock=clock) as held:
        until(lambda: len(calls) > 1)
        assert held.is_held

    def never(token):
        raise ConnectionError("no answer")

    held = held_lock(lock, renew=never, ttl_s=0.03)
    with pytest.raises(RolloutError, match="no answer") as caught, held:
        until(lambda: held.lost is not None)
    assert caught.value.codes == ("L104",)
    assert holders(lock) == []


def test_a_lease_that_came_long_after_it_was_asked_for_is_renewed_at_once(clock):
    lock, renewed = LeaseLock(10.0), []

    def acquire(kind, holder, timeout_s):
        clock.now_s += 5
        return lock.acquire(kind, holder, timeout_s)

    held = HeldLock(
        acquire, renewed.append, lock.release, "shared", "engine", timeout_s=WAIT_S, ttl_s=10.0, clock=clock
    )
    with held:
        assert renewed == [1]
        clock.now_s += 10
        assert not held.is_held

"""Reservation: exactly the accelerators of the job, all of them or none, and given back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import ray
from ray.util.placement_group import placement_group_table
from ray_drivers import Driver, DriverError

import roost
from roost.cluster import reserve, turn
from roost.testing import LocalRay

ALL = range(4)
SHORT_S = 3.0
"""Seconds to wait for what does not come; all else that a reservation needs should come in this time."""


@pytest.fixture(scope="module")
def connection(four_nodes: LocalRay) -> Iterator[None]:
    """Ray is joined before Roost is: worker processes are then kept from one test to the next."""
    ray.init(namespace="tests", logging_level="warning")
    yield
    ray.shutdown()


@pytest.fixture
def job(connection: None, eventually: Callable[..., None], free_gpus: Callable[[], float]) -> Iterator[roost.Cluster]:
    eventually(lambda: free_gpus() == 16)
    with roost.Cluster(num_nodes=4) as cluster:
        yield cluster
    eventually(lambda: free_gpus() == 16)


@pytest.fixture
def stranger(other_driver: Driver) -> Iterator[Driver]:
    yield other_driver
    other_driver("give_back()")


@pytest.fixture(scope="module")
def other_driver(four_nodes: LocalRay) -> Iterator[Driver]:
    """Another driver on the same Ray that knows nothing of Roost."""
    with Driver() as driver:
        driver(
            """
import ray
import time
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
ray.init(logging_level="warning")

groups = []

@ray.remote(num_cpus=0, num_gpus=1, max_calls=0)
def which():
    return int(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])

def take(rank, count, more=0, cpus=0):
    "Takes so many GPUs of a node, and of some more what there is; returns which it got."
    global groups
    cpu = {"CPU": cpus} if cpus else {}
    groups = [placement_group([{"GPU": 1, f"node:127.0.0.{2 + rank}": 0.001, **cpu}]) for _ in range(count + more)]
    ready, got, deadline = [], [], time.monotonic() + 120
    while len(ready) < count and time.monotonic() < deadline:
        ready += [group for group in groups if group not in ready and group.wait(0.2)]
    ready += [group for group in groups if group not in ready and group.wait(1.5)]  # Ray looks again once a second
    for group in ready:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        got.append(ray.get(which.options(scheduling_strategy=strategy).remote(), timeout=120))
    return sorted(got)

def give_back():
    while groups:
        remove_placement_group(groups.pop())
"""
        )
        yield driver


@pytest.fixture(scope="module")
def second_job(four_nodes: LocalRay) -> Iterator[Driver]:
    """Another Roost job on the same Ray."""
    with Driver() as driver:
        driver("import time, roost\ncluster = roost.Cluster(num_nodes=4, namespace='second')")
        yield driver
        driver("cluster.close()")


def test_another_job_gets_exactly_the_accelerators_that_this_one_does_not_use(
    job: roost.Cluster, stranger: Driver
) -> None:
    token = job.reserve({1: [1, 2]})
    assert stranger("result = take(1, 2, more=2)") == [0, 3]
    job.release(token)
    stranger("give_back()")


def test_the_last_accelerators_of_a_node_can_be_had_alone(job: roost.Cluster, stranger: Driver) -> None:
    job.reserve({3: [3], 0: [2]})
    assert stranger("result = take(3, 3, more=1)") == [0, 1, 2]
    stranger("give_back()")
    assert stranger("result = take(0, 3, more=1)") == [0, 1, 3]
    stranger("give_back()")


def test_accelerators_are_counted(
    job: roost.Cluster, stranger: Driver, eventually: Callable[..., None], free_gpus: Callable[[], float]
) -> None:
    first = job.reserve({0: [1, 2]})
    second = job.reserve({0: [2, 3]})
    assert ray.get(job.managers.held.remote()) == {(0, 1): 1, (0, 2): 2, (0, 3): 1}
    eventually(lambda: free_gpus() == 13)
    job.release(first)
    assert ray.get(job.managers.held.remote()) == {(0, 2): 1, (0, 3): 1}
    eventually(lambda: free_gpus() == 14)
    assert stranger("result = take(0, 2, more=2)") == [0, 1]
    stranger("give_back()")
    job.release(first)  # once is enough
    assert ray.get(job.managers.held.remote()) == {(0, 2): 1, (0, 3): 1}
    job.release(second)
    assert ray.get(job.managers.held.remote()) == {}
    eventually(lambda: free_gpus() == 16)


def test_a_part_of_a_held_node_is_there_already(job: roost.Cluster, free_gpus: Callable[[], float]) -> None:
    whole = job.reserve({2: ALL})
    part = job.reserve({2: [1]}, timeout_s=60)
    job.release(whole)
    assert ray.get(job.managers.held.remote()) == {(2, 1): 1}
    job.release(part)


def test_a_whole_node_costs_one_placement_group(
    job: roost.Cluster, eventually: Callable[..., None], free_gpus: Callable[[], float]
) -> None:
    def created() -> int:
        return sum(entry["state"] == "CREATED" for entry in placement_group_table().values())

    before = created()
    token = job.reserve({0: ALL, 2: ALL})
    assert created() - before == 2
    eventually(lambda: free_gpus() == 8)
    job.release(token)


@pytest.mark.parametrize(("accelerators", "cpus"), [({4: [0]}, {}), ({-1: [0]}, {}), ({0: [4]}, {}), ({}, {7: 1.0})])
def test_what_is_not_there_is_refused_at_once(
    job: roost.Cluster, accelerators: dict[int, list[int]], cpus: dict[int, float]
) -> None:
    started = time.monotonic()
    with pytest.raises(roost.ClusterError, match=r"there is no node|has 4 GPUs, and no 4"):
        job.reserve(accelerators, cpus)
    assert time.monotonic() - started < 30


def test_more_cpus_than_a_node_has_are_refused_at_once(job: roost.Cluster) -> None:
    started = time.monotonic()
    with pytest.raises(roost.ReservationError, match="node 1 has 2 CPUs, and 3 are needed"):
        job.reserve({0: [0]}, {1: 3.0})
    assert time.monotonic() - started < 30
    assert ray.get(job.managers.held.remote()) == {}


def test_cpus_that_another_job_holds_are_named(
    job: roost.Cluster, stranger: Driver, eventually: Callable[..., None], free_gpus: Callable[[], float]
) -> None:
    assert len(stranger("result = take(2, 1, cpus=2)")) == 1
    eventually(lambda: ray.available_resources().get("CPU") == 6)
    started = time.monotonic()
    with pytest.raises(roost.ReservationError) as caught:
        job.reserve({0: [0], 1: ALL}, {2: 1.0}, timeout_s=SHORT_S)
    assert time.monotonic() - started < 30
    assert "node 2 (127.0.0.4)" in str(caught.value)
    assert "0 of 2 CPUs are free and 1 are needed" in str(caught.value)
    assert ray.get(job.managers.held.remote()) == {}
    stranger("give_back()")


def test_an_accelerator_that_another_job_holds_is_named_and_nothing_is_kept(
    job: roost.Cluster, stranger: Driver, eventually: Callable[..., None], free_gpus: Callable[[], float]
) -> None:
    (theirs,) = stranger("result = take(3, 1)")
    started = time.monotonic()
    with pytest.raises(roost.ReservationError) as caught:
        job.reserve({3: [theirs, 3 - theirs], 1: ALL}, timeout_s=SHORT_S)
    assert time.monotonic() - started < 30
    assert f"node 3 (127.0.0.5): GPU {theirs} is held by another Ray job" in str(caught.value)
    assert f"GPU {3 - theirs} is held" not in str(caught.value)
    assert ray.get(job.managers.held.remote()) == {}
    eventually(lambda: free_gpus() == 15)
    job.reserve({3: [local for local in ALL if local != theirs]}, timeout_s=60)
    stranger("give_back()")


def test_a_whole_node_of_which_another_job_holds_a_part_is_named(job: roost.Cluster, stranger: Driver) -> None:
    assert len(stranger("result = take(3, 1)")) == 1
    with pytest.raises(roost.ReservationError, match=r"node 3 \(127\.0\.0\.5\): 3 of 4 GPUs are free"):
        job.reserve({3: ALL}, timeout_s=SHORT_S)
    stranger("give_back()")


def test_what_another_job_gives_back_in_time_is_taken(job: roost.Cluster, stranger: Driver) -> None:
    (theirs,) = stranger("result = take(3, 1)")
    stranger.tell("import time\ntime.sleep(1)\ngive_back()")
    assert job.reserve({3: [theirs]}, timeout_s=120) > 0
    stranger.answer()


def test_two_jobs_at_once_never_have_half_each(job: roost.Cluster, second_job: Driver) -> None:
    for wanted in ({2: [0, 1, 2], 3: [1, 2, 3]}, {2: list(ALL), 3: list(ALL)}, {1: [0, 1], 2: [1, 2], 3: [2, 3]}):
        second_job.tell(
            f"token = cluster.reserve({wanted}, timeout_s=120)\n"
            "start = time.time()\n"
            "time.sleep(0.4)\n"
            "end = time.time()\n"
            "cluster.release(token)\n"
            "result = (start, end)"
        )
        token = job.reserve(wanted, timeout_s=120)
        start = time.time()
        time.sleep(0.4)
        end = time.time()
        job.release(token)
        their_start, their_end = second_job.answer()
        assert end <= their_start or their_end <= start


def test_another_roost_job_is_kept_off_and_the_ledgers_are_two(job: roost.Cluster, second_job: Driver) -> None:
    job.reserve({2: [0]})
    with pytest.raises(DriverError, match=r"ReservationError: .*node 2 \(127\.0\.0\.4\): GPU 0 is held by another"):
        second_job(f"cluster.reserve({{2: [0, 1]}}, timeout_s={SHORT_S})")
    assert second_job("token = cluster.reserve({2: [1, 2]}, timeout_s=60)\nresult = token > 0")
    assert ray.get(job.managers.held.remote()) == {(2, 0): 1}
    second_job("cluster.release(token)")


def test_closing_gives_back_what_was_not_released(
    connection: None, eventually: Callable[..., None], free_gpus: Callable[[], float]
) -> None:
    with roost.Cluster(num_nodes=4) as cluster:
        cluster.reserve({0: [1, 2], 1: ALL}, {0: 1.0})
        cluster.reserve_bundles(2, cpus=0)
        eventually(lambda: free_gpus() == 8)
    assert ray.is_initialized()  # the driver lives on, and Ray with it
    eventually(lambda: free_gpus() == 16 and ray.available_resources()["CPU"] == 8)


def test_processes_of_one_job_have_one_ledger_and_the_dead_hold_nothing(
    job: roost.Cluster, eventually: Callable[..., None]
) -> None:
    mine = job.reserve({0: [1]})
    with Driver() as attached:
        assert attached("import roost\nresult = roost.Cluster().reserve({0: [0, 1]}, timeout_s=60)") != mine
        assert ray.get(job.managers.held.remote()) == {(0, 0): 1, (0, 1): 2}
        attached.kill()

    def next_sees_it_free() -> bool:
        job.release(job.reserve({1: [0]}, timeout_s=60))
        return bool(ray.get(job.managers.held.remote()) == {(0, 1): 1})

    eventually(next_sees_it_free, 60)


def _hang(resource: str) -> str:
    time.sleep(600)
    return ""


def test_a_reservation_whose_probe_does_not_answer_is_given_back(
    job: roost.Cluster,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
    free_gpus: Callable[[], float],
) -> None:
    ledger = reserve.Ledger([job.get_node_info(rank) for rank in range(4)], "test")
    with monkeypatch.context() as patch:
        patch.setattr(reserve, "_which_accelerator", _hang)
        patch.setattr(reserve, "PROBE_S", 1.0)
        with pytest.raises(
            roost.ReservationError, match=r"node 1 \(127\.0\.0\.3\): the task that reports which GPU"
        ) as caught:
            ledger.reserve({0: ALL, 1: [2]}, {3: 1.0}, 30)
    assert set(caught.value.codes) == {"R206"}
    assert ledger.held() == {}
    eventually(lambda: free_gpus() == 16 and ray.available_resources()["CPU"] == 8)
    ledger.release(ledger.reserve({1: [2]}, {}, 30))  # and is not said to be held by another Ray job


def test_a_turn_that_was_lost_while_reserving_is_tried_again(
    job: roost.Cluster, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None], free_gpus: Callable[[], float]
) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(turn.ReservationTurn, "is_mine", lambda self: next(answers))
    ledger = reserve.Ledger([job.get_node_info(rank) for rank in range(4)], "test")
    token = ledger.reserve({1: [2]}, {}, 30)
    assert next(answers, None) is None
    eventually(lambda: free_gpus() == 15)
    ledger.release(token)

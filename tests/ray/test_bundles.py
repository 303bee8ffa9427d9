"""``reserve_bundles``: one accelerator per bundle, in the same order on every run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import roost
from roost.cluster import bundles as module
from roost.cluster import reserve
from roost.testing import LocalRay


@pytest.fixture(scope="module")
def job(four_nodes: LocalRay) -> Iterator[roost.Cluster]:
    with roost.Cluster(num_nodes=4) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def all_free(job: roost.Cluster, eventually: Callable[..., None], free_gpus: Callable[[], float]) -> Iterator[None]:
    eventually(lambda: free_gpus() == 16)
    yield
    eventually(lambda: free_gpus() == 16)


@ray.remote(num_cpus=0, num_gpus=1, max_calls=0)
def where() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]


def test_the_order_is_the_clusters_and_the_same_on_every_run(
    job: roost.Cluster, eventually: Callable[..., None], free_gpus: Callable[[], float]
) -> None:
    for _ in range(4):
        eventually(lambda: free_gpus() == 16)  # Ray shows what was given back a moment later
        bundles = job.reserve_bundles(10, cpus=0)
        try:
            assert bundles.node_ranks == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2)
            assert bundles.accelerator_ids == (*("0", "1", "2", "3") * 2, "0", "1")
            assert sorted(bundles.bundle_indices) == list(range(10))
        finally:
            bundles.release()


def test_a_bundle_is_where_it_says(job: roost.Cluster, free_gpus: Callable[[], float]) -> None:
    bundles = job.reserve_bundles(6, cpus=0)
    try:
        for index, node, accelerator in zip(
            bundles.bundle_indices, bundles.node_ranks, bundles.accelerator_ids, strict=True
        ):
            strategy = PlacementGroupSchedulingStrategy(bundles.placement_group, placement_group_bundle_index=index)
            found = ray.get(where.options(scheduling_strategy=strategy).remote(), timeout=30)
            assert found == (job.get_node_info(node).ray_id, accelerator)
        assert free_gpus() == 10
    finally:
        bundles.release()


def test_what_others_hold_is_passed_over(job: roost.Cluster) -> None:
    taken = placement_group([{"GPU": 3, f"node:{job.get_node_ip(0)}": 0.001}])
    try:
        assert taken.wait(60)
        bundles = job.reserve_bundles(3, cpus=0)
        assert bundles.node_ranks == (0, 1, 1)
        bundles.release()
    finally:
        remove_placement_group(taken)


def test_more_than_there_are_is_refused_at_once(job: roost.Cluster) -> None:
    started = time.monotonic()
    with pytest.raises(roost.ReservationError, match="17 bundles cannot be reserved: 16 accelerators are registered"):
        job.reserve_bundles(17, cpus=0, timeout_s=60)
    assert time.monotonic() - started < 30


def test_cpus_that_starve_bundles_while_accelerators_are_free_are_named(job: roost.Cluster) -> None:
    started = time.monotonic()
    with pytest.raises(roost.ReservationError) as caught:
        job.reserve_bundles(12, timeout_s=0.5)
    assert time.monotonic() - started < 30
    text = str(caught.value)
    for rank in range(4):
        assert f"node {rank}: 4 of 4 accelerators free, 2 of 2 CPUs" in text
    assert "a bundle is one accelerator and 1 CPUs" in text
    assert "reserve_bundles(n, cpus=0)" in text


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_number_that_is_none_is_refused(job: roost.Cluster, count: int) -> None:
    with pytest.raises(roost.ClusterError, match="number of bundles"):
        job.reserve_bundles(count)


def test_bundles_whose_probe_does_not_answer_are_given_back(
    job: roost.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(resource: str) -> str:
        time.sleep(600)
        return ""

    with monkeypatch.context() as patch:
        patch.setattr(reserve, "_which_accelerator", hang)
        patch.setattr(reserve, "PROBE_S", 1.0)
        with pytest.raises(roost.ReservationError, match=r"node 0 \(127\.0\.0\.2\): the task that reports which GPU"):
            job.reserve_bundles(2, cpus=0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GetTimeoutError("Ray's GCS does not answer")])
def test_bundles_are_given_back_where_the_end_of_the_turn_fails(
    job: roost.Cluster,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
    free_gpus: Callable[[], float],
    error: BaseException,
) -> None:
    @contextmanager
    def turn(deadline: float) -> Iterator[None]:
        yield
        eventually(lambda: free_gpus() == 14)
        raise error

    monkeypatch.setattr(module, "reservation_turn", turn)
    expected = roost.ReservationError if isinstance(error, RayError) else type(error)
    with pytest.raises(expected) as caught:
        job.reserve_bundles(2, cpus=0)
    if isinstance(caught.value, roost.ReservationError):
        assert caught.value.codes == ("R206",)
        assert "Ray failed while 2 bundles were reserved: Ray's GCS does not answer" in str(caught.value)

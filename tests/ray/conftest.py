"""One many-node Ray for all tests here: starting it is what costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import ray

import roost
from roost.testing import LocalRay, local_ray


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes on a loaded machine are sometimes late: a test here may fail once, and is then listed."""
    for item in items:
        if "/ray/" in str(item.path):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))


@pytest.fixture(scope="session")
def four_nodes() -> Iterator[LocalRay]:
    """Four nodes of four made-up GPUs; nodes after the head joined in a shuffled order."""
    with local_ray("4x4", cpus=2, shuffle=7) as cluster:
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def _no_connection_is_left() -> Iterator[None]:
    """Fail where a file leaves this process connected to a Ray: ``ray.init`` would raise in the next file.

    Ray's state functions, such as ``ray.available_resources``, connect a process that is not connected.
    """
    yield
    if ray.is_initialized():
        ray.shutdown()
        pytest.fail(
            "a test of this file left the process connected to Ray; call ray.init and ray.shutdown in a fixture"
        )


@pytest.fixture
def cluster(four_nodes: LocalRay) -> Iterator[roost.Cluster]:
    """A job on all four nodes, closed after the test."""
    with roost.Cluster(num_nodes=4) as job:
        yield job


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits until something holds: Ray gives resources back a moment after it is told to."""

    def wait(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come to hold"
            time.sleep(0.05)

    return wait


@pytest.fixture
def free_gpus() -> Callable[[], float]:
    """How many GPUs Ray counts as free."""
    return lambda: float(ray.available_resources().get("GPU", 0.0))

"""Nodes with NVIDIA GPUs under a real Ray: attestation, a GPU that is lost, a driver that fails.

There is no NVIDIA GPU here: the driver libraries are stand-ins in C, and all else is real. ``tests/gpu`` has the same on
a real GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
from nvidia_driver import LOST, NvidiaDriver

import roost
from roost.cluster.connect import alive_nodes
from roost.cluster.doctor import examine
from roost.cluster.nodes import measure_nodes, order_nodes
from roost.testing import local_ray


class Forking(roost.Worker):
    def pid(self) -> int:
        return os.getpid()

    def cuda_in_a_child(self) -> int:
        """What cuInit returns in a forked child."""
        child = os.fork()
        if child == 0:
            os._exit(ctypes.CDLL("libcuda.so.1").cuInit(0))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NvidiaDriver]:
    """A Ray of one node whose two GPUs are those of the stand-in."""
    made = NvidiaDriver(tmp_path_factory.mktemp("driver"))
    made.set_gpus([0, 0])
    with local_ray("1x2", env_vars={0: {**made.environment(), "ROOST_MADE_UP_ACCELERATORS": ""}}):
        yield made


@pytest.fixture
def cluster(driver: NvidiaDriver) -> Iterator[roost.Cluster]:
    driver.set_gpus([0, 0])
    driver.set_cuda(0)
    with roost.Cluster(num_nodes=1) as job:
        yield job


def test_an_attested_worker_can_fork_and_use_cuda(cluster: roost.Cluster, driver: NvidiaDriver) -> None:
    assert cluster.get_node_info(0).accelerators_are_real
    with Forking.create_group().launch(cluster, roost.PackedPlacementStrategy(1, 1)) as group:
        assert group.binding is not None
        assert group.binding.attestations[0].uuids == (driver.uuid(1),)
        assert group.pid().wait()[0] not in driver.processes_with_cuda()
        assert group.cuda_in_a_child().wait() == [0]


def test_a_lost_gpu_is_named_and_the_others_are_used(cluster: roost.Cluster, driver: NvidiaDriver) -> None:
    driver.set_gpus([0, LOST])
    cluster._nodes[:] = order_nodes(measure_nodes(alive_nodes(), 60.0))
    wrong = {check.question: check.finding for check in examine(cluster._nodes) if not check.is_well}
    assert wrong["GPU 1"] == "GPU is lost"
    with pytest.raises(roost.LaunchError) as caught:
        Forking.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 1))
    assert caught.value.codes == ("W114",)
    assert "GPU 1 cannot be used: GPU is lost" in str(caught.value)
    with Forking.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 0)) as group:
        assert group.binding is not None
        assert group.binding.uuids == ((driver.uuid(0),),)


def test_a_gpu_that_is_lost_later_is_found_at_launch(cluster: roost.Cluster, driver: NvidiaDriver) -> None:
    driver.set_gpus([0, LOST])
    with pytest.raises(roost.AttestationError) as caught:
        Forking.create_group().launch(cluster, roost.PackedPlacementStrategy(1, 1))
    assert f"accelerators ('{driver.uuid(1)}',)" in str(caught.value)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_worker_without_gpus_of_its_own_starts_beside_a_lost_one(
    cluster: roost.Cluster, driver: NvidiaDriver, is_known: bool
) -> None:
    driver.set_gpus([0, LOST])
    if is_known:
        cluster._nodes[:] = order_nodes(measure_nodes(alive_nodes(), 60.0))
    assert [bool(device.fault) for device in cluster.get_node_info(0).accelerators] == [False, is_known]
    with Forking.create_group().launch(cluster, roost.NodePlacementStrategy([0])) as group:
        assert group.binding is not None
        assert [(found.visible, found.uuids) for found in group.binding.attestations] == [("0,1", None)]


def test_a_driver_that_fails_in_a_worker_is_named(cluster: roost.Cluster, driver: NvidiaDriver) -> None:
    driver.set_cuda(999)
    with pytest.raises(roost.AttestationError) as caught:
        Forking.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 0))
    assert "cuInit returned 999 (CUDA_ERROR_UNKNOWN)" in str(caught.value)

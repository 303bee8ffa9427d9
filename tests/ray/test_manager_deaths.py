"""The managers' process is killed: every operation that needs them says so, and nothing else stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import ray
from processes import ray_state, wait_for

import roost
from roost.cluster import NodeManager, managers
from roost.cluster.plans import live_plan
from roost.testing import LocalRay


@pytest.fixture(scope="module", autouse=True)
def connection(four_nodes: LocalRay) -> Iterator[None]:
    ray.init(namespace="tests", logging_level="warning")
    yield
    ray.shutdown()


class Adder(roost.Worker):
    def add(self, one: int, other: int) -> int:
        return one + other


def kill_managers(cluster: roost.Cluster) -> None:
    pid = ray.get(cluster.managers.__ray_call__.remote(lambda managers: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "roost.managers" not in [name for _, name in ray_state()[1]], "Ray's noticing it")


def test_dead_managers_are_named_and_workers_go_on(four_nodes: LocalRay) -> None:
    before = ray_state()
    cluster = roost.Cluster(num_nodes=4)
    group = Adder.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 0), name="adders")
    kill_managers(cluster)
    where = rf"the job's managers on node 0 \({four_nodes.node_address(0)}\) have died: "
    try:
        for call, method in (
            (lambda: Adder.create_group().launch(cluster, name="others"), "register_group"),
            (lambda: cluster.reserve({1: [0]}), "reserve"),
            (lambda: roost.WorkerGroup.attach("adders", cluster), "get_groups"),
            (lambda: live_plan(cluster.managers), "get_plans"),
        ):
            with pytest.raises(roost.ClusterError, match=rf"{where}{method}\(\) was not done") as caught:
                call()
            assert caught.value.codes == ("R150",)
            text = str(caught.value)
            assert "Traceback" not in text
            assert "cluster.close(), then Cluster(…)" in text
            assert f"ray logs actor --id {cluster.managers._actor_id.hex()}" in text
        with pytest.raises(roost.ClusterError, match=r"managers .*have died"):  # Ray may still find the dead actor
            NodeManager.get_proxy().get_nodes()
        assert group.add(2, 3).wait() == [5], "workers go on"
    finally:
        cluster.close()
    wait_for(lambda: ray_state() == before, "as it was before")
    with roost.Cluster(num_nodes=4) as again:
        assert again.num_nodes == 4


class Stillborn:
    """Managers whose process ends before they can answer."""

    def __init__(self, *arguments: object) -> None:
        os._exit(1)

    def owner(self) -> None:
        """It is asked for at the start."""


def test_managers_that_die_at_their_start_are_named(four_nodes: LocalRay, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ray_state()
    with monkeypatch.context() as patch:
        patch.setattr(managers, "_Managers", Stillborn)
        where = rf"the job's managers on node 0 \({four_nodes.node_address(0)}\) have died: "
        with pytest.raises(roost.ClusterError, match=rf"{where}owner\(\) was not done") as caught:
            roost.Cluster(num_nodes=4)
        assert caught.value.codes == ("R150",)
    wait_for(lambda: ray_state() == before, "as it was before")
    with roost.Cluster(num_nodes=4) as again:
        assert again.num_nodes == 4

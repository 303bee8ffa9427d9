"""``Cluster``: found, joined, attached to, and closed without a trace."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray_drivers import Driver, DriverError

import roost
from roost.cluster.managers import MANAGERS
from roost.testing import LocalRay

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file


@pytest.fixture(scope="module", autouse=True)
def connection(four_nodes: LocalRay) -> Iterator[None]:
    """Ray is joined before Roost is: worker processes are then kept from one test to the next."""
    ray.init(namespace="before", logging_level="warning")
    yield
    ray.shutdown()


@pytest.fixture
def job() -> Iterator[roost.Cluster]:
    with roost.Cluster(num_nodes=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def other(four_nodes: LocalRay) -> Iterator[Driver]:
    """Another process of this machine."""
    with Driver() as driver:
        driver("import ray, roost")
        yield driver


def managers() -> set[str]:
    """Namespaces in which managers run."""
    entries = ray.util.list_named_actors(all_namespaces=True)
    return {entry["namespace"] for entry in entries if entry["name"] == MANAGERS}


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Probe:
    """Tells where it is, and what it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = (args, kwargs)

    def tell(self, variables: list[str]) -> dict[str, Any]:
        return {
            "given": self.given,
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "variables": [os.environ.get(name) for name in variables],
        }

    def master(self) -> tuple[str, int]:
        proxy = roost.NodeManager.get_proxy()
        return proxy.get_master_ip(), proxy.get_master_port()


# What there is --------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "nodes"), [(1, 1), (2, 2), (4, 4), (0, 4)])
def test_a_cluster_has_the_nodes_that_were_asked_for(asked: int, nodes: int, capfd: pytest.CaptureFixture[str]) -> None:
    with roost.Cluster(num_nodes=asked) as cluster:
        assert cluster.num_nodes == nodes
        assert cluster.num_accelerators == 4 * nodes
        assert cluster.master_ip == "127.0.0.2"
        assert [cluster.get_node_ip(rank) for rank in range(nodes)] == [f"127.0.0.{2 + rank}" for rank in range(nodes)]
        assert cluster.topology.num_nodes == nodes
        assert [len(node.accelerator_ids) for node in cluster.topology.nodes] == [4] * nodes
        assert not cluster.is_attached
        assert len(roost.NodeManager.get_proxy().get_nodes()) == nodes
    assert capfd.readouterr().out == ""


def test_node_facts_are_measured(job: roost.Cluster) -> None:
    for rank in range(4):
        info = job.get_node_info(rank)
        assert isinstance(info, roost.NodeInfo)
        assert info.rank == rank
        assert info.name == platform.node()
        assert info.is_head == (rank == 0)
        assert info.cpus == info.num_cpus == 2
        assert info.memory_gib > 0.5
        assert [device.id for device in info.accelerators] == ["0", "1", "2", "3"]
        assert info.num_accelerators == info.num_gpus == 4
        assert not info.accelerators_are_real
        assert os.path.exists(info.interpreter)
        assert info.python_version == platform.python_version()
        assert info.ray_version == ray.__version__
        assert abs(info.clock_s) < 60
    assert len({job.get_node_info(rank).ray_id for rank in range(4)}) == 4


@pytest.mark.parametrize("rank", [4, -1, "0", None])
def test_a_node_that_is_not_there_is_refused(job: roost.Cluster, rank: Any) -> None:
    with pytest.raises(roost.ClusterError, match=rf"there is no node {rank}: nodes are 0-3"):
        job.get_node_info(rank)
    with pytest.raises(roost.ClusterError, match=rf"there is no node {rank}: nodes are 0-3"):
        job.get_node_ip(rank)


def test_a_job_section_gives_nodes_and_groups() -> None:
    section = {"num_nodes": 3, "node_groups": [{"label": "train", "node_ranks": "1-2"}]}
    with roost.Cluster(cluster_cfg=section) as cluster:
        assert cluster.num_nodes == 3
        assert cluster.get_node_group("train").node_ranks == (1, 2)
        assert cluster.get_node_group().node_ranks == (0, 1, 2)
        assert roost.NodeManager.get_proxy().get_node_group("train").node_ranks == (1, 2)
        with pytest.raises(roost.RoostError, match="rollout"):
            cluster.get_node_group("rollout")
        assert roost.Cluster(cluster_cfg=section) is cluster
        with pytest.raises(roost.ClusterError, match="has a cluster already"):
            roost.Cluster(cluster_cfg={"num_nodes": 3, "node_groups": [{"label": "train", "node_ranks": "0-1"}]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": -1}, "num_nodes is a whole number"),
        ({"num_nodes": True}, "num_nodes is a whole number"),
        ({"num_nodes": "2"}, "num_nodes is a whole number"),
        ({"num_nodes": 1, "node_order": "speed"}, "node_order is"),
        ({"num_nodes": 4, "node_order": "label:rack"}, "no label 'rack'"),
        ({"cluster_cfg": {"num_nodes": "many"}}, "num_nodes"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(roost.RoostError, match=message):
        roost.Cluster(**arguments)
    assert "roost" not in managers()
    with roost.Cluster(num_nodes=1) as cluster:  # it left nothing behind
        assert cluster.num_nodes == 1


# One per process ------------------------------------------------------------------------------


def test_there_is_one_cluster_per_process() -> None:
    with roost.Cluster(num_nodes=2) as cluster:
        assert roost.Cluster(num_nodes=2) is cluster
        assert roost.Cluster() is cluster
        for arguments in ({"num_nodes": 1}, {"num_nodes": 2, "namespace": "other"}, {"namespace": "other"}):
            with pytest.raises(roost.ClusterError, match=r"has a cluster already \(2 nodes, namespace 'roost'"):
                roost.Cluster(**arguments)  # type: ignore[arg-type]
        cluster.close()
        cluster.close()
        with roost.Cluster(num_nodes=1) as another:
            assert another is not cluster
            cluster.close()  # closes nothing of the other's
            assert roost.Cluster(num_nodes=1) is another


def test_a_cluster_whose_ray_was_shut_down_is_not_given_out_again(other: Driver) -> None:
    other("roost.Cluster(num_nodes=1, namespace='once')\nray.shutdown()")
    assert other("cluster = roost.Cluster(num_nodes=2, namespace='again')\nresult = cluster.num_nodes") == 2
    assert other("cluster.close()\nresult = ray.is_initialized()") is False


# Names and other processes --------------------------------------------------------------------


def test_another_process_attaches_and_leaves_the_job_alone(job: roost.Cluster, other: Driver) -> None:
    found = other(
        """
with roost.Cluster() as cluster:
    proxy = roost.NodeManager.get_proxy()
    roost.CollectiveManager.get_proxy().register("theirs", "127.0.0.3", 23456, 8)
    result = {
        "is_attached": cluster.is_attached,
        "ips": [cluster.get_node_ip(rank) for rank in range(cluster.num_nodes)],
        "ray ids": [cluster.get_node_info(rank).ray_id for rank in range(cluster.num_nodes)],
        "gpus": cluster.num_accelerators,
        "master": [cluster.master_ip, cluster.master_port],
        "proxy": [proxy.get_master_ip(), proxy.get_master_port()],
        "per node": proxy.get_num_gpus_per_node(),
        "groups": roost.WorkerManager.get_proxy().get_groups(),
        "same": roost.Cluster() is cluster,
    }
result["connected after"] = ray.is_initialized()
"""
    )
    assert found == {
        "is_attached": True,
        "ips": [f"127.0.0.{2 + rank}" for rank in range(4)],
        "ray ids": [job.get_node_info(rank).ray_id for rank in range(4)],
        "gpus": 16,
        "master": [job.master_ip, job.master_port],
        "proxy": [job.master_ip, job.master_port],
        "per node": 4,
        "groups": {},
        "same": True,
        "connected after": False,
    }
    collectives = roost.CollectiveManager.get_proxy()  # the job is there as before
    assert collectives.get("theirs") == {"address": "127.0.0.3", "port": 23456, "world_size": 8}
    collectives.remove("theirs")
    assert collectives.get_all() == {}


def test_a_process_of_this_machine_finds_the_job_without_being_told_where(job: roost.Cluster) -> None:
    with Driver(RAY_ADDRESS=None) as lost:
        assert lost("import ray, roost\nresult = roost.Cluster().master_port") == job.master_port
        assert lost("roost.Cluster().close()\nresult = ray.is_initialized()") is False


@pytest.mark.parametrize("address", [None, "local"])
def test_attaching_where_no_job_runs_says_so_and_starts_nothing(four_nodes: LocalRay, address: str | None) -> None:
    with Driver(RAY_ADDRESS=address, ROOST_NAMESPACE="nowhere") as lost:
        with pytest.raises(DriverError, match=r"ClusterError: .*no Roost job runs in the namespace 'nowhere'"):
            lost("import ray, roost\nroost.Cluster()")
        assert lost("result = ray.is_initialized()") is False


def test_attaching_to_a_ray_without_a_job_says_so(other: Driver) -> None:
    with pytest.raises(roost.ClusterError, match="no Roost job runs in the namespace 'roost'"):
        roost.Cluster()
    assert ray.is_initialized()
    with pytest.raises(roost.ClusterError, match="no Roost job runs"):
        roost.NodeManager.get_proxy()
    with pytest.raises(DriverError, match="no Roost job runs in the namespace 'roost'"):
        other("roost.Cluster()")
    assert other("result = ray.is_initialized()") is False


def test_a_name_that_is_taken_says_who_has_it(job: roost.Cluster, other: Driver) -> None:
    started = time.monotonic()
    with pytest.raises(DriverError) as caught:
        other("roost.Cluster(num_nodes=1)")
    assert time.monotonic() - started < 200
    text = str(caught.value)
    assert "the namespace 'roost' on this Ray is held by" in text
    assert f"{getpass.getuser()} on {platform.node()} (process {os.getpid()}) since 20" in text
    assert "ROOST_NAMESPACE=mine" in text
    assert "Cluster()" in text
    assert roost.NodeManager.get_proxy().get_master_port() == job.master_port
    assert other("result = ray.is_initialized()") is False


def test_two_jobs_under_two_names_are_two(job: roost.Cluster, other: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    found = other(
        """
import os
os.environ["ROOST_NAMESPACE"] = "second"
cluster = roost.Cluster(num_nodes=2)
result = [cluster.namespace, cluster.num_nodes, cluster.master_port, roost.NodeManager.get_proxy().get_master_port()]
"""
    )
    try:
        assert found[:2] == ["second", 2]
        assert found[2] == found[3] != job.master_port
        assert managers() == {"roost", "second"}
        assert roost.NodeManager.get_proxy("second").get_master_port() == found[2]
        assert roost.NodeManager.get_proxy().get_master_port() == job.master_port
    finally:
        other("cluster.close()\ndel os.environ['ROOST_NAMESPACE']")
    assert managers() == {"roost"}


def test_the_argument_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_NAMESPACE", "by-variable")
    with roost.Cluster(num_nodes=1) as cluster:
        assert cluster.namespace == "by-variable"
        assert managers() == {"by-variable"}
    with roost.Cluster(num_nodes=1, namespace="by-argument") as cluster:
        assert cluster.namespace == "by-argument"
        assert managers() == {"by-argument"}
        # Every process of the job finds its managers without being told the name again.
        assert roost.NodeManager.get_proxy().get_master_port() == cluster.master_port
        probe = cluster.allocate(Probe, "probe", 0, 0, {})
        assert ray.get(probe.master.remote(), timeout=30) == (cluster.master_ip, cluster.master_port)


# Waiting for nodes ----------------------------------------------------------------------------


def test_waiting_for_nodes_ends_with_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    with pytest.raises(roost.ClusterError) as caught:
        roost.Cluster(num_nodes=6, timeout_s=0.7)
    assert 0.6 < time.monotonic() - started < 200
    text = str(caught.value)
    assert "6 nodes are needed, 4 registered within 0.7 s, 2 nodes are missing" in text
    assert "registered: 127.0.0.2, 127.0.0.3, 127.0.0.4, 127.0.0.5" in text
    assert re.search(r"ray start --address=127\.0\.0\.2:\d+", text)

    monkeypatch.setenv("ROOST_NODE_TIMEOUT_S", "0.3")
    with pytest.raises(roost.ClusterError, match=r"5 nodes are needed, 4 registered within 0\.3 s"):
        roost.Cluster(num_nodes=5)
    monkeypatch.setenv("ROOST_NODE_TIMEOUT_S", "soon")
    with pytest.raises(roost.ClusterError, match="ROOST_NODE_TIMEOUT_S is a number of seconds, not 'soon'"):
        roost.Cluster(num_nodes=5)
    assert ray.is_initialized()
    assert managers() == set()


# Ray before, and Ray of one's own -------------------------------------------------------------


class Mine:
    def ping(self) -> str:
        return "pong"


def test_a_ray_that_was_joined_before_is_left_alone() -> None:
    mine = ray.remote(Mine).options(name="mine", num_cpus=0).remote()
    connection = ray.get_runtime_context().get_worker_id()
    with roost.Cluster(num_nodes=2):
        assert ray.get_runtime_context().namespace == "before"
    assert ray.is_initialized()
    assert ray.get_runtime_context().get_worker_id() == connection
    found = ray.get_actor("mine")
    assert ray.get(found.ping.remote(), timeout=30) == "pong"
    ray.kill(mine)


def test_a_ray_that_nobody_asked_for_is_not_joined(four_nodes: LocalRay) -> None:
    with Driver(RAY_ADDRESS=None) as alone:
        found = alone(
            """
import ray, roost
cluster = roost.Cluster(num_nodes=1, namespace="alone")
result = [cluster.num_nodes, ray.get_runtime_context().gcs_address, len(ray.nodes())]
"""
        )
        assert found[0] == found[2] == 1
        assert found[1] != four_nodes.address
        assert "alone" not in managers()
        assert alone("cluster.close()\nresult = ray.is_initialized()") is False


def test_a_ray_that_does_not_answer_is_an_error(other: Driver) -> None:
    with roost.lease_ports() as lease:
        started = time.monotonic()
        with pytest.raises(DriverError, match=rf"cannot join the Ray at 127\.0\.0\.1:{lease.port}"):
            other(f"roost.Cluster(num_nodes=1, address='127.0.0.1:{lease.port}')")
        assert time.monotonic() - started < 200
        assert other("result = ray.is_initialized()") is False


# Ports, managers, allocate --------------------------------------------------------------------


def test_the_master_port_is_held(job: roost.Cluster) -> None:
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("", job.master_port))
    with socket.create_server((job.master_ip, job.master_port)) as server:  # it is for one's own server
        assert server.getsockname()[1] == job.master_port
    port = job.master_port
    job.close()
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as stranger:
            try:
                stranger.bind(("", port))
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_managers_answer_as_soon_as_the_cluster_is_there(job: roost.Cluster) -> None:
    nodes = roost.NodeManager.get_proxy()
    assert nodes.get_nodes() == [job.get_node_info(rank) for rank in range(4)]
    assert (nodes.get_master_ip(), nodes.get_master_port()) == (job.master_ip, job.master_port)
    assert nodes.get_num_gpus_per_node() == 4
    assert nodes.get_topology() == job.topology
    workers = roost.WorkerManager.get_proxy()
    assert workers.get_groups() == {}
    assert workers.get_group("none") is None
    assert workers.get_worker("none", 0) is None
    assert roost.CollectiveManager.get_proxy().get("none") is None
    found = ray.util.list_named_actors(all_namespaces=True)
    assert {"name": MANAGERS, "namespace": "roost"} in found


def test_allocate_starts_one_actor_where_it_was_told(job: roost.Cluster) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "3", "RANK": 7, "GREETING": "hello = world"}
    handle = job.allocate(Probe, "probe:7", 2, 3, variables, cls_args=[1, "two"], cls_kwargs={"three": 3})
    names = [*variables, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]
    found = ray.get(handle.tell.remote(names), timeout=60)
    assert found["given"] == ((1, "two"), {"three": 3})
    assert found["node"] == job.get_node_info(2).ray_id
    assert found["variables"] == ["3", "7", "hello = world", "1"]
    by_name = ray.get_actor("probe:7", namespace=job.namespace)
    assert ray.get(by_name.tell.remote([]), timeout=30)["pid"] == found["pid"]


@pytest.mark.parametrize(
    ("node_id", "gpu_id", "message"),
    [
        (4, 0, "there is no node 4: nodes are 0-3"),
        (-1, 0, "there is no node -1"),
        (0, 4, "node 0 has 4 GPUs, and no 4"),
        (3, -1, "node 3 has 4 GPUs, and no -1"),
        (0, "0", "node 0 has 4 GPUs, and no 0"),
    ],
)
def test_allocate_refuses_what_is_not_there(job: roost.Cluster, node_id: Any, gpu_id: Any, message: str) -> None:
    with pytest.raises(roost.ClusterError, match=message):
        job.allocate(Probe, "probe", node_id, gpu_id, {})


class Member(roost.Worker):
    def pid(self) -> int:
        return os.getpid()


# The end --------------------------------------------------------------------------------------


def test_closing_ends_everything(eventually: Callable[..., None], free_gpus: Callable[[], float]) -> None:
    eventually(lambda: free_gpus() == 16)
    with roost.Cluster(num_nodes=2) as cluster:
        handle = cluster.allocate(Probe, "probe", 1, 0, {})
        pid = ray.get(handle.tell.remote([]), timeout=60)["pid"]
        group = Member.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 1))
        pids = group.pid().wait(60)
        cluster.reserve({1: [0]})
        eventually(lambda: free_gpus() == 13)
    assert managers() == set()
    eventually(lambda: not any(map(is_alive, [pid, *pids])))
    eventually(lambda: free_gpus() == 16 and ray.available_resources()["CPU"] == 8)


def test_the_death_of_the_driver_frees_name_accelerators_and_workers(
    eventually: Callable[..., None], free_gpus: Callable[[], float]
) -> None:
    eventually(lambda: free_gpus() == 16)
    with Driver() as doomed:
        pids = doomed(
            """
import os, ray, roost
class Member(roost.Worker):
    def pid(self):
        return os.getpid()
cluster = roost.Cluster(num_nodes=2, namespace="doomed")
group = Member.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 1))
cluster.reserve({1: [1, 2]}, {1: 1.0})
bundles = cluster.reserve_bundles(1, cpus=0)
result = group.pid().wait(60)
"""
        )
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        assert "doomed" in managers()
        eventually(lambda: free_gpus() == 11)
        doomed.kill()
        eventually(lambda: "doomed" not in managers(), 30)
        eventually(lambda: not any(map(is_alive, pids)), 30)
        eventually(lambda: free_gpus() == 16 and ray.available_resources()["CPU"] == 8, 30)
    with roost.Cluster(num_nodes=1, namespace="doomed", timeout_s=30) as cluster:
        assert cluster.namespace == "doomed"

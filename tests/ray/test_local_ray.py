"""``local_ray``: a many-node Ray on one computer, of which nothing is left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import pytest
import ray

import roost
from roost.testing import local_ray


def mentioning(text: str) -> list[int]:
    """Processes, other than this one, whose command line or environment has a text."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                for part in ("cmdline", "environ"):
                    with open(f"/proc/{name}/{part}", "rb") as file:
                        if text.encode() in file.read():
                            found.append(int(name))
                            break
    return found


def alive() -> dict[str, float]:
    return {node["NodeManagerAddress"]: node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]}


def test_nodes_come_and_go_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.9.8.7:6379")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with local_ray("2x2", cpus=1) as machines:
        folder = os.environ["RAY_TMPDIR"]
        assert os.environ["RAY_ADDRESS"] == machines.address
        assert len(mentioning(folder)) >= 3  # the control store and two raylets
        cluster = roost.Cluster(num_nodes=2)  # joins it; and is not closed here
        assert ray.get_runtime_context().gcs_address == machines.address
        assert [cluster.get_node_ip(rank) for rank in range(2)] == [machines.node_address(rank) for rank in range(2)]
        assert alive() == {"127.0.0.2": 2, "127.0.0.3": 2}

        for rank in (0, 7):
            with pytest.raises(roost.ClusterError, match=rf"no node {rank} to kill"):
                machines.kill_node(rank)
        machines.kill_node(1)
        eventually(lambda: alive() == {"127.0.0.2": 2}, 60)
        with pytest.raises(roost.ClusterError):
            machines.kill_node(1)
        assert machines.add_node(accelerators=3) == 2
        eventually(lambda: alive() == {"127.0.0.2": 2, machines.node_address(2): 3}, 60)
        assert machines.topology.nodes[2].num_accelerators == 3
    assert os.environ["RAY_ADDRESS"] == "10.9.8.7:6379"
    assert "RAY_TMPDIR" not in os.environ
    assert not ray.is_initialized()
    eventually(lambda: mentioning(folder) == [], 60)
    assert not os.path.exists(folder)
    cluster.close()  # a second time does no harm
    with pytest.raises(roost.ClusterError, match="no Roost job runs"):
        roost.NodeManager.get_proxy()


def test_an_error_inside_leaves_nothing_either(eventually: Callable[..., None]) -> None:
    folder = ""
    before = os.environ.get("RAY_ADDRESS")
    with contextlib.suppress(ZeroDivisionError), local_ray("1x1", cpus=1):
        folder = os.environ["RAY_TMPDIR"]
        _ = 1 / 0
    assert folder
    assert os.environ.get("RAY_ADDRESS") == before
    eventually(lambda: mentioning(folder) == [], 60)
    assert not os.path.exists(folder)


def test_machines_that_make_no_sense_are_refused_before_anything_starts() -> None:
    with pytest.raises(roost.RoostError):
        local_ray("two by four")

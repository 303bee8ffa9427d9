"""Robots that find themselves on nodes, and the plugin for users' tests."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

import roost
from roost.hardware import devices
from roost.testing import LocalRay, made_up_topology


def test_registered_types_find_themselves(four_nodes: LocalRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_types", {})

    @roost.register_hardware("Arm")
    @dataclass
    class Arm:
        port: int
        node_rank: int = -1  # which node this is, only the cluster knows

        @classmethod
        def detect(cls) -> list[Arm]:
            address = ray.util.get_node_ip_address()
            return [cls(7000), cls(7001)] if address.endswith(".3") else []

    with roost.Cluster(num_nodes=2) as cluster:
        assert cluster.get_node_info(0).hardware == ()
        assert [item.fields for item in cluster.get_node_info(1).hardware] == [{"port": 7000}, {"port": 7001}]
        job = {
            "cluster": {
                "node_groups": [{"label": "arms", "node_ranks": "0-1", "hardware": {"type": "Arm"}}],
                "component_placement": {"env": {"node_group": "arms", "placement": "0-1"}},
            }
        }
        placements = roost.Plan.resolve(job, cluster).component("env").placements
        assert [(p.cluster_node_rank, p.local_hardware_ranks) for p in placements] == [(1, (0,)), (1, (1,))]


def test_the_plugin_gives_users_a_ray(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["roost.testing.plugin"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\nroost_machines = 1x3\n")
    (tmp_path / "test_it.py").write_text(
        "import roost\n"
        "def test_it(ray_cluster):\n"
        "    with roost.Cluster(num_nodes=0) as cluster:\n"
        "        assert cluster.num_accelerators == 3\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_made_up_topologies_have_what_checks_look_at() -> None:
    topology = made_up_topology("300x8:H100+1x0", nodes_per_rack=100)
    assert topology.nodes[299].address == "10.0.1.44"
    assert topology.nodes[299].labels["rack"] == "rack-2"
    assert topology.nodes[300].accelerator_memory_gib is None
    assert roost.Topology.from_json(topology.to_json()) == topology

"""Nodes of several vendors in one Ray: each worker gets the visible-devices variable of its node's vendor."""

from __future__ import annotations

import os

import roost
from roost.testing import local_ray

VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "MUSA_VISIBLE_DEVICES",
)  # fmt: skip


class Shower(roost.Worker):
    def variables(self) -> dict[str, str]:
        return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def test_each_node_has_its_vendor() -> None:
    """The head's GPU is made up; the others are as on real nodes: Ray's resource, or a variable of the raylet."""
    with local_ray("1x1:amd/MI300X", cpus=1) as machines:
        intel = {"accelerator_type:Intel-GPU-Max-1550": 1}
        machines._cluster.add_node(node_ip_address="127.0.0.3", num_cpus=1, num_gpus=1, resources=intel)
        musa = {"MUSA_VISIBLE_DEVICES": "3"}
        machines._cluster.add_node(node_ip_address="127.0.0.4", num_cpus=1, num_gpus=1, env_vars=musa)
        with roost.Cluster(num_nodes=3) as cluster:
            assert [node.accelerator_type.name for node in cluster.topology.nodes] == ["AMD", "Intel", "MUSA"]
            assert cluster.topology.nodes[1].accelerator_model == "Intel-GPU-Max-1550"
            with Shower.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 2)) as group:
                found = group.variables().wait()
    assert found == [{"HIP_VISIBLE_DEVICES": "0"}, {"ZE_AFFINITY_MASK": "0"}, {"MUSA_VISIBLE_DEVICES": "3"}]

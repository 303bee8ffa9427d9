"""A lock knows real cards by their UUIDs."""

from __future__ import annotations

import os
from dataclasses import replace

import roost


def test_a_lock_knows_the_cards_again() -> None:
    os.environ.pop("RAY_ADDRESS", None)
    with roost.Cluster(num_nodes=1) as cluster:
        plan = roost.Plan.resolve({"cluster": {"component_placement": {"actor": "0"}}}, cluster)
        lock = roost.LockFile.from_json(roost.LockFile.of(plan, cluster).to_json())
        uuids = tuple(device.uuid for device in cluster.get_node_info(0).accelerators)
        assert lock.uuids == (uuids,)
        assert lock.differences(cluster) == []
        other = replace(lock, uuids=(("GPU-of-yesterday", *uuids[1:]),))
        assert [str(line) for line in other.differences(cluster)] == [
            f"node 0: GPU 0: planned GPU-of-yesterday, found {uuids[0]}"
        ]

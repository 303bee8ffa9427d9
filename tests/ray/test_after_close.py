"""After a cluster is closed, or Ray is shut down, nothing of Roost connects this process to a Ray again."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
from processes import wait_for
from rl_parts import Talker, Trainer

import roost
from roost.engines.handles import EngineHandle
from roost.plan import ComponentPlan
from roost.rl.fleet import Fleet
from roost.rl.rollout import RolloutManager
from roost.rl.train import TrainGroup
from roost.testing import LocalRay
from roost.worker import GroupRequest

JOB = {"cluster": {"component_placement": {"rollout": {"placement": 1, "role": "rollout"}}}}
BROADCAST_JOB = {"cluster": {"component_placement": {"actor": "0", "rollout": "4"}}}


class Echo(roost.Worker):
    def say(self, what: str) -> str:
        return what


def refused(call: Callable[[], Any]) -> None:
    """The call is refused, and did not connect this process."""
    with pytest.raises(roost.ClusterError) as caught:
        call()
    assert caught.value.codes == ("R115",)
    assert not ray.is_initialized()


def test_closing_a_cluster_ends_the_threads_of_its_rollout(four_nodes: LocalRay) -> None:
    before = set(threading.enumerate())
    cluster = roost.Cluster(num_nodes=4)
    plan = roost.Plan.resolve(JOB, cluster)
    rollout = RolloutManager(cluster, plan, functools.partial(Talker, delay_s=0.01))
    watchers = [thread for thread in set(threading.enumerate()) - before if thread.name == "rollout-watch"]
    assert [thread.is_alive() for thread in watchers] == [True]
    cluster.close()
    assert [thread.is_alive() for thread in watchers] == [False]
    assert not ray.is_initialized()
    refused(rollout.pause)
    assert rollout.find_dead() == []
    rollout.close()
    cluster.close()
    assert not ray.is_initialized()


def test_nothing_connects_again_after_ray_was_shut_down(four_nodes: LocalRay) -> None:
    with roost.Cluster(num_nodes=4) as cluster:
        group = GroupRequest(Echo).launch(cluster, roost.PackedPlacementStrategy(0, 0), name="echo")
        engine = EngineHandle("echo/0", ComponentPlan("echo", "rollout", ()), (0,), group, 0)
        fleet = Fleet("echo", [engine], None, "", "key")  # type: ignore[arg-type]
        fleet.watch()
        token = cluster.reserve({2: [0]})
        bundles = cluster.reserve_bundles(1, cpus=0)
        result = group.say("hello")
        manager = roost.NodeManager.get_proxy()
        assert manager.get_master_ip() == cluster.master_ip
        ray.shutdown()
        wait_for(lambda: not fleet._watcher.is_alive(), "the thread notices that the connection has ended", 60)
        assert not ray.is_initialized()
        refused(result.wait)
        refused(result.done)
        refused(lambda: list(result.as_completed()))
        refused(lambda: group.say("again"))
        refused(group.states)
        refused(group.stacks)
        refused(lambda: group.call_beside("stacks"))
        refused(lambda: group.open_lanes([0]))
        refused(lambda: roost.WorkerGroup.attach("echo", cluster))
        refused(lambda: GroupRequest(Echo).launch(cluster))
        refused(lambda: cluster.reserve({0: [0]}))
        refused(lambda: cluster.reserve_bundles(1))
        refused(lambda: cluster.allocate(Echo, "echo", 0, 0, {}))
        refused(manager.get_nodes)
        cluster.release(token)
        bundles.release()
        engine.end_members()
        group.close()
        fleet.close()
        assert not ray.is_initialized()
    assert not ray.is_initialized()


@pytest.mark.parametrize("ending", ["close", "shutdown"])
def test_an_update_by_broadcast_does_not_connect_again(four_nodes: LocalRay, ending: str) -> None:
    cluster = roost.Cluster(num_nodes=4)
    plan = roost.Plan.resolve(BROADCAST_JOB, cluster)
    rollout = RolloutManager(cluster, plan, Talker, router=None)
    train = TrainGroup(cluster, Trainer, plan)
    train.init()
    train.connect(rollout)
    assert "broadcast" in train.update_weights().bytes_by_transport
    folder = rollout._weights_folder.path()
    if ending == "close":
        cluster.close()
    else:
        ray.shutdown()
        refused(train.update_weights)
        rollout.close()
    assert not ray.is_initialized()
    assert not os.path.exists(folder), "close() goes on after what it cannot do any more"
    refused(train.update_weights)
    rollout.close()
    cluster.close()
    assert not ray.is_initialized()


def test_a_new_cluster_after_ray_was_shut_down_closes_the_one_before(four_nodes: LocalRay) -> None:
    closed = []
    first = roost.Cluster(num_nodes=4)
    first.on_close(lambda: closed.append("first"))
    first.on_close(lambda: closed.append("second"))
    first.on_close(lambda: closed.append("never"))()
    ray.shutdown()
    with roost.Cluster(num_nodes=4) as cluster:
        assert closed == ["second", "first"]
        assert cluster is not first
        with pytest.raises(roost.ClusterError, match="the cluster was closed"):
            first.check_open()
        first.close()
        assert cluster.is_open

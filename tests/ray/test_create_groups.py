"""``create_placement_groups``: one reservation for all roles, the same accelerators on every run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import roost
from roost.rl.placement_groups import RoleBundles
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


@pytest.fixture
def create(job: roost.Cluster) -> Iterator[Callable[..., dict[str, Any]]]:
    """Creates groups on the job's cluster, and removes them after the test."""
    made: list[PlacementGroup] = []

    def call(order: str = "cluster", **numbers: Any) -> dict[str, Any]:
        groups = roost.create_placement_groups(Namespace(**numbers), job, order=order, cpus=0)
        made.append(groups["actor"].placement_group)
        return groups

    yield call
    for group in made:
        remove_placement_group(group)


def test_disaggregated_roles_follow_each_other_in_one_group(create: Callable[..., Any]) -> None:
    groups = create(actor_num_nodes=2, actor_num_gpus_per_node=4, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    group, indices, ids = groups["actor"]
    assert ids == [0, 1, 2, 3] * 2
    assert groups["rollout"].gpu_ids == [0, 1, 2, 3]
    assert groups["rollout"].placement_group is group
    assert sorted(indices + groups["rollout"].bundle_indices) == list(range(12))
    assert groups["critic"] is None


def test_colocated_roles_have_the_same_bundles(create: Callable[..., Any]) -> None:
    groups = create(actor_num_nodes=1, actor_num_gpus_per_node=6, colocate=True, use_critic=True)
    assert groups["actor"].gpu_ids == [0, 1, 2, 3, 0, 1]
    assert groups["actor"] == groups["rollout"] == groups["critic"]
    assert isinstance(groups["critic"], RoleBundles)


def test_the_actor_has_the_first_ones_where_engines_go_on(create: Callable[..., Any]) -> None:
    groups = create(actor_num_nodes=1, actor_num_gpus_per_node=4, rollout_num_gpus=8, colocate=True)
    assert groups["actor"].bundle_indices == groups["rollout"].bundle_indices[:4]
    assert len(groups["rollout"].bundle_indices) == 8


def test_a_debug_switch_leaves_a_role_out(create: Callable[..., Any], free_gpus: Callable[[], float]) -> None:
    numbers = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 2}
    train = create(**numbers, debug_train_only=True)
    assert (len(train["actor"].bundle_indices), train["rollout"].bundle_indices) == (4, [])
    rollout = create(**numbers, debug_rollout_only=True)
    assert (rollout["actor"].bundle_indices, len(rollout["rollout"].bundle_indices)) == ([], 2)
    external = create(**numbers, rollout_external=True)
    assert (len(external["actor"].bundle_indices), external["rollout"].bundle_indices) == (4, [])


def test_the_same_on_every_run(
    create: Callable[..., Any], eventually: Callable[..., None], free_gpus: Callable[[], float]
) -> None:
    found = []
    for _ in range(3):
        groups = create(actor_num_nodes=1, actor_num_gpus_per_node=3, rollout_num_gpus=3)
        where = {
            role: [placed(groups[role], i, 1.0) for i in range(len(groups[role].bundle_indices))]
            for role in ("actor", "rollout")
        }
        found.append(where)
        remove_placement_group(groups["actor"].placement_group)
        eventually(lambda: free_gpus() == 16)
    assert found[0] == found[1] == found[2]
    assert [gpu for _, gpu in found[0]["actor"]] == ["0", "1", "2"]
    assert [gpu for _, gpu in found[0]["rollout"]] == ["3", "0", "1"]


@ray.remote(num_cpus=0)
class Role:
    def where(self) -> tuple[str, str]:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]


def strategy(bundles: RoleBundles, index: int) -> PlacementGroupSchedulingStrategy:
    group, indices, _ = bundles
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=indices[index])


@ray.remote(num_cpus=0, max_calls=0)
def where() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]


def placed(bundles: RoleBundles, index: int, share: float) -> tuple[str, str]:
    """Node and accelerator of a task that is put on a bundle."""
    task = where.options(num_gpus=share, scheduling_strategy=strategy(bundles, index))
    found: tuple[str, str] = ray.get(task.remote(), timeout=60)
    return found


def test_trainer_and_engine_share_one_accelerator(job: roost.Cluster, create: Callable[..., Any]) -> None:
    groups = create(actor_num_nodes=1, actor_num_gpus_per_node=2, colocate=True)
    trainer = Role.options(num_gpus=0.8, scheduling_strategy=strategy(groups["actor"], 1)).remote()
    engine = Role.options(num_gpus=0.2, scheduling_strategy=strategy(groups["rollout"], 1)).remote()
    try:
        found = ray.get([trainer.where.remote(), engine.where.remote()], timeout=60)
        assert found[0] == found[1] == (job.get_node_info(0).ray_id, "1")
        assert groups["actor"].gpu_ids[1] == groups["rollout"].gpu_ids[1] == 1
    finally:
        ray.kill(trainer)
        ray.kill(engine)


def test_plain_address_order(job: roost.Cluster, create: Callable[..., Any]) -> None:
    groups = create("address", actor_num_nodes=4, actor_num_gpus_per_node=4)
    nodes = [placed(groups["actor"], i, 1.0)[0] for i in range(0, 16, 4)]
    by_address = sorted(range(4), key=lambda rank: (roost.stable_order_key(job.get_node_ip(rank)), rank))
    assert nodes == [job.get_node_info(rank).ray_id for rank in by_address]
    assert groups["actor"].gpu_ids == [0, 1, 2, 3] * 4


def test_the_cluster_of_this_process_is_the_default(job: roost.Cluster) -> None:
    groups = roost.create_placement_groups({"actor_num_gpus_per_node": 1, "debug_train_only": True}, cpus=0)
    actor = groups["actor"]
    assert actor is not None
    assert actor.gpu_ids == [0]
    remove_placement_group(actor.placement_group)


def test_an_engine_that_would_straddle_nodes_is_refused_and_nothing_is_held(
    job: roost.Cluster, eventually: Callable[..., None], free_gpus: Callable[[], float]
) -> None:
    args = Namespace(
        actor_num_nodes=1, actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=4, colocate=False
    )
    with pytest.raises(roost.PlacementError, match="straddle nodes: the next begins at GPU 4"):
        roost.create_placement_groups(args, job, cpus=0)
    eventually(lambda: free_gpus() == 16)


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ({"debug_train_only": True, "debug_rollout_only": True}, "P401"),
        ({"actor_num_nodes": "two"}, "P403"),
        ({"actor_num_nodes": 0}, "P411"),
        ({"colocate": True, "num_gpus_per_actor": 0.9}, "P408"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_reserved(
    job: roost.Cluster, numbers: dict[str, Any], code: str
) -> None:
    with pytest.raises(roost.PlacementError) as caught:
        roost.create_placement_groups(numbers, job)
    assert caught.value.codes == (code,)


def test_another_order_is_refused(job: roost.Cluster) -> None:
    with pytest.raises(roost.PlacementError, match="cluster or address"):
        roost.create_placement_groups({}, job, order="name")


def test_a_placeholder_is_not_launched(job: roost.Cluster, free_gpus: Callable[[], float]) -> None:
    layout = {"actor_num_gpus_per_node": 4, "rollout_groups": [{"num_gpus": 2, "placeholder": True}]}
    plan = roost.Plan.resolve({"cluster": {"layout": layout}}, job)
    with pytest.raises(roost.LaunchError, match="rollout is a placeholder"):
        roost.Worker.create_group().launch(job, plan=plan, component="rollout")
    assert free_gpus() == 16

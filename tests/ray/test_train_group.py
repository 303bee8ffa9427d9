"""Trainers: which rank is where, what they do together, and how they come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch
from processes import alive, wait_for
from rl_parts import Trainer

import roost
from roost.rl.train import TrainGroup, TrainWorker
from roost.testing import LocalRay

# From the middle of node 0 into node 1.
JOB = {"cluster": {"num_nodes": 4, "component_placement": {"actor": "2-4"}}}
PLACES = [(0, 2), (0, 3), (1, 0)]


@pytest.fixture(scope="module")
def job(four_nodes: LocalRay) -> Iterator[roost.Cluster]:
    with roost.Cluster(num_nodes=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def train(job: roost.Cluster) -> Iterator[TrainGroup]:
    with TrainGroup(job, Trainer, roost.Plan.resolve(JOB, job)) as group:
        group.init(seed=3)
        yield group


def test_ranks_are_in_stable_order_and_meet_on_the_node_of_rank_0(train: TrainGroup, four_nodes: LocalRay) -> None:
    found = train.workers.where().wait()
    assert train.world_size == 3
    assert [where["accelerator"] for where in found] == PLACES
    assert [where["address"] for where in found] == [four_nodes.node_address(node) for node, _ in PLACES]
    assert [where["CUDA_VISIBLE_DEVICES"] for where in found] == ["2", "3", "0"]
    assert [where["RANK"] for where in found] == ["0", "1", "2"]
    assert [where["LOCAL_RANK"] for where in found] == ["0"] * 3, "each sees one accelerator"
    assert {where["WORLD_SIZE"] for where in found} == {"3"}
    assert {where["MASTER_ADDR"] for where in found} == {four_nodes.node_address(0)}
    assert len({where["MASTER_PORT"] for where in found}) == 1


def test_every_verb_goes_to_all_ranks(train: TrainGroup, tmp_path: Path) -> None:
    assert train.init(seed=3) == ["cpu"] * 3
    assert train.train(2.0) == [6.0] * 3, "the same for all; torch.distributed adds it up"
    assert train.train(roost.PerRank([1.0, 10.0, 100.0])) == [111.0] * 3
    assert train.eval() == [(0, ""), (1, ""), (2, "")]
    assert train.eval(name=roost.PerRank(["a", "b", "c"])) == [(0, "a"), (1, "b"), (2, "c")]
    before = train.workers.sums().wait()
    assert before[0] == before[1] == before[2]
    assert len(train.offload()) == len(train.onload()) == 3
    assert train.clear_memory() == [None] * 3
    assert train.workers.sums().wait() == before
    train.save(str(tmp_path / "saved"))
    [file] = (tmp_path / "saved").glob("state-*/*")
    assert int(torch.load(file, weights_only=True)["model"]["steps"]) == 2
    train.train(1.0)
    assert train.workers.sums().wait() != before
    train.load(str(tmp_path / "saved"))
    assert train.workers.sums().wait() == before
    with pytest.raises(roost.WorkerError, match=r"CheckpointError: .*W302.*no save has ended there"):
        train.load(str(tmp_path))


def test_async_forms_return_references_to_values(train: TrainGroup) -> None:
    refs = train.async_train(roost.PerRank([1.0, 2.0, 3.0]))
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    assert ray.get(refs) == [6.0] * 3
    assert ray.get(train.async_eval("x")) == [(0, "x"), (1, "x"), (2, "x")]
    assert ray.get(train.async_init(5)) == ["cpu"] * 3
    for verb in ("save", "load", "offload", "onload", "clear_memory"):
        assert callable(getattr(train, f"async_{verb}"))
    with pytest.raises(AttributeError, match=r"\.workers\.sums\(\)"):
        train.sums()


def test_a_broadcast_is_given_up_while_the_rank_waits_in_it(train: TrainGroup, tmp_path: Path) -> None:
    waiting = train.workers.await_stop(roost.PerRank([str(tmp_path / str(rank)) for rank in range(3)]))
    wait_for(lambda: len(list(tmp_path.iterdir())) == 3, "ranks that are busy")
    ray.get(train.workers.call_beside("stop_broadcasts", "an engine died"), timeout=60)
    assert waiting.wait(60) == ["an engine died"] * 3


def test_an_exception_says_which_rank_and_where(train: TrainGroup) -> None:
    with pytest.raises(roost.WorkerError) as caught:
        train.train(roost.PerRank([0.0, -2.0, 0.0]))
    error = caught.value
    assert (error.group, error.rank, error.node_rank, error.codes) == ("actor", 1, 0, ("W201",))
    assert "train() raised ValueError: -2.0 is too little" in str(error)
    assert "in train" in error.remote_traceback


def test_released_ranks_free_their_accelerators_and_come_back(
    train: TrainGroup, free_gpus: Callable[[], float]
) -> None:
    pids = [where["pid"] for where in train.workers.where().wait()]
    train.release()
    wait_for(lambda: not alive(pids), "the end of the ranks")
    wait_for(lambda: free_gpus() == 16.0, "free accelerators")
    for call in (lambda: train.train(1.0), lambda: train.async_train(1.0), lambda: train.workers):
        with pytest.raises(roost.LaunchError) as caught:
            call()
        assert caught.value.codes == ("W111",)
        assert "train.create()" in str(caught.value)
    train.release()
    train.create()
    wait_for(lambda: free_gpus() == 13.0, "reserved accelerators")
    found = train.workers.where().wait()
    assert [where["accelerator"] for where in found] == PLACES
    assert not set(pids) & {where["pid"] for where in found}
    train.create()
    assert train.workers.where().wait() == found, "those that run are left as they are"
    train.init(3)
    assert train.train(1.0) == [3.0] * 3


def test_what_cannot_be(train: TrainGroup, job: roost.Cluster) -> None:
    for wrong in (roost.Worker, object(), "Trainer"):
        with pytest.raises(roost.LaunchError, match="derives from TrainWorker") as caught:
            TrainGroup(job, wrong, train.plan)
        assert caught.value.codes == ("W106",)
    with pytest.raises(roost.LaunchError, match=r"train\.connect\(rollout\)") as lost:
        train.update_weights()
    assert lost.value.codes == ("W112",)
    with pytest.raises(roost.LaunchError) as taken:
        TrainGroup(job, Trainer, train.plan)
    assert taken.value.codes == ("W109",)
    assert train.eval() == [(0, ""), (1, ""), (2, "")]
    with pytest.raises(NotImplementedError, match="define train"):
        TrainWorker().train()

"""Engines that read the memory of the trainer in place: trainer and engines wait for each other in shared memory.

On GPUs that memory is mapped by CUDA IPC. Here it is memory that both have mapped, handed over in the same way.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator, Mapping

import pytest
import torch
from rl_parts import Talker, Trainer, told

import roost
from roost.rl.rollout import RolloutManager
from roost.rl.train import TrainGroup
from roost.testing import LocalRay
from roost.weights.ipc import MovedError
from roost.weights.sync import WeightSync

JOB = {
    "cluster": {
        "num_nodes": 4,
        "component_placement": {
            "actor": {"placement": "0-1", "gpu_share": 0.5},
            "near": {"placement": "0-1", "role": "rollout", "gpu_share": 0.5},
        },
    }
}
Roles = tuple[TrainGroup, RolloutManager]


class Moving(Trainer):
    """Its tensors are somewhere else once."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        if self.hook and self.hook[0] == "move":
            self.hook = ()
            raise MovedError("they have moved")
        return super().weights()


@pytest.fixture(scope="module")
def roles(four_nodes: LocalRay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    folder = str(tmp_path_factory.mktemp("in-place"))
    with pytest.MonkeyPatch.context() as patch, roost.Cluster(num_nodes=4) as job:
        patch.setattr(WeightSync, "_is_in_place", property(lambda sync: True))
        plan = roost.Plan.resolve(JOB, job)
        with (
            TrainGroup(job, Moving, plan) as train,
            RolloutManager(job, plan, functools.partial(Talker, folder), router=None, sync_timeout_s=10) as rollout,
        ):
            train.init()
            train.connect(rollout)
            yield train, rollout


def check_equal(train: TrainGroup, rollout: RolloutManager) -> None:
    """Every engine has the trainer's bits, and the version that the manager says."""
    expected = train.workers.sums().wait()[0]
    for engine in rollout.alive_engines:
        found = told(engine)
        assert found["sums"] == expected
        assert found["version"] == engine.version == rollout.version


def test_engines_have_the_bits_of_each_version(roles: Roles) -> None:
    train, rollout = roles
    for _ in range(3):
        train.train(1.0)
        train.update_weights()
        check_equal(train, rollout)
    assert rollout._sync is not None
    assert rollout._sync._progress is not None  # the short way was taken
    assert len(rollout.alive_engines) == 2


def test_a_call_that_still_runs_is_waited_for(roles: Roles) -> None:
    train, rollout = roles
    train.async_train(1.0)
    train.update_weights()
    check_equal(train, rollout)


def test_a_rank_that_fails_changes_nothing_and_the_next_update_goes(roles: Roles) -> None:
    train, rollout = roles
    version = rollout.version
    train.train(1.0)
    train.workers.set_hook(1, "raise").wait()
    with pytest.raises(roost.RolloutError, match=f"engines keep version {version}: .*no weights to be found"):
        train.update_weights()
    assert {told(engine)["version"] for engine in rollout.alive_engines} == {version}
    train.update_weights()
    check_equal(train, rollout)


def test_the_same_where_there_are_no_flags(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    train, rollout = roles
    monkeypatch.setattr(WeightSync, "_open_progress", lambda sync: None)
    rollout.unmap_weights()
    assert rollout._sync is not None
    rollout._sync.close()
    train.train(1.0)
    train.update_weights()
    assert rollout._sync._progress is None
    check_equal(train, rollout)
    train.train(1.0)
    train.workers.set_hook(1, "raise").wait()
    with pytest.raises(roost.RolloutError, match="no weights to be found"):
        train.update_weights()
    train.update_weights()
    check_equal(train, rollout)
    rollout._sync.close()


def test_memory_that_moved_is_found_again(roles: Roles) -> None:
    train, rollout = roles
    train.train(1.0)
    train.update_weights()
    train.train(1.0)
    train.workers.set_hook(1, "move").wait()
    train.update_weights()
    check_equal(train, rollout)


def test_a_lock_that_cannot_be_had_changes_nothing(roles: Roles) -> None:
    train, rollout = roles
    version = rollout.version
    train.train(1.0)
    with rollout.lock.shared("somebody", 5.0), pytest.raises(roost.RoostError, match="waited"):
        train.update_weights()
    assert {told(engine)["version"] for engine in rollout.alive_engines} == {version}
    train.update_weights()
    check_equal(train, rollout)


def test_an_engine_that_died_is_left_out(roles: Roles) -> None:
    train, rollout = roles
    gone = rollout.alive_engines[0]
    os.kill(told(gone)["pid"], signal.SIGKILL)
    train.train(1.0)
    train.update_weights()
    assert not gone.is_alive
    check_equal(train, rollout)
    rollout.recover()
    train.update_weights()
    assert len(rollout.alive_engines) == 2
    check_equal(train, rollout)


def test_a_trainer_that_died_unseen_is_an_error(roles: Roles) -> None:
    train, rollout = roles
    version = rollout.version
    os.kill(train.workers.where().wait()[1]["pid"], signal.SIGKILL)
    with pytest.raises(roost.RolloutError, match=f"engines keep version {version}"):
        train.update_weights()
    assert {told(engine)["version"] for engine in rollout.alive_engines} == {version}
    train.release()
    train.create()
    train.init()
    train.update_weights()
    check_equal(train, rollout)

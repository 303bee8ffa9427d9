"""An engine that computes with its trainer's own memory."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import roost

torch = pytest.importorskip("torch", reason="needs torch")
sys.path.insert(0, str(Path(__file__).parent))

from big_parts import JOB, BigTrainer, engine, generate, same  # noqa: E402

TENSORS, MIB = 100, 41.0
Roles = tuple[roost.TrainGroup, roost.RolloutManager]


@pytest.fixture(scope="module")
def roles() -> Iterator[Roles]:
    os.environ.pop("RAY_ADDRESS", None)
    with roost.Cluster(num_nodes=1) as cluster:
        plan = roost.Plan.resolve(JOB, cluster)
        aliasing = engine(TENSORS, MIB, aliases_weights=True)
        with (
            roost.TrainGroup(cluster, BigTrainer, plan) as train,
            roost.RolloutManager(cluster, plan, aliasing, router=None) as rollout,
        ):
            train.init(TENSORS, MIB)
            train.connect(rollout)
            yield train, rollout


def test_nothing_is_copied(roles: Roles) -> None:
    train, rollout = roles
    nbytes = train.workers.nbytes().wait()[0]
    before = train.workers.used_gib().wait()[0]
    train.update_weights()
    saved = before - train.workers.used_gib().wait()[0]
    assert saved > 0.9 * nbytes / 2**30  # the engine gave its own memory back
    assert same(train, rollout)
    for _ in range(3):
        train.train(0.5)
        assert same(train, rollout)  # also before it was told
        start = time.perf_counter()
        train.update_weights()
        print(f"sync: {1000 * (time.perf_counter() - start):.1f} ms")
        group = generate(rollout)
        assert group.is_finished
        assert set(group.samples[0].versions) == {rollout.version}


def test_memory_that_moved_is_found_again(roles: Roles) -> None:
    train, rollout = roles
    train.workers.move().wait()
    train.update_weights()
    assert same(train, rollout)
    assert generate(rollout).is_finished


def test_a_trainer_that_was_offloaded_frees_its_memory_and_requests_wait(roles: Roles) -> None:
    train, rollout = roles
    before = train.workers.used_gib().wait()[0]
    [moved] = train.offload()
    assert before - train.workers.used_gib().wait()[0] > 0.98 * moved / 2**30
    with pytest.raises(roost.RolloutError):
        generate(rollout, timeout_s=2.0)
    train.onload()
    train.update_weights()
    assert generate(rollout).is_finished


def test_an_engine_refuses_to_compute_with_the_memory_of_a_dead_trainer(roles: Roles) -> None:
    train, rollout = roles
    os.kill(train.workers.pid().wait()[0], signal.SIGKILL)
    with pytest.raises(roost.WorkerDiedError):
        train.train(0.5)
    with pytest.raises(roost.RolloutError, match="the trainer whose memory the engine computes with is gone"):
        generate(rollout, timeout_s=5.0)
    train.release()
    train.create()
    train.init(TENSORS, MIB)
    train.update_weights()
    assert same(train, rollout)
    assert generate(rollout).is_finished

"""Trainer and engine on one real GPU: weights are handed over in place, bit for bit."""

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

from big_parts import JOB, BigTrainer, engine, generate, info, same  # noqa: E402

TENSORS, MIB = 400, 41.0  # 16 GiB


@pytest.fixture(scope="module")
def roles() -> Iterator[tuple[roost.TrainGroup, roost.RolloutManager]]:
    os.environ.pop("RAY_ADDRESS", None)
    with roost.Cluster(num_nodes=1) as cluster:
        plan = roost.Plan.resolve(JOB, cluster)
        with (
            roost.TrainGroup(cluster, BigTrainer, plan) as train,
            roost.RolloutManager(cluster, plan, engine(TENSORS, MIB), router=None) as rollout,
        ):
            train.init(TENSORS, MIB)
            train.connect(rollout)
            yield train, rollout


def test_weights_go_by_ipc_and_are_equal(roles: tuple[roost.TrainGroup, roost.RolloutManager]) -> None:
    train, rollout = roles
    assert not same(train, rollout)
    first = train.update_weights()
    assert first.bytes_by_transport == {"ipc": train.workers.nbytes().wait()[0]}
    one, each = train.workers.bare_copy_s().wait()[0]
    for number in range(5):
        train.train(0.5)
        train.workers.checksums().wait()  # until it has really computed
        start = time.perf_counter()
        train.update_weights()
        took = time.perf_counter() - start
        print(
            f"sync {number}: {1000 * took:.1f} ms, {took / each:.2f} x a bare copy of the same tensors"
            f" ({1000 * each:.1f} ms), {took / one:.2f} x one of as many bytes in one piece ({1000 * one:.1f} ms)"
        )
        assert same(train, rollout)
    print(f"the first: {first.seconds}")


def test_memory_that_moved_is_mapped_anew(roles: tuple[roost.TrainGroup, roost.RolloutManager]) -> None:
    train, rollout = roles
    train.workers.move().wait()
    train.train(2.0)
    train.update_weights()
    assert same(train, rollout)


def test_an_offloaded_trainer_frees_its_memory_and_comes_back(
    roles: tuple[roost.TrainGroup, roost.RolloutManager],
) -> None:
    train, rollout = roles
    kept = train.workers.checksums().wait()[0]
    bare = train.workers.bare_pinned_s().wait()[0]
    before = train.workers.used_gib().wait()[0]
    for number in range(3):  # the first one pins host memory
        start = time.perf_counter()
        [moved] = train.offload()
        out = time.perf_counter() - start
        freed = before - train.workers.used_gib().wait()[0]
        assert freed > 0.98 * moved / 2**30
        assert info(rollout)["checksums"] == kept  # the engine has its own copy
        start = time.perf_counter()
        assert train.onload()[0] == moved
        back = time.perf_counter() - start
        print(
            f"{number}: offload {out:.2f} s, onload {back:.2f} s, freed {freed:.1f} of {moved / 2**30:.1f} GiB;"
            f" bandwidth of a bare pinned copy: {100 * bare[0] / out:.0f} % and {100 * bare[1] / back:.0f} %"
        )
        assert train.workers.checksums().wait()[0] == kept
    train.train(0.5)
    train.update_weights()
    assert same(train, rollout)


def test_an_engine_outlives_its_trainer(roles: tuple[roost.TrainGroup, roost.RolloutManager]) -> None:
    train, rollout = roles
    train.update_weights()
    kept = info(rollout)["checksums"]
    os.kill(train.workers.pid().wait()[0], signal.SIGKILL)  # while the engine has its memory mapped
    with pytest.raises(roost.WorkerDiedError):
        train.train(0.5)
    assert info(rollout)["checksums"] == kept
    assert generate(rollout).is_finished
    train.release()
    train.create()
    train.init(TENSORS, MIB)
    assert train.update_weights().version == rollout.version
    assert same(train, rollout)

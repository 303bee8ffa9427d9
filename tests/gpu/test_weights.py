"""Trainer and engine on one real GPU: weights are handed over in place, bit for bit."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import roost

torch = pytest.importorskip("torch", reason="needs torch")
sys.path.insert(0, str(Path(__file__).parent))

from big_parts import BigTrainer, engine  # noqa: E402

TENSORS, MIB = 400, 41.0  # 16 GiB
JOB = {"cluster": {"component_placement": {
    "actor": {"placement": "0", "gpu_share": 0.8}, "rollout": {"placement": "0", "gpu_share": 0.2},
}}}  # fmt: skip


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


def info(rollout: roost.RolloutManager) -> Any:
    with urllib.request.urlopen(f"{rollout.engines[0].url}/get_server_info", timeout=60) as answer:  # noqa: S310
        return json.loads(answer.read())


def same(train: roost.TrainGroup, rollout: roost.RolloutManager) -> bool:
    return bool(train.workers.checksums().wait()[0] == info(rollout)["checksums"])


def test_weights_go_by_ipc_and_are_equal(roles: tuple[roost.TrainGroup, roost.RolloutManager]) -> None:
    train, rollout = roles
    assert not same(train, rollout)
    bare = train.workers.bare_copy_s(TENSORS * MIB / 1024).wait()[0]
    for number in range(5):
        train.train(0.5)
        report = train.update_weights()
        print(f"sync {number}: {report.seconds}, bare copy {bare:.4f} s")
        assert list(report.bytes_by_transport) == ["ipc"]
        assert same(train, rollout)


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
    before, kept = train.workers.used_gib().wait()[0], train.workers.checksums().wait()[0]
    moved = train.offload()[0]
    freed = before - train.workers.used_gib().wait()[0]
    print(f"offload freed {freed:.1f} GiB of {moved / 2**30:.1f}")
    assert freed > 0.98 * moved / 2**30
    assert info(rollout)["checksums"] == kept  # the engine has its own copy
    assert train.onload()[0] == moved
    assert train.workers.checksums().wait()[0] == kept
    train.train(0.5)
    train.update_weights()
    assert same(train, rollout)


def test_an_engine_outlives_its_trainer(roles: tuple[roost.TrainGroup, roost.RolloutManager]) -> None:
    train, rollout = roles
    train.update_weights()
    kept = info(rollout)["checksums"]
    train.release()
    assert info(rollout)["checksums"] == kept
    samples = [roost.Sample([1, 2], index=index) for index in range(2)]
    [group] = rollout.generate([roost.SampleGroup("after", {"seed": 1}, samples)], {"max_new_tokens": 3})
    assert group.is_finished

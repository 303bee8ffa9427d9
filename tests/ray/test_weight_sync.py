"""Weight sync: both sides have the same bits afterwards, whatever the way; and what fails changes nothing."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import wait_for
from rl_parts import (
    SERVED_KEY,
    Pair,
    SlicedTrainer,
    Started,
    Talker,
    Trainer,
    check_complete,
    new_groups,
    routed,
    serving,
    told,
    whole_sums,
)

import roost
from roost.rl.rollout import RolloutManager
from roost.rl.train import TrainGroup
from roost.testing import LocalRay

# Two replicas of a trainer that cuts its tensors in two; an engine on an accelerator of the trainer's, one on
# another node, one whose two members cut the tensors too, and one that runs elsewhere.
JOB = {
    "cluster": {
        "num_nodes": 4,
        "component_placement": {
            "actor": {"placement": "2-5", "gpu_share": 0.5},
            "critic": {"placement": "6"},
            "near": {"placement": "3", "role": "rollout", "gpu_share": 0.5},
            "far": {"placement": "12", "role": "rollout"},
            "pair": {"placement": "7-8", "role": "rollout", "processes_per_engine": 2},
        },
    }
}
PARAMS = {"max_new_tokens": 4, "temperature": 1.0}


@pytest.fixture(scope="module")
def job(four_nodes: LocalRay) -> Iterator[roost.Cluster]:
    with roost.Cluster(num_nodes=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def plan(job: roost.Cluster) -> roost.Plan:
    return roost.Plan.resolve(JOB, job)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sync")


@pytest.fixture(scope="module")
def parts(job: roost.Cluster, plan: roost.Plan, folder: Path) -> Iterator[tuple[TrainGroup, RolloutManager]]:
    engines = {
        "near": functools.partial(Talker, str(folder)),
        "far": functools.partial(Talker, str(folder), delay_s=0.01),
        "pair": Pair,
    }
    starting = Started(lambda: TrainGroup(job, SlicedTrainer, plan))
    with (
        serving(folder) as url,
        RolloutManager(job, plan, engines, external={url: SERVED_KEY}, sync_timeout_s=60) as rollout,
        starting.result() as train,
    ):
        train.init()
        train.connect(rollout)
        yield train, rollout
        files = rollout._weights_folder.path()
        assert os.path.isdir(files)
        assert any(name.startswith("actor-weights-") for name in roost.CollectiveManager.get_proxy().get_all())
        rollout.close()
        assert not os.path.exists(files)
        assert not any("-weights-" in name for name in roost.CollectiveManager.get_proxy().get_all())


@pytest.fixture
def train(parts: tuple[TrainGroup, RolloutManager]) -> TrainGroup:
    return parts[0]


@pytest.fixture
def rollout(parts: tuple[TrainGroup, RolloutManager]) -> RolloutManager:
    """With all engines alive, and a version of the trainer's in each."""
    train, manager = parts
    manager.recover()
    if not manager.version or any(engine.version != manager.version for engine in manager.engines):
        manager.update_weights(train)
    return manager


@pytest.fixture(scope="module")
def spare(job: roost.Cluster, plan: roost.Plan) -> Iterator[TrainGroup]:
    """A trainer of one rank, with whole tensors."""
    with TrainGroup(job, Trainer, plan, "critic") as group:
        group.init()
        yield group


def engine_of(rollout: RolloutManager, name: str) -> Any:
    return next(engine for engine in rollout.engines if engine.name.startswith(name))


def check_equal(train: TrainGroup, rollout: RolloutManager, version: int) -> None:
    """Every engine that is alive has the trainer's bits, and says so."""
    if train.component == "actor":
        parts = train.workers.parts().wait()
        whole = whole_sums(parts)
        own = train.workers.sums().wait()
        assert own[0] == own[2]
        assert own[1] == own[3]
        assert own[0] != own[1]
    else:
        whole = train.workers.sums().wait()[0]
        own = []
    for engine in rollout.alive_engines:
        assert engine.version == version
        if engine.name == "pair/0":
            for member in range(2):
                found = told(engine, member)
                assert found["version"] == version
                if own:
                    assert found["sums"] == own[member]
        else:
            found = told(engine)
            assert found["version"] == version
            assert found["sums"] == whole
    assert rollout.version == version


def serve(rollout: RolloutManager, version: int) -> None:
    """All engines serve that version and no other."""
    groups = rollout.generate(new_groups(8), PARAMS)
    check_complete(groups, [f"g{i}" for i in range(8)], 2, 4)
    found = {number for group in groups for sample in group.samples for number in sample.versions}
    assert found == {version}


def test_every_way_carries_every_bit(train: TrainGroup, rollout: RolloutManager, job: roost.Cluster) -> None:
    first = rollout.version
    for number in range(1, 4):
        train.train(1.0)
        report = train.update_weights()
        assert report.version == first + number
        assert report.engines == 4
        check_equal(train, rollout, first + number)
        serve(rollout, first + number)
        assert set(report.bytes_by_transport) == {"shared_memory", "broadcast", "file"}
        assert all(count > 0 for count in report.bytes_by_transport.values())
        assert ("connect" in report.seconds) == (number == 1 and first == 0)
    collectives = roost.CollectiveManager.get_proxy().get_all()
    ours = {name: group for name, group in collectives.items() if name.startswith("actor-weights-")}
    assert ours
    assert all(group["world_size"] >= 2 and group["port"] > 0 for group in ours.values())


def test_a_whole_trainer_feeds_cut_engines(spare: TrainGroup, train: TrainGroup, rollout: RolloutManager) -> None:
    spare.train(1.0)
    before = rollout.version
    report = rollout.update_weights(spare)
    check_equal(spare, rollout, before + 1)
    assert "shared_memory" not in report.bytes_by_transport, "nobody is on its accelerator"
    names = roost.CollectiveManager.get_proxy().get_all()
    assert any(name.startswith("critic-weights-") for name in names)
    assert not any(name.startswith("actor-weights-") for name in names), "that trainer's groups are gone"
    train.update_weights()
    check_equal(train, rollout, before + 2)


def test_what_does_not_fit_is_named_and_nothing_is_written(
    spare: TrainGroup, train: TrainGroup, rollout: RolloutManager
) -> None:
    before = rollout.version
    spare.init(width=8, scale="float32")
    with pytest.raises(roost.RoostError) as caught:
        rollout.update_weights(spare)
    text = str(caught.value)
    assert {"S102", "S103"} & set(caught.value.codes)
    for name in ("embed.weight", "head.weight", "scale"):
        assert name in text
    check_equal(train, rollout, before)
    serve(rollout, before)
    spare.workers.rename("head.bias", "head.offset").wait()
    with pytest.raises(roost.RoostError) as other:
        rollout.update_weights(spare)
    assert "S101" in other.value.codes
    assert "head.bias" in str(other.value)
    check_equal(train, rollout, before)
    spare.init()
    rollout.update_weights(spare)
    check_equal(spare, rollout, before + 1)
    with pytest.raises(roost.RolloutError) as wrong:
        rollout.update_weights(train, pause="sleep")
    assert wrong.value.codes == ("S201",)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_changes_nothing(train: TrainGroup, rollout: RolloutManager, rank: int) -> None:
    before = rollout.version
    train.update_weights()
    check_equal(train, rollout, before + 1)
    train.train(1.0)
    train.workers.set_hook(rank, "raise").wait()
    with pytest.raises(roost.RolloutError) as caught:
        train.update_weights()
    assert caught.value.codes == ("S205",)
    assert f"version {before + 2} was not sent, and engines keep version {before + 1}" in str(caught.value)
    assert f"actor[{rank}]" in str(caught.value)
    assert "no weights to be found" in str(caught.value)
    assert {told(engine)["version"] for engine in rollout.engines} == {before + 1}
    serve(rollout, before + 1)
    train.update_weights()
    check_equal(train, rollout, before + 2)
    serve(rollout, before + 2)


def test_a_rank_that_is_killed_changes_nothing(spare: TrainGroup, train: TrainGroup, rollout: RolloutManager) -> None:
    spare.init()
    rollout.update_weights(spare)
    before = rollout.version
    spare.train(1.0)
    sums = [told(engine)["sums"] for engine in rollout.engines]
    spare.workers.set_hook(0, "kill", 0).wait()
    with pytest.raises(roost.RolloutError) as caught:
        rollout.update_weights(spare)
    assert caught.value.codes == ("S205",)
    assert "critic[0]" in str(caught.value)
    assert [told(engine)["sums"] for engine in rollout.engines] == sums
    assert {told(engine)["version"] for engine in rollout.engines} == {before}
    serve(rollout, before)
    spare.release()
    spare.create()
    spare.init()
    rollout.update_weights(spare)
    check_equal(spare, rollout, before + 1)


def test_an_engine_that_dies_while_weights_travel(train: TrainGroup, rollout: RolloutManager) -> None:
    before = rollout.version
    train.update_weights()
    far = engine_of(rollout, "far")
    train.train(1.0)
    train.workers.set_hook(1, "kill", told(far)["pid"]).wait()
    report = train.update_weights()
    assert (report.version, report.engines) == (before + 2, 3)
    assert not far.is_alive
    check_equal(train, rollout, before + 2)
    serve(rollout, before + 2)


def test_an_engine_that_dies_of_the_change_over(train: TrainGroup, rollout: RolloutManager, folder: Path) -> None:
    before = rollout.version
    train.train(1.0)
    (folder / f"far-dies-of-{before + 1}").touch()
    report = train.update_weights(pause="abort")
    assert (report.version, report.engines) == (before + 1, 3)
    assert not engine_of(rollout, "far").is_alive
    check_equal(train, rollout, before + 1)
    assert rollout.recover() == [engine_of(rollout, "far")]
    train.train(1.0)
    assert train.update_weights().engines == 4
    check_equal(train, rollout, before + 2)
    serve(rollout, before + 2)


def test_an_engine_that_refuses_a_version(train: TrainGroup, rollout: RolloutManager, folder: Path) -> None:
    before = rollout.version
    train.train(1.0)
    (folder / f"far-refuses-{before + 1}").touch()
    with pytest.raises(roost.RolloutError) as caught:
        train.update_weights()
    assert caught.value.codes == ("S205",)
    assert f"version {before + 1} is not on all engines; some may have version {before}" in str(caught.value)
    assert f"{before + 1} is an unlucky number" in str(caught.value)
    assert told(engine_of(rollout, "far"))["version"] == before
    train.train(1.0)
    assert train.update_weights().version == before + 2, "a number is never used for two versions"
    check_equal(train, rollout, before + 2)


def test_a_member_that_dies_takes_its_engine_along(train: TrainGroup, rollout: RolloutManager) -> None:
    pair = engine_of(rollout, "pair")
    pids = [told(pair, member)["pid"] for member in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: not pair.is_alive, "its being missed")
    wait_for(lambda: not os.path.exists(f"/proc/{pids[0]}"), "the end of the other member")
    before = rollout.version
    assert train.update_weights().engines == 3
    assert rollout.recover() == [pair]
    assert train.update_weights().engines == 4
    check_equal(train, rollout, before + 2)
    assert [told(pair, member)["total"] for member in range(2)] == [11.0, 11.0]


def test_engines_that_start_again_are_back_whoever_is_not(
    train: TrainGroup, rollout: RolloutManager, folder: Path
) -> None:
    near, far = engine_of(rollout, "near"), engine_of(rollout, "far")
    for engine in (near, far):
        os.kill(told(engine)["pid"], signal.SIGKILL)
    wait_for(lambda: not near.is_alive and not far.is_alive, "their being missed")
    (folder / "far-stays-down").touch()
    with pytest.raises(roost.RolloutError, match=r"far/0 did not start: .*no luck today"):
        rollout.recover()
    assert (near.is_alive, far.is_alive) == (True, False)
    assert train.update_weights().engines == 3
    (folder / "far-stays-down").unlink()
    assert rollout.recover() == [far]
    assert train.update_weights().engines == 4
    check_equal(train, rollout, rollout.version)


def test_one_of_several_ranks_is_killed_and_all_come_back(train: TrainGroup, rollout: RolloutManager) -> None:
    train.update_weights()
    before = rollout.version
    sums = [told(engine)["sums"] for engine in rollout.engines]
    train.train(1.0)
    train.workers.set_hook(1, "kill", 0).wait()
    with pytest.raises(roost.RolloutError) as caught:
        train.update_weights()
    assert caught.value.codes == ("S205",)
    assert "actor[1]" in str(caught.value)
    assert [told(engine)["sums"] for engine in rollout.engines] == sums
    serve(rollout, before)
    train.release()
    with pytest.raises(roost.LaunchError) as released:
        train.update_weights()
    assert released.value.codes == ("W111",)
    serve(rollout, before)
    train.create()
    train.init(seed=11)
    assert train.update_weights().version == before + 1
    check_equal(train, rollout, before + 1)
    serve(rollout, before + 1)


def test_an_engine_elsewhere_that_is_gone_is_left_out(
    train: TrainGroup, rollout: RolloutManager, tmp_path: Path
) -> None:
    before = rollout.version
    external = engine_of(rollout, "http")
    os.kill(told(external)["pid"], signal.SIGKILL)
    train.train(1.0)
    report = train.update_weights()
    assert (report.version, report.engines) == (before + 1, 3)
    assert not external.is_alive
    assert external.url not in routed(rollout)
    check_equal(train, rollout, before + 1)
    serve(rollout, before + 1)
    assert rollout.recover() == []
    with serving(tmp_path, int(external.url.rpartition(":")[2])) as url:
        assert url == external.url
        assert rollout.recover() == [external]
        assert train.update_weights().engines == 4
        assert url in routed(rollout)
        check_equal(train, rollout, before + 2)
        serve(rollout, before + 2)

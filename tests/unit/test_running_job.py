"""What ``roost.launch`` starts and closes, and in which order: with stand-ins for everything that needs Ray."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

import roost
import roost.rl.job
import roost.rl.rollout
import roost.rl.train
from roost.rl.job import RunningJob
from roost.rl.programs import Program


class Actor(roost.TrainWorker): ...


class Reward(roost.Worker): ...


class Broken(roost.Worker): ...


def make_engine(config: Any) -> Any:
    return config


class Started:
    """Notes what starts and closes; stands in for groups and managers."""

    log: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.component = self.name = name
        self.world_size = 1
        self.connected: Any = None
        self.log.append(f"start {name}")

    def close(self) -> None:
        self.log.append(f"close {self.name}")

    def connect(self, rollout: Any) -> None:
        self.connected = rollout


class Rollout(Started):
    def __init__(self, cluster: Any, plan: Any, engines: Any, **options: Any) -> None:
        super().__init__("rollout")
        self.engines, self.options = engines, options

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Request:
    def __init__(self, cls: type) -> None:
        self.cls = cls

    def launch(self, cluster: Any, *, plan: Any, component: str) -> Started:
        if self.cls is Broken:
            raise roost.LaunchError([roost.Finding("W103", "not today")])
        return Started(component)


class Machines:
    """A cluster that notes reservations."""

    def reserve(self, accelerators: Any) -> int:
        Started.log.append("reserve")
        return 7

    def release(self, token: int) -> None:
        Started.log.append(f"release {token}")


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Started, "log", [])
    monkeypatch.setattr(roost.rl.job, "GroupRequest", Request)
    monkeypatch.setattr(roost.rl.train, "TrainGroup", lambda cluster, cls, plan, name: Started(name))
    monkeypatch.setattr(roost.rl.rollout, "RolloutManager", Rollout)
    return Started.log


def running(components: dict[str, Any]) -> RunningJob:
    plan = roost.Plan.resolve({"cluster": {"component_placement": components}}, roost.Topology.parse("1x8"))
    return RunningJob(Machines(), plan, {"model": {"width": 3}})  # type: ignore[arg-type]


COMPONENTS = {"actor": 0, "critic": 1, "rollout": 2, "reward": 3, "spare": {"placement": 4, "placeholder": True}}
PROGRAMS = {
    "critic": Program(Actor), "reward": Program(Reward, "worker"), "actor": Program(Actor), "rollout": Program(make_engine)
}  # fmt: skip


def test_roles_and_the_order_of_starting_and_closing(log: list[str]) -> None:
    started: list[tuple[str, int, str]] = []
    with running(COMPONENTS) as job:
        job.start(
            PROGRAMS,
            rollout_options={"capacity": 9},
            on_start=lambda name, count, noun: started.append((name, count, noun)),
        )
        assert log == ["reserve", "start critic", "start reward", "start actor", "start rollout"]
        assert started == [
            ("critic", 1, "worker"), ("reward", 1, "worker"), ("actor", 1, "worker"), ("rollout", 1, "engine")
        ]  # fmt: skip
        train: Any = job.train
        rollout: Any = job.rollout
        assert train is job.group("actor")
        assert train.connected is rollout
        assert job.group("critic").component == "critic"  # type: ignore[union-attr]
        assert rollout.options == {"capacity": 9}
        assert rollout.engines["rollout"]() == {"model": {"width": 3}}
        assert (job.has_train, job.has_rollout) == (True, True)
        log.clear()
    assert log == ["close rollout", "close actor", "close reward", "close critic", "release 7"]
    job.close()
    assert len(log) == 5


def test_a_critic_alone_is_the_trainer() -> None:
    with running({"critic": 0}) as job:
        job.start({"critic": Program(Actor)})
        assert job.train is job.group("critic")


def test_a_component_that_does_not_start_leaves_nothing(log: list[str]) -> None:
    with pytest.raises(roost.LaunchError, match="not today"), running(COMPONENTS) as job:
        job.start({"actor": Program(Actor), "reward": Program(Broken)})
    assert log == ["reserve", "start actor", "close actor", "release 7"]


def test_an_engine_maker_without_arguments_gets_none() -> None:
    with running({"rollout": 0}) as job:
        job.start({"rollout": Program(dict, "engine")})
        rollout: Any = job.rollout
        assert rollout.engines["rollout"] is dict


def test_what_a_job_does_not_have_is_named() -> None:
    with running({"reward": 0}) as job:
        job.start({"reward": Program(Reward)})
        for wanted in (lambda: job.train, lambda: job.rollout, lambda: job.group("rewrd")):
            with pytest.raises(roost.LaunchError) as caught:
                wanted()
            assert caught.value.codes == ("W115",)
        assert "reward" in str(caught.value)
        assert (job.has_train, job.has_rollout) == (False, False)
        assert repr(job) == "RunningJob(reward)"

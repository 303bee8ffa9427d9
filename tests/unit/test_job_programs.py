"""The programs of a job: what a job file and ``roost.launch`` may name, and errors before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import roost
from roost.config import read_job
from roost.rl.job import assign_programs
from roost.rl.programs import load_programs

MODULE = """\
import roost
class Actor(roost.Worker): ...
class Reward(roost.Worker): ...
def make_engine(config): ...
"""


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job_programs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "job_programs", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.9.8.7:1")  # joining it would fail: nothing here may start


def placed(**components: Any) -> dict[str, Any]:
    return {"cluster": {"component_placement": components}}


LAYOUT = {"layout": {"mode": "disaggregated", "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}}
ACTOR, REWARD, ENGINE = "job_programs:Actor", "job_programs:Reward", "job_programs:make_engine"


def assigned(config: dict[str, Any], given: dict[str, Any] | None = None) -> tuple[list[str], list[str]]:
    job = read_job(config)
    plan = roost.Plan.resolve(job, roost.Topology.parse("1x4"))
    found = assign_programs(plan, load_programs(job, given), job)
    return list(found.workers), list(found.engines)


def test_components_name_their_programs() -> None:
    config = placed(
        rollout={"placement": 1, "engine": ENGINE},
        actor={"placement": 0, "worker": ACTOR},
        reward={"placement": 2, "worker": REWARD},
        spare=3,
    )
    assert assigned(config) == (["actor", "reward"], ["rollout"])


def test_a_layout_names_programs_of_all_its_components() -> None:
    config = {"cluster": {**LAYOUT, "programs": {"actor": ACTOR, "rollout": ENGINE}}}
    assert assigned(config) == (["actor"], ["rollout"])
    config["cluster"]["layout"] = {**LAYOUT["layout"], "debug_train_only": True}
    assert assigned(config) == (["actor"], [])


def test_several_rollout_groups_have_the_program_of_their_role() -> None:
    groups = [{"num_gpus": 1}, {"num_gpus": 2, "num_gpus_per_engine": 2}]
    layout = {"mode": "disaggregated", "actor_num_gpus_per_node": 1, "rollout_groups": groups}
    config = {"cluster": {"layout": layout, "programs": {"actor": ACTOR, "rollout": ENGINE}}}
    assert assigned(config) == (["actor"], ["rollout", "rollout-1"])


def test_python_objects_replace_programs_of_the_file_which_are_not_loaded() -> None:
    class Mine(roost.Worker): ...

    config = placed(actor={"placement": 0, "worker": "no_such_module:Actor"}, rollout=1)
    assert assigned(config, {"actor": Mine, "rollout": Mine}) == (["actor", "rollout"], [])


def test_all_programs_that_cannot_be_loaded_are_named() -> None:
    config = placed(
        actor={"placement": 0, "worker": "no_such_module:A"}, rollout={"placement": 1, "engine": "job_programs:nothing"}
    )
    with pytest.raises(roost.ConfigError) as caught:
        roost.launch(config, cluster="1x2")
    assert caught.value.codes == ("U104", "U104")
    assert "no_such_module:A cannot be loaded: ModuleNotFoundError" in str(caught.value)
    assert "job_programs:nothing cannot be loaded: AttributeError" in str(caught.value)


def test_a_job_without_programs_is_refused() -> None:
    with pytest.raises(roost.ConfigError) as caught:
        roost.launch(placed(actor=0), cluster="1x2")
    assert caught.value.codes == ("U103",)
    assert "programs=" in str(caught.value)


@pytest.mark.parametrize(
    ("components", "given", "message"),
    [
        ({"actor": {"placement": 0, "engine": ENGINE}}, None, "actor has an engine, and its role is actor"),
        ({"actor": 0}, {"actor": 3}, "actor: a worker is a class, not 3"),
        ({"rollout": 0}, {"rollout": 3}, "rollout: an engine is made by a function, not by 3"),
        ({"actor": 0}, {"actr": int}, "a program is named for 'actr', which is no component"),
        (
            {"rollout": {"placement": 0, "engine": ENGINE}, "more": {"placement": 1, "role": "rollout"}},
            None,
            "no engine is named for more, and one is for rollout",
        ),
    ],
)
def test_programs_that_do_not_fit_the_components(
    components: dict[str, Any], given: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(roost.ConfigError) as caught:
        roost.launch(placed(**components), cluster="1x2", programs=given)
    assert caught.value.codes == ("U107",)
    assert message in str(caught.value)


def test_all_problems_of_the_plan_are_raised_before_anything_starts() -> None:
    config = placed(
        a={"placement": "0-1", "gpu_share": 0.8, "worker": ACTOR}, b={"placement": 0, "gpu_share": 0.8, "cpus": 1e6}
    )
    with pytest.raises(roost.PlacementError) as caught:
        roost.launch(config, cluster=roost.Topology.parse("1x2"))
    assert "K101" in caught.value.codes


def test_contradicting_programs_in_a_file() -> None:
    config = placed(
        a={"placement": 0, "worker": ACTOR, "engine": ENGINE}, b={"placement": 1, "worker": ACTOR}, c=2, d=3
    )
    config["cluster"]["programs"] = {"b": ACTOR, "c": "no colon", "d": REWARD}
    with pytest.raises(roost.ConfigError) as caught:
        read_job(config)
    assert caught.value.codes == ("C204", "C204", "C203")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster": 2}, "cluster is a topology"),
        ({"programs": ["actor"]}, "programs is a mapping"),
        ({"programs": {3: roost.Worker}}, "the keys of programs are texts, not 3"),
        ({"rollout_options": [1]}, "rollout_options is a mapping"),
    ],
)
def test_arguments_of_a_wrong_type_start_nothing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(roost.LaunchError, match=message) as caught:
        roost.launch(placed(actor={"placement": 0, "worker": ACTOR}), **arguments)
    assert caught.value.codes == ("W106",)


def test_all_arguments_of_a_wrong_type_are_named_at_once() -> None:
    wrong: dict[str, Any] = {"cluster": 2, "programs": 3, "rollout_options": 4}
    with pytest.raises(roost.LaunchError) as caught:
        roost.launch(placed(actor={"placement": 0, "worker": ACTOR}), **wrong)
    assert caught.value.codes == ("W106",) * 3

"""SGLang as an engine in a job, against a server written to its documentation."""

from __future__ import annotations

import functools
import importlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from processes import is_alive, ray_state, wait_for
from rl_parts import Started, braked, check_complete, new_groups, routed, tokens
from sglang_model import GREEDY, PROMPT, VOCABULARY, likeliest, meant, settings, tiny, write_home, write_package

import roost
from roost.engines.handles import EngineHandle
from roost.engines.http_calls import ask
from roost.engines.sglang.engine import SglangEngine
from roost.rl.rollout import RolloutManager
from roost.rl.train import TrainGroup, TrainWorker
from roost.testing import LocalRay
from roost.worker.watch import Watcher

LONG = {"max_new_tokens": 200, "temperature": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_home(tmp_path_factory.mktemp("sglang"))


class Trainer(TrainWorker):
    """Has the model, and draws it anew."""

    def init(self, seed: int = 7) -> None:
        self.model = tiny(seed)

    def train(self, seed: int) -> None:
        assert self.model is not None
        self.model.load_state_dict(tiny(seed).state_dict())


def job_of(**components: Any) -> dict[str, Any]:
    return {"cluster": {"num_nodes": 4, "component_placement": components}}


def test_the_job_of_the_docs(cluster: roost.Cluster, home: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "sglang.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^```\w+\n# file: (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    (tmp_path / "sglang_job.py").write_text(files["sglang_job.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    config = yaml.safe_load(files["job.yaml"])
    config["cluster"]["num_nodes"] = 4
    config["sglang"] |= {"model": str(home / "model"), **settings(home)}
    module = importlib.import_module("sglang_job")
    ray.cloudpickle.register_pickle_by_value(module)
    assert module.main(cluster, roost.Plan.resolve(config, cluster), config) == 0
    expected = re.findall(r"^step \d: generated.*$", page, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == expected
    assert len(expected) == 2


@pytest.fixture(scope="module")
def job(four_nodes: LocalRay) -> Iterator[roost.Cluster]:
    with roost.Cluster(num_nodes=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def plan(job: roost.Cluster) -> roost.Plan:
    return roost.Plan.resolve(
        job_of(
            actor="0",
            near={"placement": "0", "role": "rollout"},
            far={"placement": "4-5", "role": "rollout"},
            pair={"placement": "7-8", "role": "rollout", "processes_per_engine": 2},
        ),
        job,
    )


@pytest.fixture(scope="module")
def brake(home: Path) -> Path:
    """The brake of the engines."""
    return home / "brake"


@pytest.fixture(scope="module")
def manager(job: roost.Cluster, plan: roost.Plan, home: Path, brake: Path) -> Iterator[RolloutManager]:
    made = functools.partial(
        SglangEngine,
        str(home / "model"),
        options=["--enable-deterministic-inference"],
        **settings(home, TEST_STEP_S="0.01", TEST_BRAKE=str(brake)),
    )
    with RolloutManager(job, plan, made, router={"health_period_s": 1}, name="sglang") as rollout:
        yield rollout


@pytest.fixture(scope="module")
def train(job: roost.Cluster, plan: roost.Plan, manager: RolloutManager) -> Iterator[TrainGroup]:
    with TrainGroup(job, Trainer, plan) as group:
        group.init()
        group.connect(manager)
        yield group


def named(rollout: RolloutManager, name: str) -> EngineHandle:
    return next(engine for engine in rollout.engines if isinstance(engine, EngineHandle) and engine.name == name)


def info(engine: EngineHandle) -> dict[str, Any]:
    return dict(ask(f"{engine.url}/server_info", key=engine.key))


def check_says(rollout: RolloutManager, seed: int, version: int) -> None:
    """All engines say what these weights say: those behind the router, and each by itself."""
    weights = tiny(seed).state_dict()
    groups = rollout.generate(new_groups(VOCABULARY // 2), GREEDY)
    check_complete(groups, [f"g{i}" for i in range(VOCABULARY // 2)], 2, 8)
    assert tokens(groups) == [[meant(weights, group.samples[0].prompt_ids)] * 2 for group in groups]
    assert {number for group in groups for sample in group.samples for number in sample.versions} == {version}
    for engine in rollout.engines:
        assert isinstance(engine, EngineHandle)
        (output,) = engine.call(0, "generate", [PROMPT], GREEDY)[0].wait(30)[0]
        assert (output.output_ids, set(output.versions)) == (meant(weights), {version}), engine.name


def test_every_member_is_started_where_the_plan_says(manager: RolloutManager, four_nodes: LocalRay) -> None:
    near, far, other, pair = (named(manager, name) for name in ("near/0", "far/0", "far/1", "pair/0"))
    assert routed(manager) == sorted(engine.url for engine in (near, far, other, pair))
    for engine, node, gpu in ((near, 0, "0"), (far, 1, "0"), (other, 1, "1"), (pair, 1, "3")):
        found = info(engine)
        place = engine.places[0]
        assert (found["host"], found["port"]) == (four_nodes.node_address(node), place.server_port)
        assert (found["dist_init_addr"], found["nccl_port"]) == (place.dist_init_addr, place.nccl_port)
        assert found["internal_states"][0]["visible"] == gpu
        assert found["base_gpu_id"] == 0
    found = info(pair)
    assert (found["tp_size"], found["nnodes"], found["node_rank"]) == (2, 2, 0)
    assert pair.places[1].host == four_nodes.node_address(2)
    groups = {group.name: group for seen in Watcher().look() for group in seen.groups}
    notes = [rank.note for rank in groups["pair"].workers]
    assert notes == [f"{pair.url} weights 0", "weights 0"], "the second member serves nothing"
    for engine, name, node in ((near, "near-0", 0), (pair, "pair-0-0", 1)):
        last = engine.call(0, "logs")[0].wait(60)[0].splitlines()[-1]
        folder = rf"{os.environ['RAY_TMPDIR']}/ray/session_2[^/]*/logs"  # where `ray logs` shows it
        assert re.fullmatch(
            rf"the whole log: {folder}/roost-roost-{name}-\d+\.log on node {four_nodes.node_address(node)}", last
        )


def test_samples_of_a_group_differ_with_and_without_seeds(manager: RolloutManager) -> None:
    params = {"max_new_tokens": 20, "temperature": 1.0}
    seeded, again = (tokens(manager.generate(new_groups(4, 3), params)) for _ in range(2))
    assert seeded == again, "a seeded group gives the same samples again"
    unseeded = [roost.SampleGroup(f"u{i}", {}, [roost.Sample(PROMPT) for _ in range(3)]) for i in range(4)]
    for groups in (seeded, tokens(manager.generate(unseeded, params))):
        assert len({tuple(sample) for group in groups for sample in group}) == 12


def test_a_seed_that_no_engine_can_hold_is_refused(manager: RolloutManager) -> None:
    bad = [roost.SampleGroup("big", {"seed": 2**63}, [roost.Sample(PROMPT)])]
    with pytest.raises(roost.RolloutError, match=r"group big: seed must be a whole number from 0 to 2\*\*63 - 1"):
        manager.generate(bad, GREEDY)
    assert len(manager.alive_engines) == 4


def test_weights_of_a_trainer(manager: RolloutManager, train: TrainGroup) -> None:
    check_says(manager, 7, 0)
    total = sum(tensor.nbytes for tensor in tiny(7).state_dict().values())
    for seed in (21, 22):
        train.train(seed)
        report = train.update_weights()
        assert report.engines == 4
        assert set(report.bytes_by_transport) == {"shared_memory", "broadcast"}
        assert report.bytes_by_transport["shared_memory"] >= total
        check_says(manager, seed, report.version)
    assert [info(engine)["weight_version"] for engine in manager.engines] == [str(report.version)] * 4


def test_an_update_that_aborts(manager: RolloutManager, train: TrainGroup, brake: Path) -> None:
    train.train(30)
    old = train.update_weights().version
    with braked(brake):
        result = Started(lambda: manager.generate(new_groups(8, 1), LONG))
        wait_for(lambda: sum(info(e)["internal_states"][0]["running"] for e in manager.engines) == 8, "work")
        train.train(31)
        new = train.update_weights(pause="abort").version
    groups = result.result()
    heads = [list(group.samples[0].output_ids) for group in groups]
    assert {group.samples[0].finish_reason for group in groups} == {"abort"}
    assert all(0 < len(head) < 200 for head in heads)
    whole = manager.generate(groups, LONG)
    check_complete(whole, [f"g{i}" for i in range(8)], 1, 200)
    for group, head in zip(whole, heads, strict=True):
        (sample,) = group.samples
        rest = 200 - len(head)
        before = [*sample.prompt_ids, *head]
        assert sample.output_ids == [*head, *likeliest(tiny(31).state_dict(), before, rest)]
        assert sample.versions == [old] * len(head) + [new] * rest


def test_paused_engines_hold_requests(manager: RolloutManager, train: TrainGroup) -> None:
    before = tokens(manager.generate(new_groups(6), GREEDY))
    manager.pause()
    assert all(info(engine)["internal_states"][0]["is_paused"] for engine in manager.engines)
    result = Started(lambda: manager.generate(new_groups(6), GREEDY))
    manager.resume()
    assert tokens(result.result()) == before


def test_an_engine_whose_server_dies_is_found_and_started_again(
    manager: RolloutManager, train: TrainGroup, brake: Path
) -> None:
    train.train(40)
    train.update_weights()
    victim = named(manager, "pair/0")
    expected = manager.generate(new_groups(12), {**GREEDY, "max_new_tokens": 30})
    url, pid = victim.url, info(victim)["internal_states"][0]["pid"]
    with braked(brake):
        result = Started(lambda: manager.generate(new_groups(12), {**GREEDY, "max_new_tokens": 30}))
        wait_for(lambda: info(victim)["internal_states"][0]["running"] > 0, "work")
        os.kill(pid, signal.SIGKILL)
    assert tokens(result.result()) == tokens(expected), "none is lost"
    wait_for(lambda: not victim.is_alive and url not in routed(manager), "its being found dead")
    assert manager.recover() == [victim]
    assert info(victim)["internal_states"][0]["pid"] != pid
    assert not is_alive(pid)
    train.train(41)
    check_says(manager, 41, train.update_weights().version)
    assert victim.url in routed(manager)


def test_an_engine_that_gets_too_little_memory(job: roost.Cluster, home: Path) -> None:
    parts = {"placement": "12", "role": "rollout", "gpu_share": 0.2}
    plan = roost.Plan.resolve(job_of(poor=parts), job)
    before = ray_state()
    made = functools.partial(SglangEngine, str(home / "model"), **settings(home))
    with pytest.raises(roost.RolloutError) as caught:
        RolloutManager(job, plan, made, router=None, name="poor")
    text = str(caught.value)
    assert caught.value.codes == ("E121",)
    assert "poor/0 did not start: SGLang ran out of memory: RuntimeError: Not enough memory." in text
    assert "the plan gives it 20% of 1 GPU" in text
    assert "/logs/roost-roost-poor-0-" in text, "where its whole log is"
    assert "Traceback" not in text.partition("Scheduler hit")[0], "its words, not ours"
    wait_for(lambda: ray_state() == before, "as it was before")


def test_an_sglang_that_is_too_old(job: roost.Cluster, home: Path, tmp_path: Path) -> None:
    plan = roost.Plan.resolve(job_of(old={"placement": "15", "role": "rollout"}), job)
    write_package(tmp_path, "0.5.2")
    made = functools.partial(SglangEngine, str(home / "model"), env={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(roost.RolloutError, match=r"old/0 did not start: SGLang 0\.5\.2 is too old") as caught:
        RolloutManager(job, plan, made, router=None, name="old")
    assert caught.value.codes == ("E122",)

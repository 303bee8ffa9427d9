"""SGLang as an engine, against a server written to its documentation: its commands, its place in a job, its end."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import yaml
from processes import is_alive, ray_state, wait_for
from rl_parts import Started, check_complete, new_groups, routed, tokens
from sglang_model import VOCABULARY, likeliest, tiny, write_model, write_package
from torch.multiprocessing.reductions import reduce_tensor

import roost
from roost.rl.child import ask
from roost.rl.engine import EnginePlace
from roost.rl.handles import EngineHandle
from roost.rl.rollout import RolloutManager
from roost.rl.sglang.engine import SglangEngine
from roost.rl.sglang.intake import FolderIntake, GroupIntake, buckets_of, payload_of
from roost.rl.sglang.sender import DirectSender
from roost.rl.train import TrainGroup, TrainWorker
from roost.rl.weights.channels import Channel, Piece
from roost.rl.weights.files import version_folder
from roost.testing import LocalRay
from roost.worker.watch import Watcher

GREEDY = {"max_new_tokens": 8, "temperature": 0}
LONG = {"max_new_tokens": 200, "temperature": 0}
PROMPT = [1, 2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and with a package that is called as SGLang is."""
    folder = tmp_path_factory.mktemp("sglang")
    write_model(folder / "model")
    write_package(folder / "package")
    return folder


def settings(home: Path, **env: str) -> dict[str, Any]:
    return {"env": {"PYTHONPATH": str(home / "package"), **env}}


@contextlib.contextmanager
def serving(home: Path, place: EnginePlace, step_s: float = 0.0, **arguments: Any) -> Iterator[SglangEngine]:
    engine = SglangEngine(str(home / "model"), **settings(home, TEST_STEP_S=str(step_s)), **arguments)
    with roost.lease_ports(2) as lease:
        assert engine.start(
            EnginePlace(nccl_port=lease.port, dist_init_addr=f"127.0.0.1:{lease.port + 1}", **vars_of(place))
        )
        try:
            get_healthy(engine)
            yield engine
        finally:
            engine.stop()


def get_healthy(engine: SglangEngine) -> None:
    while engine.health():
        time.sleep(0.02)


def vars_of(place: EnginePlace) -> dict[str, Any]:
    plain = vars(EnginePlace())
    return {name: value for name, value in vars(place).items() if value != plain[name]}


@pytest.fixture(scope="module")
def engine(home: Path) -> Iterator[SglangEngine]:
    """One engine of two ranks, slow enough to be interrupted, whose memory can be taken away."""
    place = EnginePlace(engine=3, accelerators=(0, 1), gpu_share=0.5)
    with serving(home, place, 0.01, offload=True, seed=40) as started:
        yield started


def state(engine: SglangEngine) -> dict[str, Any]:
    return dict(engine.info()["internal_states"][0])


def said(engine: SglangEngine, prompt: Sequence[int] = PROMPT) -> tuple[list[int], set[int]]:
    """What an engine says at temperature 0, and which versions said it."""
    (output,) = engine.generate([prompt], GREEDY)
    assert output.finish_reason == "length"
    assert len(output.logprobs) == 8
    return output.output_ids, set(output.versions)


def meant(weights: Mapping[str, torch.Tensor], prompt: Sequence[int] = PROMPT) -> list[int]:
    return likeliest(weights, prompt, 8)


# The engine by itself -----------------------------------------------------------------------------


def test_it_is_started_as_its_place_says(engine: SglangEngine) -> None:
    found = engine.info()
    assert (found["tp_size"], found["base_gpu_id"], found["nnodes"], found["node_rank"]) == (2, 0, 1, 0)
    assert (found["mem_fraction_static"], found["random_seed"], found["device"]) == (0.45, 43, "cpu")
    assert found["skip_tokenizer_init"]
    assert found["enable_weights_cpu_backup"]
    assert (engine.broadcast, engine.broadcast_ranks) == ("sglang-gloo", 2)
    assert found["version"] == "0.5.9"


def test_it_generates(engine: SglangEngine) -> None:
    outputs = engine.generate([PROMPT, [5]], {**GREEDY, "n": 2})
    assert [output.output_ids for output in outputs[:2]] == [meant(tiny(7).state_dict())] * 2
    assert [output.output_ids for output in outputs[2:]] == [meant(tiny(7).state_dict(), [5])] * 2
    drawn = [engine.generate([PROMPT], {"max_new_tokens": 8, "seed": seed})[0] for seed in (1, 1, 2)]
    assert drawn[0].output_ids == drawn[1].output_ids != drawn[2].output_ids
    with pytest.raises(roost.RolloutError, match="tempature"):
        engine.generate([PROMPT], {"tempature": 1})


def test_the_tensors_that_it_wants(engine: SglangEngine) -> None:
    assert engine.describe_weights() == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tiny(7).state_dict().items()
    }


def pieces(weights: Mapping[str, torch.Tensor]) -> tuple[Piece, ...]:
    found = []
    for name, tensor in weights.items():
        box, shape = tuple((0, size) for size in tensor.shape), tuple(tensor.shape)
        kind = str(tensor.dtype).removeprefix("torch.")
        found.append(Piece(name, kind, shape, box, box, box, shape, 0, tensor.nbytes))
    return tuple(found)


def by_tensor(engine: SglangEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> None:
    """As handles come: what rebuilds each tensor, for each rank."""
    commands = []
    for bucket in buckets_of(pieces(weights), engine.bucket_bytes):
        payload = payload_of((piece.name, *reduce_tensor(weights[piece.name])) for piece in bucket)
        commands.append(("update_weights_from_tensor", {"serialized_named_tensors": [payload] * 2}))
    assert len(commands) == (2 if engine.bucket_bytes == 1000 else 1)
    engine.update(commands, version)


def by_group(engine: SglangEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> None:
    """Twice over the same group, as a trainer does."""
    kind = roost.WeightTransport.BROADCAST
    channel = Channel("c", kind, 0, (5,), pieces(weights), 0, "sglang-gloo", (1,), 1 + engine.broadcast_ranks)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sender = DirectSender(channel, "127.0.0.1", 60)
    joining = Started(sender.join)
    intake = GroupIntake(engine, [channel], {"c": sender.address}, 5, 60)
    joining.result()
    for number, sent in enumerate([tiny(99).state_dict(), weights], version - 1):
        sending = Started(functools.partial(sender.send, sent, number))
        intake.commit(number)
        sending.result()
    intake.close()
    sender.close()


def by_folder(engine: SglangEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> None:
    """From a folder that trainers wrote."""
    from safetensors.torch import save_file

    (there := version_folder(str(folder), version)).mkdir()
    save_file(dict(weights), there / "model.safetensors")
    FolderIntake(engine, str(folder)).commit(version)


def by_memory(engine: SglangEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> None:
    """Whatever came to the worker."""
    engine.load_weights(weights, version)


@pytest.mark.parametrize("way", [by_tensor, by_group, by_folder, by_memory])
@pytest.mark.parametrize("is_paused", [True, False], ids=["paused", "not paused"])
def test_what_it_says_is_what_the_weights_say(
    engine: SglangEngine, tmp_path: Path, way: Callable[..., None], is_paused: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr("roost.rl.sglang.engine.BUCKET_BYTES", 1000)  # several commands
    before = engine.version
    weights = tiny(100 + before).state_dict()
    if is_paused:
        engine.pause()
    way(engine, weights, before + 2, tmp_path)
    if is_paused:
        assert state(engine)["is_paused"]
        engine.resume()
    assert engine.version == before + 2
    for prompt in (PROMPT, [30], [9, 9, 3]):
        assert said(engine, prompt) == (meant(weights, prompt), {before + 2})


def test_an_update_waits_for_what_runs_and_holds_what_comes(engine: SglangEngine) -> None:
    old, new = engine.version, engine.version + 1
    weights = tiny(55).state_dict()
    before = said(engine)[0]
    running = Started(lambda: engine.generate([PROMPT], LONG)[0])
    wait_for(lambda: state(engine)["running"] == 1, "work")
    engine.load_weights(weights, new)  # as an update that does not pause
    later = Started(lambda: said(engine))
    output = running.result()
    assert (output.finish_reason, output.output_ids[:8]) == ("length", before), "it was finished with the old weights"
    assert len(output.output_ids) == 200
    assert old != new
    assert later.result() == (meant(weights), {new})


def test_pausing_aborts_or_waits_and_holds(engine: SglangEngine) -> None:
    whole = engine.generate([PROMPT], LONG)[0].output_ids
    for mode in ("abort", "wait"):
        running = Started(lambda: engine.generate([PROMPT], LONG)[0])
        wait_for(lambda: state(engine)["running"] == 1, "work")
        engine.pause(mode)
        assert state(engine)["running"] == 0
        output = running.result()
        assert output.finish_reason == ("abort" if mode == "abort" else "length")
        assert output.output_ids == whole[: len(output.output_ids)]
        assert (len(output.output_ids) < 200) is (mode == "abort")
        assert engine.health() == "", "a paused engine is healthy"
        held = Started(lambda: said(engine))
        time.sleep(0.1)
        assert state(engine)["running"] == 0
        engine.pause(mode)
        engine.resume()
        assert held.result()[0] == whole[:8]
    with pytest.raises(roost.RolloutError, match="'never' is no way to pause"):
        engine.pause("never")


def test_aborting_one_request(engine: SglangEngine) -> None:
    body = {"input_ids": PROMPT, "rid": "mine", "sampling_params": LONG}
    mine = Started(lambda: ask(f"{engine._url}/generate", "POST", body))
    other = Started(lambda: engine.generate([PROMPT], LONG)[0])
    wait_for(lambda: state(engine)["running"] == 2, "work")
    engine.abort("mine")
    assert mine.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert state(engine)["running"] == 1
    engine.abort()
    assert other.result().finish_reason == "abort"


def test_memory_is_given_and_taken(engine: SglangEngine) -> None:
    before = said(engine)
    running = Started(lambda: engine.generate([PROMPT], LONG)[0])
    wait_for(lambda: state(engine)["running"] == 1, "work")
    engine.offload()
    engine.offload()
    assert running.result().finish_reason == "length", "what ran was finished"
    assert state(engine)["offloaded"] == ["kv_cache", "weights"]
    assert engine.health() == ""
    held = Started(lambda: said(engine))
    engine.pause()
    engine.resume()
    assert state(engine)["is_paused"], "still: its memory is away"
    engine.onload()
    engine.onload()
    assert held.result() == before, "its weights are those that it had"

    engine.offload()
    weights, version = tiny(66).state_dict(), engine.version + 1
    engine.load_weights(weights, version)
    assert state(engine)["offloaded"] == ["kv_cache", "weights"], "an update does not bring its memory back"
    engine.pause()
    engine.onload()
    assert state(engine)["is_paused"]
    engine.resume()
    assert said(engine) == (meant(weights), {version})


# What goes wrong ----------------------------------------------------------------------------------


def test_an_update_that_fails_ends_it(home: Path) -> None:
    with serving(home, EnginePlace()) as engine:
        wrong = {**tiny(1).state_dict(), "scale": torch.ones(3)}
        with pytest.raises(roost.RolloutError, match=r"was not taken, and the engine was ended.*load weight \(3,\)"):
            engine.load_weights(wrong, 1)
        assert engine.version == 0
        with pytest.raises(roost.RolloutError, match="was not taken") as error:
            engine.health()
        assert error.value.codes == ("E124",)
        wait_for(lambda: "version 1 of the weights was not taken" in engine.ended(), "its end")


def test_a_server_that_is_killed(home: Path) -> None:
    with serving(home, EnginePlace()) as engine:
        os.kill(state(engine)["pid"], signal.SIGKILL)
        wait_for(lambda: "SGLang ended with exit code 137" in engine.ended(), "its end")
        with pytest.raises(roost.RolloutError, match="SGLang ended") as error:
            engine.pause()
        assert error.value.codes == ("E121",)
        engine.stop()
        assert engine.ended() == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        (["--mem-fraction-static", "0.99"], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=["too little", "too much"],
)
def test_too_little_memory_is_said_in_its_own_words(home: Path, options: list[str], words: str) -> None:
    place = EnginePlace(accelerators=(0,), gpu_share=0.1)
    with pytest.raises(roost.RolloutError) as error, serving(home, place, options=options):
        pass
    text = str(error.value)
    assert error.value.codes == ("E121",)
    assert f"SGLang ran out of memory: {words}" in text
    given = options[-1] if options else "0.090"
    assert f"the plan gives it 10% of 1 GPU; it was started with --mem-fraction-static {given}" in text
    assert "gpu_share: 0.3" in text


def test_options_that_it_does_not_know(home: Path) -> None:
    with (
        pytest.raises(roost.RolloutError, match="unrecognized arguments: --no-such-thing") as error,
        serving(home, EnginePlace(), options=["--no-such-thing"]),
    ):
        pass
    assert error.value.codes == ("E121",)


def test_commands_that_it_does_not_have(home: Path) -> None:
    engine = SglangEngine(str(home / "model"), **settings(home, TEST_WITHOUT="/pause_generation"))
    with roost.lease_ports() as lease:
        engine.start(EnginePlace(nccl_port=lease.port))
        with pytest.raises(roost.RolloutError, match="this SGLang has no /pause_generation") as error:
            get_healthy(engine)
        assert error.value.codes == ("E122",)
        assert "SGLang 0.5.6 and newer have them" in str(error.value)
        engine.stop()


# In a job -------------------------------------------------------------------------------------------


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
    page = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text(encoding="utf-8")
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
def manager(job: roost.Cluster, plan: roost.Plan, home: Path) -> Iterator[RolloutManager]:
    made = functools.partial(SglangEngine, str(home / "model"), **settings(home, TEST_STEP_S="0.01"))
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
    return dict(ask(f"{engine.url}/server_info"))


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


def test_an_update_that_aborts(manager: RolloutManager, train: TrainGroup) -> None:
    train.train(30)
    old = train.update_weights().version
    result = Started(lambda: manager.generate(new_groups(8, 1), LONG))
    wait_for(lambda: all(info(e)["internal_states"][0]["running"] for e in manager.engines), "work")
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


def test_an_engine_whose_server_dies_is_found_and_started_again(manager: RolloutManager, train: TrainGroup) -> None:
    train.train(40)
    train.update_weights()
    victim = named(manager, "pair/0")
    expected = manager.generate(new_groups(12), {**GREEDY, "max_new_tokens": 30})
    result = Started(lambda: manager.generate(new_groups(12), {**GREEDY, "max_new_tokens": 30}))
    wait_for(lambda: info(victim)["internal_states"][0]["running"] > 0, "work")
    url, pid = victim.url, info(victim)["internal_states"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert tokens(result.result()) == tokens(expected), "none is lost"
    wait_for(lambda: not victim.is_alive and url not in routed(manager), "its being found dead", 30)
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
    assert "Traceback" not in text.partition("Scheduler hit")[0], "its words, not ours"
    wait_for(lambda: ray_state() == before, "as it was before")


def test_an_sglang_that_is_too_old(job: roost.Cluster, home: Path, tmp_path: Path) -> None:
    plan = roost.Plan.resolve(job_of(old={"placement": "15", "role": "rollout"}), job)
    write_package(tmp_path, "0.5.2")
    made = functools.partial(SglangEngine, str(home / "model"), env={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(roost.RolloutError, match=r"old/0 did not start: SGLang 0\.5\.2 is too old") as caught:
        RolloutManager(job, plan, made, router=None, name="old")
    assert caught.value.codes == ("E122",)

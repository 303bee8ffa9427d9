"""Two vLLM engines on one machine, one of them over two workers: what they serve, take, and survive."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import alive, wait_for
from rl_parts import Started, asked, check_complete, routed
from vllm_parts import CONTEXT, OPTIONS, VOCABULARY, Learner

import roost
from roost.cluster.warden import remember, start_of
from roost.engines import EngineClient
from roost.engines.handles import EngineHandle
from roost.rl.rollout import RolloutManager
from roost.rl.train import TrainGroup

JOB = {
    "cluster": {
        "num_nodes": 1,
        "component_placement": {
            "actor": {"placement": "0-1", "gpu_share": 0.5},
            "one": {"placement": "0", "role": "rollout", "gpu_share": 0.5},  # reads the trainer's memory
            "two": {"placement": "2-3:0", "role": "rollout"},  # over two workers, and gets weights by broadcast
        },
    }
}
PROMPTS = [[1, 2, 3], [7] * 20, [VOCABULARY - 1], [5, 4, 3, 2]]
LENGTH = 12
GREEDY = {"max_new_tokens": LENGTH, "temperature": 0}
LONG = {"max_new_tokens": 600, "temperature": 1.0}
LENGTHS = (600, 600, 1200, 2400, 3600)
"""How many tokens to ask for until an update comes while they are made: not each does on a busy machine."""
CLOSE = 2e-4
"""How far log probabilities of the same weights may be apart in 32 bits."""

Parts = tuple[TrainGroup, RolloutManager]


@pytest.fixture(scope="module")
def job(one_node: object) -> Iterator[roost.Cluster]:
    with roost.Cluster(num_nodes=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def parts(job: roost.Cluster, model: Path) -> Iterator[Parts]:
    plan = roost.Plan.resolve(JOB, job)
    engine = functools.partial(roost.VllmEngine, str(model), options=OPTIONS)
    starting = Started(lambda: TrainGroup(job, Learner, plan))
    with (
        RolloutManager(job, plan, engine, router={"health_period_s": 1}, start_timeout_s=600) as rollout,
        starting.result(600) as train,
    ):
        train.init(str(model))
        train.connect(rollout)
        yield train, rollout


def engines(rollout: RolloutManager) -> list[EngineHandle]:
    return [engine for engine in rollout.engines if isinstance(engine, EngineHandle)]


def groups_of(count: int, samples: int = 1) -> list[roost.SampleGroup]:
    return [
        roost.SampleGroup(f"g{i}", {"seed": i}, [roost.Sample([1, 2, i], index=j) for j in range(samples)])
        for i in range(count)
    ]


def processes_of(engine: EngineHandle) -> dict[int, str]:
    """The processes of an engine, the worker's among them, and their command lines."""
    (state,) = engine.group.states(range(engine.first, engine.first + 1), timeout_s=10.0)
    known: dict[int, str] = {}
    remember(state["pid"], start_of(state["pid"]) or "", known)
    found = {state["pid"]: "worker"}
    for pid in known:
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def direct(engine: EngineHandle, prompts: list[list[int]], params: dict[str, Any]) -> list[roost.EngineOutput]:
    return engine.call(0, "generate", prompts, params)[0].wait(120)[0]


def check_greedy(train: TrainGroup, rollout: RolloutManager, version: int) -> list[list[int]]:
    """Every engine gives exactly what the trainer's model gives."""
    expected = train.workers.execute_on(0).greedy(PROMPTS, LENGTH).wait()[0]
    for engine in engines(rollout):
        outputs = direct(engine, PROMPTS, GREEDY)
        assert [output.output_ids for output in outputs] == expected
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.versions == [version] * LENGTH
            logprobs = train.workers.execute_on(0).logprobs(prompt, output.output_ids).wait()[0]
            assert output.logprobs == pytest.approx(logprobs, abs=CLOSE)
    return expected


# What they serve ----------------------------------------------------------------------------------


def test_each_engine_is_a_vllm_of_its_own_behind_the_router(parts: Parts) -> None:
    _, rollout = parts
    one, two = engines(rollout)
    assert routed(rollout) == sorted([one.url, two.url])
    said = [asked(engine) for engine in (one, two)]
    assert [info["engine"] for info in said] == ["VllmEngine"] * 2
    assert [info["vllm_workers"] for info in said] == [1, 2]
    assert all(info["vllm_version"].startswith("0.") and info["context_length"] == CONTEXT for info in said)
    command = next(words for words in processes_of(two).values() if "inside.py serve" in words)
    assert "--tensor-parallel-size 2 --distributed-executor-backend mp" in command


def test_nobody_else_reaches_the_commands_of_vllm(parts: Parts) -> None:
    for engine in engines(parts[1]):
        found = processes_of(engine)
        words = next(words.split() for words in found.values() if "inside.py serve" in words)
        folder = Path(words[words.index("--uds") + 1]).parent
        assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.getuid())
        assert len([path for path in folder.iterdir() if path.is_socket()]) > 1, "its own are there, too"
        own = [pid for pid, words in found.items() if words != "worker" and psutil.pid_exists(pid)]
        assert len(own) > 1
        ports = [
            made.laddr for pid in own for made in psutil.Process(pid).net_connections("tcp") if made.status == "LISTEN"
        ]
        for address in ports:  # none on a CPU; torch and NCCL have some on GPUs
            answer = b""
            with contextlib.suppress(OSError), socket.create_connection(address, 5) as made:
                made.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = made.recv(20)
            assert not answer.startswith(b"HTTP"), address


def test_samples_through_the_router_are_those_of_the_model(parts: Parts) -> None:
    _, rollout = parts
    groups = rollout.generate(groups_of(12, 3), {"max_new_tokens": 8, "temperature": 1.0})
    check_complete(groups, [f"g{i}" for i in range(12)], 3, 8)
    assert {version for group in groups for sample in group.samples for version in sample.versions} == {rollout.version}
    assert len({tuple(sample.output_ids) for group in groups for sample in group.samples}) == 36
    again = rollout.generate(groups_of(12, 3), {"max_new_tokens": 8, "temperature": 1.0})
    assert [s.output_ids for g in again for s in g.samples] == [s.output_ids for g in groups for s in g.samples]


def test_sampling_parameters(parts: Parts) -> None:
    train, rollout = parts
    one = engines(rollout)[0]
    (greedy,) = direct(one, [[1, 2, 3]], GREEDY)
    stop = greedy.output_ids[4]
    (stopped,) = direct(one, [[1, 2, 3]], {**GREEDY, "stop_token_ids": [stop]})
    assert stopped.output_ids == greedy.output_ids[: greedy.output_ids.index(stop) + 1]
    assert (stopped.finish_reason, greedy.finish_reason) == ("stop", "length")
    (only,) = direct(one, [[1, 2, 3]], {"max_new_tokens": LENGTH, "temperature": 2.0, "top_k": 1})
    assert only.output_ids == greedy.output_ids
    assert only.logprobs == pytest.approx([0.0] * LENGTH, abs=1e-6), "of the distribution that they were drawn from"
    (warm,) = direct(one, [[1, 2, 3]], {"max_new_tokens": LENGTH, "temperature": 1.5, "seed": 3})
    plain = train.workers.execute_on(0).logprobs([1, 2, 3], warm.output_ids).wait()[0]
    assert warm.logprobs != pytest.approx(plain, abs=CLOSE), "the temperature is in them"


def test_bad_requests_are_refused_and_harm_nobody(parts: Parts) -> None:
    one = engines(parts[1])[0]
    client = EngineClient(one.url, key=one.key)
    bad = [
        {"input_ids": [VOCABULARY]},
        {"input_ids": [1] * CONTEXT},
        {"input_ids": [1], "sampling_params": {"tempature": 1}},
        {"input_ids": [1], "sampling_params": {"top_p": 7.0}},
        {"input_ids": [1], "sampling_params": {"stop": "."}},
    ]
    answers = client.generate_all([*bad, {"input_ids": [1], "sampling_params": GREEDY}], return_errors=True)
    client.close()
    words = ["out of range", "context is 4,096", "unknown sampling parameter", "top_p must be in", "not supported"]
    for word, answer in zip(words, answers, strict=False):
        assert word in str(answer)
        assert "1 attempt," in str(answer)
    assert len(answers[-1][0].output_ids) == LENGTH


# What they take -----------------------------------------------------------------------------------


def test_outputs_change_exactly_as_the_weights_say(parts: Parts) -> None:
    train, rollout = parts
    before = check_greedy(train, rollout, rollout.version)
    for _ in range(2):
        train.train(rollout.version + 1)
        report = train.update_weights()
        assert report.version == rollout.version
        assert set(report.bytes_by_transport) == {"shared_memory", "broadcast"}
        after = check_greedy(train, rollout, rollout.version)
        assert after != before
        assert [asked(engine)["weight_version"] for engine in engines(rollout)] == [str(rollout.version)] * 2
        before = after


def test_vllms_workers_read_the_memory_that_the_trainer_writes(parts: Parts) -> None:
    train, rollout = parts
    train.update_weights()

    def readers(engine: EngineHandle, what: str) -> set[str]:
        """Which of its processes have mapped memory of that name."""
        found = set()
        for pid, words in processes_of(engine).items():
            if f"memfd:roost-{what}" in Path(f"/proc/{pid}/maps").read_text():
                found.add(words.split()[0])
        return found

    one, two = engines(rollout)
    assert readers(one, "actor-weights") == {"VLLM::Worker"}, "nothing passes through the rollout worker"
    assert readers(two, "actor-weights") == set()
    assert readers(two, "own") == {"worker", "VLLM::Worker_TP0", "VLLM::Worker_TP1"}


def test_an_update_that_waits_finishes_what_runs(parts: Parts) -> None:
    train, rollout = parts
    old = rollout.version
    running = Started(lambda: rollout.generate(groups_of(4), LONG))
    wait_for(lambda: any(asked(engine)["num_running_samples"] for engine in engines(rollout)), "work")
    train.update_weights(pause="wait")
    groups = running.result()
    assert {version for group in groups for version in group.samples[0].versions} == {old}


def test_an_update_that_aborts_returns_what_there_is_and_it_goes_on(parts: Parts) -> None:
    train, rollout = parts
    for length in LENGTHS:
        request = {**LONG, "max_new_tokens": length}
        old = rollout.version
        running = Started(functools.partial(rollout.generate, groups_of(8), request))
        wait_for(lambda: any(asked(engine)["num_running_samples"] for engine in engines(rollout)), "work")
        train.update_weights(pause="abort")
        groups = running.result()
        cut = [group for group in groups if group.samples[0].finish_reason == "abort"]
        check_complete(rollout.generate(groups, request), [f"g{i}" for i in range(8)], 1, length)
        for group in cut:
            versions = group.samples[0].versions
            assert versions == sorted(versions)
            assert set(versions) <= {old, rollout.version}
            assert versions[-1] == rollout.version
        if cut:
            return
    pytest.fail("no update came before all was finished")


def test_an_update_that_keeps_requests_is_exact_about_each_token(parts: Parts) -> None:
    train, rollout = parts
    one, prompt = engines(rollout)[0], [1, 2, 3]
    for length in LENGTHS:
        request = {**LONG, "max_new_tokens": length, "seed": 1}
        (whole,) = direct(one, [prompt], request)
        expected = train.workers.execute_on(0).logprobs(prompt, whole.output_ids).wait()[0]
        old = rollout.version
        train.train(100 + length)
        running = Started(functools.partial(direct, one, [prompt], request))
        wait_for(lambda: asked(one)["num_running_samples"] > 0, "work")
        train.update_weights(pause="keep")
        (output,) = running.result()
        made = output.versions.count(old)
        assert output.versions == [old] * made + [rollout.version] * (length - made)
        assert output.output_ids[:made] == whole.output_ids[:made]
        assert output.logprobs[:made] == pytest.approx(expected[:made], abs=CLOSE)
        renewed = train.workers.execute_on(0).logprobs(prompt, output.output_ids).wait()[0]
        assert output.logprobs[made:] == pytest.approx(renewed[made:], abs=CLOSE), "nothing old is left in its cache"
        if 0 < made < length:
            return
    pytest.fail("no update came while tokens were made")


# What they are told -------------------------------------------------------------------------------


@pytest.mark.parametrize(("hold", "go_on"), [("pause", "resume"), ("offload", "onload")])
def test_requests_are_held(parts: Parts, hold: str, go_on: str) -> None:
    train, rollout = parts
    getattr(rollout, hold)()
    try:
        held = Started(lambda: rollout.generate(groups_of(2), GREEDY))
        wait_for(lambda: sum(asked(engine)["num_running_samples"] for engine in engines(rollout)) == 2, "their arrival")
        assert all(engine.call(0, "health")[0].wait()[0] == "" for engine in engines(rollout))
        train.train(rollout.version)
        assert all(asked(engine)["num_running_samples"] for engine in engines(rollout))
    finally:
        getattr(rollout, go_on)()
    check_complete(held.result(), ["g0", "g1"], 1, LENGTH)
    train.update_weights()


def test_a_sleeping_engine_takes_weights(parts: Parts) -> None:
    train, rollout = parts
    rollout.offload()
    train.train(200)
    train.update_weights()
    held = Started(lambda: rollout.generate(groups_of(1), GREEDY))
    wait_for(lambda: any(asked(engine)["num_running_samples"] for engine in engines(rollout)), "its arrival")
    rollout.onload()
    (group,) = held.result()
    assert group.samples[0].versions == [rollout.version] * LENGTH
    check_greedy(train, rollout, rollout.version)


# What they survive --------------------------------------------------------------------------------


def test_vllm_that_is_killed_and_a_worker_that_is_killed_come_back(parts: Parts) -> None:
    train, rollout = parts
    one, two = engines(rollout)
    family = processes_of(one)
    server = next(pid for pid, words in family.items() if "inside.py serve" in words and "leash.py" not in words)
    url = one.url
    running = Started(lambda: rollout.generate(groups_of(16), {"max_new_tokens": 60, "temperature": 1.0}))
    wait_for(lambda: asked(one)["num_running_samples"] > 0, "work")
    os.kill(server, signal.SIGKILL)
    check_complete(running.result(300), [f"g{i}" for i in range(16)], 1, 60)
    wait_for(lambda: url not in routed(rollout), "its leaving the router", 60)
    wait_for(lambda: not alive(family), "the end of its processes", 60)
    assert rollout.alive_engines == [two]

    other = processes_of(two)
    os.kill(next(pid for pid, words in other.items() if words == "worker"), signal.SIGKILL)
    wait_for(lambda: not alive(other), "vLLM's end with its worker", 60)
    wait_for(lambda: not rollout.alive_engines, "its being missed", 60)

    assert rollout.recover() == [one, two]
    train.update_weights()
    check_greedy(train, rollout, rollout.version)
    assert routed(rollout) == sorted([one.url, two.url])

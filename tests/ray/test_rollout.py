"""Engines, their router, buffer and lock: where they are, what they generate, and how they die."""

from __future__ import annotations

import functools
import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import alive, ray_state, wait_for
from ray_drivers import Driver
from rl_parts import (
    SERVED_KEY,
    Pair,
    Polite,
    Sick,
    Started,
    Stillborn,
    Talker,
    Trainer,
    asked,
    braked,
    check_complete,
    new_groups,
    routed,
    running,
    serving,
    tokens,
    told,
)

import roost
from roost.cluster.warden import remember, start_of
from roost.data.samples import SampleGroup
from roost.engines.engine import EnginePlace
from roost.engines.handles import EngineHandle
from roost.engines.http_calls import ask
from roost.engines.keys import make_key
from roost.rl import hub as hub_module
from roost.rl.hub import CONCURRENCY, BufferClient, LockClient
from roost.rl.rollout import RolloutManager
from roost.rl.train import TrainGroup
from roost.testing import LocalRay
from roost.worker.lane import LaneClient, LaneServer
from roost.worker.watch import Watcher

PARAMS = {"max_new_tokens": 16, "temperature": 1.0}
ROUTER_KEY = make_key()
LONG = {"max_new_tokens": 150, "temperature": 1.0}
ROWS = 4
"""Samples that a small engine computes at a time. A step of it calls the model for each of them at most once."""


class Quiet(Pair):
    """Serves nothing: the router does not see it."""

    def start(self, place: EnginePlace) -> str:
        super().start(place)
        return ""


def job_of(**components: Any) -> dict[str, Any]:
    return {"cluster": {"num_nodes": 4, "component_placement": components}}


JOB = job_of(
    actor="0",
    small={"placement": "1-2", "role": "rollout"},
    pair={"placement": "7-8", "role": "rollout", "processes_per_engine": 2},
    kept={"placement": "10-11", "role": "rollout", "placeholder": True},
)


@pytest.fixture(scope="module")
def job(four_nodes: LocalRay) -> Iterator[roost.Cluster]:
    with roost.Cluster(num_nodes=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def plan(job: roost.Cluster) -> roost.Plan:
    return roost.Plan.resolve(JOB, job)


@pytest.fixture(scope="module")
def brake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The brake of the small engines."""
    return tmp_path_factory.mktemp("rollout") / "brake"


@pytest.fixture(scope="module")
def manager(job: roost.Cluster, plan: roost.Plan, brake: Path) -> Iterator[RolloutManager]:
    engines = {"small": functools.partial(Talker, delay_s=0.01, brake=str(brake)), "pair": Quiet}
    with RolloutManager(
        job,
        plan,
        engines,
        dp_size=2,
        dp_attention=True,
        lock_ttl_s=10.0,
        router={"health_period_s": 1, "key": ROUTER_KEY},
    ) as rollout:
        yield rollout


@pytest.fixture(scope="module")
def train(job: roost.Cluster, plan: roost.Plan, manager: RolloutManager) -> Iterator[TrainGroup]:
    with TrainGroup(job, Trainer, plan) as group:
        group.init()
        group.connect(manager)
        yield group


@pytest.fixture
def rollout(manager: RolloutManager, train: TrainGroup) -> RolloutManager:
    """With all engines alive, and a version of the trainer's in each."""
    manager.recover()
    if not manager.version or any(engine.version != manager.version for engine in manager.engines):
        train.update_weights()
    return manager


def smalls(rollout: RolloutManager) -> list[EngineHandle]:
    return [
        engine for engine in rollout.engines if isinstance(engine, EngineHandle) and engine.component.name == "small"
    ]


def descendants(pid: int) -> list[int]:
    known: dict[int, str] = {}
    remember(pid, start_of(pid) or "", known)
    return list(known)


# Where they are -----------------------------------------------------------------------------------


def test_engines_are_where_their_share_is(
    manager: RolloutManager, job: roost.Cluster, four_nodes: LocalRay, free_gpus: Callable[[], float]
) -> None:
    assert [engine.name for engine in manager.engines] == ["pair/0", "small/0", "small/1"]
    first, second = smalls(manager)
    for index, engine in enumerate((first, second)):
        found = told(engine)
        assert found["place"]["host"] == four_nodes.node_address(0), "measured: the share begins in the middle"
        assert found["place"]["accelerators"] == [str(1 + index)]
        assert found["visible"] == str(1 + index)
        assert found["place"]["engine"] == index
        assert engine.url == f"http://{four_nodes.node_address(0)}:{found['place']['ports'][0]}"
    assert routed(manager) == sorted([first.url, second.url])
    groups = roost.WorkerManager.get_proxy().get_groups()
    assert "kept" not in groups
    wait_for(lambda: free_gpus() in (10.0, 9.0), "6 reserved, 2 of them for nothing, and perhaps the trainer's")


def test_engines_and_the_hub_tell_who_watches_where_they_serve(manager: RolloutManager) -> None:
    groups = {group.name: group for found in Watcher().look() for group in found.groups}
    assert [rank.note for rank in groups["small"].workers] == [f"{e.url} weights {e.version}" for e in smalls(manager)]
    (hub,) = [rank for name, group in groups.items() if name.endswith("-hub") for rank in group.workers]
    assert hub.note.startswith("router http://")


def test_members_meet_at_one_address_on_the_first_ones_node(manager: RolloutManager, four_nodes: LocalRay) -> None:
    pair = next(engine for engine in manager.engines if engine.name == "pair/0")
    members = [told(pair, member) for member in range(2)]
    places = [member["place"] for member in members]
    assert [place["host"] for place in places] == [four_nodes.node_address(1), four_nodes.node_address(2)]
    assert [place["accelerators"] for place in places] == [["3"], ["0"]]
    assert places[0]["dist_init_addr"] == places[1]["dist_init_addr"]
    assert places[0]["dist_init_addr"] == f"{four_nodes.node_address(1)}:{places[0]['ports'][2]}"
    assert [member["total"] for member in members] == [11.0, 11.0], "1 + 10, added up over a group that met there"


def test_every_port_is_one_engines_own(manager: RolloutManager) -> None:
    places = [told(engine, member)["place"] for engine in manager.engines for member in range(engine.num_members)]
    for place in places:
        run = place["ports"][2:]
        assert place["run"] == len(run) == (30 + 2) + (4 + 2)
        assert run == list(range(run[0], run[0] + len(run)))
    ports = [port for place in places for port in place["ports"]]
    assert len(ports) == len(set(ports)) == 4 * 40


# What they generate -------------------------------------------------------------------------------


def test_samples_come_in_order_and_the_same_from_any_engine(rollout: RolloutManager) -> None:
    groups = rollout.generate(new_groups(10, 3), PARAMS)
    check_complete(groups, [f"g{i}" for i in range(10)], 3, 16)
    assert {number for group in groups for sample in group.samples for number in sample.versions} == {rollout.version}
    again = rollout.generate(new_groups(10, 3), PARAMS)
    assert tokens(again) == tokens(groups)
    assert len({tuple(sample.output_ids) for group in groups for sample in group.samples}) == 30
    for engine in smalls(rollout):
        for group in groups[:3]:
            params = {**PARAMS, "n": 3, "seed": group.data["seed"]}
            outputs = engine.call(0, "generate", [group.samples[0].prompt_ids], params)[0].wait()[0]
            assert [output.output_ids for output in outputs] == tokens([group])[0]


def test_an_engine_that_is_killed_loses_no_sample(rollout: RolloutManager, train: TrainGroup, brake: Path) -> None:
    expected = rollout.generate(new_groups(20), PARAMS)
    victim = smalls(rollout)[1]
    before, url = told(victim), victim.url
    with braked(brake):
        result = Started(lambda: rollout.generate(new_groups(20), PARAMS))
        wait_for(lambda: running(victim) > 0, "work")
        os.kill(before["pid"], signal.SIGKILL)
    groups = result.result()
    check_complete(groups, [f"g{i}" for i in range(20)], 2, 16)
    assert tokens(groups) == tokens(expected), "none is lost, doubled or another's"
    wait_for(lambda: url not in routed(rollout), "its leaving the router")
    assert not victim.is_alive
    assert victim not in rollout.alive_engines

    assert rollout.recover() == [victim]
    assert rollout.recover() == []
    after = told(victim)
    assert after["pid"] != before["pid"]
    assert after["place"]["accelerators"] == before["place"]["accelerators"] == ["2"]
    assert after["place"]["host"] == before["place"]["host"]
    assert victim.url not in routed(rollout), "it has no weights yet"
    assert {v for g in rollout.generate(new_groups(4), PARAMS) for s in g.samples for v in s.versions} == {
        rollout.version
    }
    train.train(1.0)
    report = train.update_weights()
    assert victim.version == told(victim)["version"] == report.version
    assert told(victim)["sums"] == train.workers.sums().wait()[0]
    assert victim.url in routed(rollout)
    groups = rollout.generate(new_groups(20), PARAMS)
    assert {v for g in groups for s in g.samples for v in s.versions} == {report.version}


def test_an_engine_that_hangs_is_ended_and_its_requests_go_elsewhere(
    rollout: RolloutManager, train: TrainGroup, brake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rollout.generate(new_groups(8), LONG)
    victim = smalls(rollout)[0]
    pid, url = told(victim)["pid"], victim.url
    monkeypatch.setattr(rollout._running.pulses, "limit_s", 8.0)
    with braked(brake):
        result = Started(lambda: rollout.generate(new_groups(8), LONG))
        wait_for(lambda: running(victim) > 0, "work", 60.0)
        os.kill(pid, signal.SIGSTOP)
    try:
        assert tokens(result.result(180.0)) == tokens(expected), "none is lost, doubled or another's"
        wait_for(lambda: not victim.is_alive and url not in routed(rollout), "its leaving the router", 60.0)
        wait_for(lambda: not alive([pid]), "the end of its process", 60.0)
    finally:
        for one in alive([pid]):
            os.kill(one, signal.SIGKILL)
    assert any("small/0 was ended: " in line for line in rollout._running.troubles(0.0))
    assert rollout.recover() == [victim]
    assert told(victim)["pid"] != pid
    assert train.update_weights().version == victim.version
    assert victim.url in routed(rollout)


def test_a_request_that_fails_leaves_the_samples_of_others(rollout: RolloutManager) -> None:
    groups = new_groups(6)
    for sample in groups[2].samples:
        sample.prompt_ids = [999]
    with pytest.raises(roost.GenerationError, match="2 of 12 requests failed") as caught:
        rollout.generate(groups, PARAMS)
    assert caught.value.codes == ("E108",)
    assert "at small/" in str(caught.value), "the engine that refused it"
    assert list(caught.value.finished) == [0, 1, 3, 4, 5]
    check_complete(list(caught.value.finished.values()), ["g0", "g1", "g3", "g4", "g5"], 2, 16)
    before = tokens(groups)
    for sample in groups[2].samples:
        sample.prompt_ids = [1, 2, 2]
    check_complete(rollout.generate(groups, PARAMS), [f"g{i}" for i in range(6)], 2, 16)
    assert [found for index, found in enumerate(tokens(groups)) if index != 2] == [
        found for index, found in enumerate(before) if index != 2
    ], "only what was missing is generated"


def test_an_update_waits_for_requests_longer_than_for_anything_else(
    rollout: RolloutManager, train: TrainGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 10.0
    monkeypatch.setattr(rollout, "_sync_timeout_s", limit_s)
    rollout.pause()
    result = Started(lambda: rollout.generate(new_groups(4), PARAMS))
    wait_for(lambda: bool(rollout.lock.state()["holders"]), "the requests", 60.0)
    update = Started(lambda: train.update_weights(pause="wait"))

    def waited() -> bool:
        return any(waiter["waited_s"] > limit_s + 0.5 for waiter in rollout.lock.state()["waiters"])

    wait_for(waited, "the update's waiting for longer than its limit", 90.0)
    rollout.resume()
    check_complete(result.result(), ["g0", "g1", "g2", "g3"], 2, 16)
    assert update.result().version == rollout.version


def test_an_update_that_aborts_returns_partial_groups_and_they_are_finished_later(
    rollout: RolloutManager, train: TrainGroup, brake: Path
) -> None:
    old = rollout.version
    expected = rollout.generate(new_groups(4, 3), LONG)
    with braked(brake):
        result = Started(lambda: rollout.generate(new_groups(4, 3), LONG))
        wait_for(lambda: all(running(engine) > 0 for engine in smalls(rollout)), "work")
        wait_for(
            lambda: brake.stat().st_size > ROWS * len(smalls(rollout)), "a second step of an engine, and so a token"
        )
        assert train.update_weights(pause="abort").version == old + 1
    groups: list[SampleGroup] = result.result()
    assert [group.id for group in groups] == ["g0", "g1", "g2", "g3"]
    cut = [sample for group in groups for sample in group.samples]
    assert {sample.finish_reason for sample in cut} == {"abort"}
    assert any(sample.output_ids for sample in cut)
    assert any(not sample.output_ids for sample in cut), "12 samples and 8 rows: some had not begun"
    lengths = [[len(sample.output_ids) for sample in group.samples] for group in groups]
    heads = tokens(groups)

    assert rollout.buffer.put_partial(groups) == 4
    taken = rollout.buffer.take_partial(10)
    assert [group.id for group in taken] == ["g0", "g1", "g2", "g3"]
    whole = rollout.generate(taken, LONG)
    check_complete(whole, ["g0", "g1", "g2", "g3"], 3, 150)
    assert tokens(whole) == tokens(expected), "the weights are the same: as if it had not been interrupted"
    for group, had, head in zip(whole, lengths, heads, strict=True):
        assert len({tuple(sample.output_ids) for sample in group.samples}) == 3, "no sample is a copy of another"
        for sample, length, tokens_before in zip(group.samples, had, head, strict=True):
            assert sample.output_ids[:length] == tokens_before
            assert sample.versions == [old] * length + [old + 1] * (150 - length)
    assert rollout.buffer.put(whole) == 4
    assert rollout.buffer.stats()["partial"] == 0
    assert len(rollout.buffer.take(4, 10.0)) == 4
    rollout.buffer.confirm([group.id for group in whole])


def test_an_update_may_come_in_the_middle_or_wait(rollout: RolloutManager, train: TrainGroup, brake: Path) -> None:
    old = rollout.version
    with braked(brake):
        result = Started(lambda: rollout.generate(new_groups(2), LONG))
        wait_for(
            lambda: brake.stat().st_size > ROWS * len(smalls(rollout)), "a second step of an engine, and so a token"
        )
        train.update_weights(pause="keep")
    groups = result.result()
    check_complete(groups, ["g0", "g1"], 2, 150)
    versions = [sample.versions for group in groups for sample in group.samples]
    assert all(found == sorted(found) for found in versions)
    assert {number for found in versions for number in found} == {old, old + 1}

    result = Started(lambda: rollout.generate(new_groups(2), PARAMS))
    train.update_weights(pause="wait")
    versions = [sample.versions for group in result.result() for sample in group.samples]
    assert {tuple(sorted(set(found))) for found in versions} <= {(old + 1,), (old + 2,)}, "none is of two versions"


@pytest.mark.parametrize("pause", ["abort", "wait", "keep"])
def test_generations_and_updates_do_not_hinder_each_other(
    rollout: RolloutManager, train: TrainGroup, pause: str
) -> None:
    before = rollout.version
    is_over = threading.Event()

    def work(name: str) -> int:
        """Generates as long as updates come; finishes what they cut off."""
        rounds = 0
        while not is_over.is_set():
            groups = new_groups(2, name=f"{name}-{rounds}-")
            while not all(group.is_finished for group in groups):
                rollout.generate(groups, PARAMS)
            check_complete(groups, [f"{name}-{rounds}-{i}" for i in range(2)], 2, 16)
            versions = [sample.versions for group in groups for sample in group.samples]
            assert all(found == sorted(found) for found in versions)
            if pause == "wait":
                assert all(len(set(found)) == 1 for found in versions)
            rounds += 1
        return rounds

    workers = [Started(functools.partial(work, name)) for name in "ab"]
    try:
        for number in range(1, 7):
            assert train.update_weights(pause).version == before + number
    finally:
        is_over.set()
        rounds = [worker.result() for worker in workers]
    assert all(rounds)
    assert rollout.lock.state()["holders"] == []


def test_paused_engines_hold_requests(rollout: RolloutManager) -> None:
    expected = rollout.generate(new_groups(4), PARAMS)
    rollout.pause()
    result = Started(lambda: rollout.generate(new_groups(4), PARAMS))
    wait_for(lambda: sum(asked(engine)["num_waiting_samples"] for engine in smalls(rollout)) == 8, "their waiting")
    assert all(running(engine) == 0 for engine in smalls(rollout))
    rollout.resume()
    assert tokens(result.result()) == tokens(expected)
    rollout.offload()
    assert all(asked(engine)["is_offloaded"] for engine in smalls(rollout))
    rollout.onload()
    assert tokens(rollout.generate(new_groups(4), PARAMS)) == tokens(expected)


# Buffer and lock ----------------------------------------------------------------------------------


def finished(count: int, name: str) -> list[SampleGroup]:
    """Groups of samples that are complete."""
    groups = new_groups(count, name=name)
    for group in groups:
        for sample in group.samples:
            sample.finish_reason = "stop"
    return groups


class Leaving:
    """Ends the connection at every call."""

    def call_in_lane(self, *args: object) -> None:
        raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # its leaving
def test_the_lock_can_be_had_where_its_lane_is_broken(rollout: RolloutManager, monkeypatch: pytest.MonkeyPatch) -> None:
    server = LaneServer(Leaving(), "127.0.0.1")
    monkeypatch.setitem(rollout._hub._lanes, 0, LaneClient(server.address))
    with rollout.lock.exclusive("a test", 10.0) as held:
        assert [holder["holder"] for holder in rollout.lock.state()["holders"]] == ["a test"]
    assert held.lost is None
    server.close()


@pytest.mark.parametrize("has_lane", [True, False])
def test_blocked_takes_keep_nobody_out(
    rollout: RolloutManager, monkeypatch: pytest.MonkeyPatch, has_lane: bool
) -> None:
    count = CONCURRENCY + 16
    taken: queue.Queue[list[SampleGroup] | Exception] = queue.Queue()

    def take(buffer: BufferClient, number: int) -> None:
        try:
            taken.put(buffer.take(1, 120.0, caller=f"taker {number}"))
        except Exception as error:
            taken.put(error)

    groups = finished(count, f"lane {has_lane} ")
    if not has_lane:  # as where a firewall lets only Ray's own ports through
        monkeypatch.delitem(rollout._hub._lanes, 0)
        # On a slow machine the first of them would leave the hub for a moment before many have reached it.
        monkeypatch.setattr(hub_module, "TURN_S", 10.0)
    threads = [threading.Thread(target=take, args=(rollout.buffer, number), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    if has_lane:
        wait_for(lambda: rollout.buffer.stats()["take_waiters"] == count, "all of them wait", 60.0)
    else:
        wait_for(lambda: rollout.buffer.stats()["take_waiters"] > CONCURRENCY // 2, "many of them wait", 60.0)
        monkeypatch.setattr(hub_module, "TURN_S", 1.0)  # from their next turns on: the lock is renewed in between
    with rollout.lock.exclusive("a test", 60.0) as held:
        assert rollout.buffer.put(groups, 60.0) == count
        assert held.is_held
    found = [taken.get(timeout=60.0) for _ in range(count)]
    errors = [one for one in found if isinstance(one, Exception)]
    assert not errors
    ids = [group.id for groups in found if not isinstance(groups, Exception) for group in groups]
    assert sorted(ids) == sorted(group.id for group in groups), "each got one, and none came twice"
    assert rollout.buffer.confirm(ids) == count


def test_buffer_and_lock_serve_other_processes_of_the_job(rollout: RolloutManager, job: roost.Cluster) -> None:
    code = """
import rl_parts
from roost.rl.hub import BufferClient, LockClient
buffer, lock = BufferClient.attach("rollout-hub"), LockClient.attach("rollout-hub")
groups = rl_parts.new_groups(3, name="other")
for group in groups:
    for sample in group.samples:
        sample.finish_reason = "stop"
result = buffer.put(groups)
held = lock.exclusive("another process", 20)
held.__enter__()
"""
    with Driver(ROOST_NAMESPACE=job.namespace) as other:
        assert other(code) == 3
        mine = BufferClient.attach()
        assert [group.id for group in mine.take(2, 10.0, caller="me")] == ["other0", "other1"]
        with pytest.raises(roost.CallTimeoutError, match="me waited") as late:
            mine.take(2, 0.1, caller="me")
        assert late.value.codes == ("B103",)
        lock = LockClient.attach()
        with pytest.raises(roost.CallTimeoutError, match="another process") as busy:
            lock.shared("me", 0.1).__enter__()
        assert busy.value.codes == ("L101",)
        assert [holder["holder"] for holder in rollout.lock.state()["holders"]] == ["another process"]
        other.kill()
        with lock.shared("me", 60.0) as held:
            assert held.is_held
    assert mine.confirm(["other0", "other1", "other2"]) == 3
    with pytest.raises(AttributeError):
        mine.steal()


# What goes wrong ------------------------------------------------------------------------------------


def test_an_engine_that_never_gets_healthy(job: roost.Cluster) -> None:
    plan = roost.Plan.resolve(job_of(ill={"placement": "15", "role": "rollout"}), job)
    before = ray_state()
    with pytest.raises(roost.RolloutError) as caught:
        RolloutManager(job, plan, Sick, router=None, start_timeout_s=5.0, name="sick")
    assert caught.value.codes == ("E202",)
    text = str(caught.value)
    assert "ill/0 did not get healthy within 5 s: it has a fever" in text
    assert "the fever is 41" in text, "its last lines"
    wait_for(lambda: ray_state() == before, "as it was before")


def test_an_engine_whose_start_raises(job: roost.Cluster) -> None:
    parts = {"placement": "9,12", "role": "rollout", "processes_per_engine": 2}
    plan = roost.Plan.resolve(job_of(ill=parts), job)
    before = ray_state()
    with pytest.raises(roost.RolloutError) as caught:
        RolloutManager(job, plan, Stillborn, router=None, name="sick")
    assert caught.value.codes == ("E202",)
    text = str(caught.value)
    assert "ill/0 did not start: ill[1]" in text
    assert "LookupError: no model to be found" in text
    assert "in start" in text, "the traceback"
    wait_for(lambda: ray_state() == before, "as it was before, though another member was still waiting")


def test_engines_are_stopped_before_their_processes_end(job: roost.Cluster, tmp_path: Path) -> None:
    said = tmp_path / "said"
    plan = roost.Plan.resolve(job_of(calm={"placement": "15", "role": "rollout"}), job)
    with RolloutManager(job, plan, functools.partial(Polite, str(tmp_path)), router=None, name="calm"):
        assert not said.exists()
    assert said.read_text() == "stopped"


def test_nothing_to_start(job: roost.Cluster, plan: roost.Plan) -> None:
    without = roost.Plan.resolve(job_of(actor="15"), job)
    with pytest.raises(roost.RolloutError, match="no component with the role 'rollout'") as caught:
        RolloutManager(job, without, Talker, name="none")
    assert caught.value.codes == ("E201",)
    with pytest.raises(roost.RolloutError, match="no engine is given for pair"):
        RolloutManager(job, plan, {"small": Talker}, name="none")


def test_external_engines_are_known_by_their_address(job: roost.Cluster, tmp_path: Path) -> None:
    plan = roost.Plan.resolve(job_of(actor="15"), job)
    with (
        serving(tmp_path) as url,
        RolloutManager(job, plan, {}, external={f"{url}/": SERVED_KEY}, name="elsewhere") as rollout,
    ):
        assert [engine.url for engine in rollout.engines] == [url]
        assert routed(rollout) == [url]
        groups = rollout.generate(new_groups(3), PARAMS)
        check_complete(groups, ["g0", "g1", "g2"], 2, 16)
        rollout.pause()
        assert told(rollout.engines[0])["is_paused"]
        rollout.resume()
        assert rollout.recover() == []
    with pytest.raises(roost.RolloutError, match=f"the external engine {url} did not get healthy") as caught:
        RolloutManager(job, plan, {}, external=[url], router=None, start_timeout_s=0.1, name="elsewhere")
    assert caught.value.codes == ("E202",)


def test_nobody_without_the_keys_commands_a_job_or_finds_them(manager: RolloutManager) -> None:
    engines = [engine for engine in manager.alive_engines if engine.url]
    before = routed(manager), [told(engine)["sums"] for engine in engines]
    assert manager.key == ROUTER_KEY
    keys = [manager.key, *(engine.key for engine in engines)]
    assert len(set(keys)) == len(keys) > 1
    commands = [(manager.url, "workers", {"url": "http://127.0.0.1:9"}), (manager.url, "generate", {"input_ids": [1]})]
    for engine in engines:
        commands += [
            (engine.url, "update_weights_from_disk", {"model_path": "/", "weight_version": 9}),
            (engine.url, "generate", {"input_ids": [1]}),
            (engine.url, "pause_generation", {"mode": "abort"}),
        ]
    for url, route, body in commands:
        others = [key for key in keys if key != next((e.key for e in engines if e.url == url), manager.key)]
        for key in ("", *others):  # nor does the key of another engine, or of the router, help
            with pytest.raises(roost.RolloutError) as caught:
                ask(f"{url}/{route}", "POST", body, key=key)
            assert caught.value.codes == ("E113",), (url, route)
    assert (routed(manager), [told(engine)["sums"] for engine in engines]) == before

    seen = b""
    for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path(os.environ["RAY_TMPDIR"]).rglob("logs/**/*")]:
        try:
            seen += path.read_bytes() if path.is_file() else b""
        except OSError:
            continue
    assert b"roost-router" in seen or b"router_process" in seen
    assert [key for key in keys if key.encode() in seen] == []
    assert [key for key in keys if key in f"{manager!r} {engines}"] == []


OTHER = """
import json, rl_parts, roost
from roost.rl.rollout import RolloutManager
cluster = roost.Cluster(num_nodes=4)
plan = roost.Plan.resolve(json.loads({job!r}), cluster)
rollout = RolloutManager(cluster, plan, rl_parts.Talker)
result = [
    [rl_parts.told(engine) for engine in rollout.engines],
    rollout.url,
    rollout._hub.states()[0]["pid"],
    rl_parts.tokens(rollout.generate(rl_parts.new_groups(4), {params!r})),
]
"""


def test_two_jobs_want_ports_at_once_and_both_end_without_a_trace(job: roost.Cluster, manager: RolloutManager) -> None:
    before = ray_state()
    theirs = json.dumps(job_of(rollout="12-13"))
    ours = roost.Plan.resolve(job_of(rollout="14-15"), job)
    with Driver(ROOST_NAMESPACE="another-job") as other:
        other.tell(OTHER.format(job=theirs, params=PARAMS))
        second = RolloutManager(job, ours, Talker, router=None, name="second")
        engines, url, hub, generated = other.answer()
        mine = [told(engine) for engine in second.engines]
        ports = [port for found in [*mine, *engines] for port in found["place"]["ports"]]
        ports += [int(url.rpartition(":")[2])]
        ports += [
            port
            for engine in manager.alive_engines
            for member in range(engine.num_members)
            for port in told(engine, member)["place"]["ports"]
        ]
        assert len(ports) == len(set(ports)), "all nodes are one machine: no port is given twice"
        assert ray_state()[0] == before[0] - 4

        assert tokens(second.generate(new_groups(4), PARAMS)) == generated, "the same weights, the same samples"
        pids = [found["pid"] for found in mine] + [second._hub.states()[0]["pid"]]
        second.close()
        second.close()
        wait_for(lambda: not alive(pids), "the end of its engines and its hub")
        wait_for(lambda: ray_state()[0] == before[0] - 2, "free accelerators")

        pids = [found["pid"] for found in engines] + [hub]
        children = [child for pid in pids for child in descendants(pid)]
        assert len(children) >= 2, "the router, and what keeps it"
        other.kill()
    wait_for(lambda: not alive([*pids, *children]), "the end of the other job's engines, hub and router")
    wait_for(lambda: ray_state() == before, "as it was before")

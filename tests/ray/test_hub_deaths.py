"""Router and hub are killed: errors that name them, and ``recover()`` brings them back with every sample, once."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import ray
from processes import wait_for
from rl_parts import Talker, check_complete, new_groups, routed

import roost
from roost.cluster.runtime_folder import temporary_folder
from roost.cluster.warden import remember, start_of
from roost.data.samples import Sample, SampleGroup
from roost.engines.handles import EngineHandle
from roost.engines.http_calls import ask
from roost.rl.hub import BufferClient
from roost.rl.rollout import RolloutManager
from roost.testing import LocalRay

PARAMS = {"max_new_tokens": 8, "temperature": 1.0}


class Taker(roost.Worker):
    """Takes from the buffer in a process of its own."""

    def open(self) -> None:
        self.buffer = BufferClient.attach("deaths-hub")

    def take(self, count: int) -> list[str]:
        return [group.id for group in self.buffer.take(count, timeout_s=60)]


@pytest.fixture(scope="module")
def job(four_nodes: LocalRay) -> Iterator[roost.Cluster]:
    with roost.Cluster(num_nodes=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def rollout(job: roost.Cluster) -> Iterator[RolloutManager]:
    placed = {"cluster": {"num_nodes": 4, "component_placement": {"small": {"placement": "1", "role": "rollout"}}}}
    plan = roost.Plan.resolve(placed, job)
    engine = functools.partial(Talker, delay_s=0.001)
    with RolloutManager(
        job, plan, engine, name="deaths", capacity=64, lock_ttl_s=10.0, router={"health_period_s": 1}
    ) as manager:
        yield manager


def hub_pid(rollout: RolloutManager) -> int:
    return int(rollout._hub.states(timeout_s=60)[0]["pid"])


def router_pid(rollout: RolloutManager) -> int:
    """The router itself: the child of its leash. It has a title of its own in place of its command line."""
    pid, known = hub_pid(rollout), dict[int, str]()
    remember(pid, start_of(pid) or "", known)
    for child in known:
        parent = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1]
        if b"leash.py" in Path(f"/proc/{parent}/cmdline").read_bytes():
            return child
    raise AssertionError("there is no router")


def finished(*names: str) -> list[SampleGroup]:
    return [SampleGroup(name, {"text": name}, [Sample([1], [2], [-0.1], [1], 0, "stop")]) for name in names]


def kill_hub(rollout: RolloutManager) -> None:
    os.kill(hub_pid(rollout), signal.SIGKILL)


def test_a_router_that_is_killed_is_named_and_comes_back(rollout: RolloutManager) -> None:
    check_complete(rollout.generate(new_groups(3), PARAMS), ["g0", "g1", "g2"], 2, 8)
    (engine,) = rollout.engines
    assert isinstance(engine, EngineHandle)
    url, key = rollout.url, rollout.key
    os.kill(router_pid(rollout), signal.SIGKILL)
    with pytest.raises(roost.GenerationError) as caught:
        rollout.generate(new_groups(3), PARAMS)
    assert caught.value.codes[0] == "E106"
    text = str(caught.value)
    assert f"the router at {url} does not answer: its process has ended with exit code" in text
    assert "rollout.recover()" in text
    assert "roost-roost-router-" in text, "its log"
    assert rollout.recover() == [], "no engine had died"
    assert rollout.url == url, "other processes may know it"
    assert rollout.key != key, "it may have been shown to somebody else"
    with pytest.raises(roost.RolloutError, match="refuses the key"):
        ask(f"{url}/workers", key=key)
    assert routed(rollout) == [engine.url]
    check_complete(rollout.generate(new_groups(3), PARAMS), ["g0", "g1", "g2"], 2, 8)
    assert rollout.recover() == []


def test_a_hub_that_is_killed_is_named_and_comes_back_with_its_buffer(
    rollout: RolloutManager, job: roost.Cluster, four_nodes: LocalRay
) -> None:
    buffer = rollout.buffer
    with Taker.create_group().launch(job, roost.NodePlacementStrategy([1]), name="taker") as taker:
        taker.open().wait()
        assert buffer.put(finished("a", "b", "c", "d", "e")) == 5
        assert buffer.put_partial(new_groups(1, name="p")) == 1
        assert taker.take(1).wait() == [["a"]]
        assert [group.id for group in buffer.take(2)] == ["b", "c"]
        buffer.confirm(["b"])
        before = {key: value for key, value in buffer.stats().items() if not key.endswith("_s")}
        kill_hub(rollout)
        where = rf"the hub 'deaths-hub', .* has died on node 0 \({four_nodes.node_address(0)}\)"
        for call in (
            lambda: buffer.put(finished("f")),
            lambda: buffer.take(1),
            lambda: rollout.lock.state(),
            lambda: rollout.generate(new_groups(3), PARAMS),
        ):
            with pytest.raises(roost.RolloutError, match=where) as caught:
                call()
            assert caught.value.codes == ("S210",)
            assert "rollout.recover()" in str(caught.value)
        assert rollout.recover() == []
        assert {key: value for key, value in buffer.stats().items() if not key.endswith("_s")} == before
        assert buffer.put(finished("a", "b", "e", "f")) == 1, "what came before is known"
        assert buffer.confirm(["c"]) == 1, "what was taken is still taken"
        assert taker.take(1).wait() == [["d"]], "other processes find the new hub"
        assert [group.id for group in buffer.take_partial(4)] == ["p0"]
        assert [group.id for group in buffer.take(2)] == ["e", "f"]
        buffer.confirm(["a", "d", "e", "f", "p0"])
    (engine,) = rollout.engines
    wait_for(lambda: routed(rollout) == [engine.url], "the engine at the new router")
    check_complete(rollout.generate(new_groups(3), PARAMS), ["g0", "g1", "g2"], 2, 8)


def test_nobody_gets_requests_at_the_port_of_a_router_that_died_with_its_hub(rollout: RolloutManager) -> None:
    """The hub holds the port as long as it lives: both have to die before anybody else can bind it."""
    url, key = rollout.url, rollout.key
    there = urlsplit(url)
    client = rollout._fleet.client  # type: ignore[union-attr]
    kill_hub(rollout)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def takes() -> bool:
            with contextlib.suppress(OSError):
                taken.bind((there.hostname, there.port))
                taken.listen()
                return True
            return False

        wait_for(takes, "the port is free", 60)
        wait_for(lambda: not client.urls, "nothing is sent there any more", 60)
        with pytest.raises(roost.GenerationError, match="has died on node 0"):
            client.generate_all([{"input_ids": [1]}])
        assert rollout.recover() == []
        assert rollout.url not in ("", url)
        assert rollout.key != key
        check_complete(rollout.generate(new_groups(3), PARAMS), ["g0", "g1", "g2"], 2, 8)
        taken.setblocking(False)
        with pytest.raises(BlockingIOError):
            taken.accept()


def test_no_sample_is_lost_or_doubled_however_often_the_hub_is_killed(rollout: RolloutManager) -> None:
    """A generator and a trainer go on through three deaths; they repeat what raised an error."""
    total, used, ends = 240, list[str](), threading.Event()
    recovered = threading.Condition()
    problems: list[BaseException] = []

    def through_deaths(call: Any) -> Any:
        while not ends.is_set():
            try:
                return call()
            except roost.RolloutError as error:
                if error.codes != ("S210",):
                    raise
                with recovered:
                    recovered.wait(1.0)
        raise AssertionError("it took too long")

    def generate() -> None:
        for first in range(0, total, 6):
            groups = finished(*(f"n{number}" for number in range(first, first + 6)))
            through_deaths(lambda groups=groups: rollout.buffer.put(groups, timeout_s=120))

    def train() -> None:
        while len(used) < total:
            taken = through_deaths(lambda: rollout.buffer.take(4, timeout_s=120))
            used.extend(group.id for group in taken)
            time.sleep(0.01)
            through_deaths(lambda taken=taken: rollout.buffer.confirm([group.id for group in taken]))

    def run(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in (generate, train)]
    for thread in threads:
        thread.start()
    chance, deaths = random.Random(3), 0  # noqa: S311
    while deaths < 2 and any(thread.is_alive() for thread in threads):
        seen = len(used) + chance.randint(5, 60)
        wait_for(lambda seen=seen: len(used) >= min(seen, total) or bool(problems), "work", 120)
        kill_hub(rollout)
        deaths += 1
        rollout.recover()
        with recovered:
            recovered.notify_all()
    for thread in threads:
        thread.join(180)
    ends.set()
    assert not problems
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(used) == sorted(f"n{number}" for number in range(total))
    stats = rollout.buffer.stats()
    assert (stats["waiting"], stats["in_flight"]) == (0, 0)


def test_the_default_journal_is_where_no_other_user_can_move_it(rollout: RolloutManager) -> None:
    """Ray makes the folders of its sessions writable for everybody; in the private folder no parent is."""
    session = os.path.basename(ray._private.worker._global_node.get_session_dir_path())
    path = Path(temporary_folder(), "journals", f"roost-roost-deaths-hub-{session}.journal")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_ino in open_inodes(hub_pid(rollout))
    for parent in path.parents:
        mode = parent.stat().st_mode
        assert mode & stat.S_ISVTX or not mode & (stat.S_IWGRP | stat.S_IWOTH), parent


def open_inodes(pid: int) -> set[int]:
    """The files that a process has open."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.stat(f"/proc/{pid}/fd/{number}").st_ino)
    return found


def test_the_journal_is_gone_when_the_job_is_over(job: roost.Cluster, tmp_path: Path) -> None:
    placed = {"cluster": {"num_nodes": 4, "component_placement": {"other": {"placement": "2", "role": "rollout"}}}}
    plan = roost.Plan.resolve(placed, job)
    with RolloutManager(job, plan, Talker, name="short", router=None, journal=str(tmp_path / "kept")) as manager:
        manager.buffer.put(finished("a"))
        (path,) = (tmp_path / "kept").iterdir()
        assert path.name == "roost-roost-short-hub.journal"
        assert path.stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / "kept").iterdir()) == []

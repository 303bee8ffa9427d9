"""Calls on a group: one group for the whole file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from processes import is_alive, run_driver, wait_for

import roost
from roost.errors import CallTimeoutError
from roost.testing import LocalRay
from roost.worker import results
from roost.worker.results import LaneResult

WORLD = 3
PATIENCE_S = 200.0
"""Nothing here takes so long, not even on a slow machine; what does hangs."""
OPEN = "/"
"""A file that is there."""


class Caller(roost.Worker):
    def __init__(self, greeting: str = "hello", *, mark: str = "!") -> None:
        super().__init__()
        self.text = greeting + mark
        self._all_here = threading.Barrier(3)
        self._may_go = threading.Event()

    def greet(self) -> str:
        return f"{self.text}{self._rank}"

    def hello(self) -> int:
        return self.rank

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        return self.rank, args, kwargs

    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def stay(self, gate: str) -> int:
        """Returns when a file is there."""
        wait_for(Path(gate).exists, "the file that lets it go", PATIENCE_S)
        return self.rank

    async def stay_later(self, gate: str) -> int:
        """The same, and others run meanwhile."""
        await asyncio.to_thread(self.stay, gate)
        return self.rank

    def moment(self, gate: str) -> float:
        """The time at which a file is there."""
        wait_for(Path(gate).exists, "the file that lets it go", PATIENCE_S)
        return time.monotonic()

    async def later(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.rank

    def meet(self) -> int:
        """Returns when three calls are here at once."""
        self._all_here.wait(PATIENCE_S)
        return self.rank

    async def meet_later(self) -> int:
        await asyncio.to_thread(self._all_here.wait, PATIENCE_S)
        return self.rank

    def hold(self) -> int:
        self._may_go.wait(PATIENCE_S)
        return self.rank

    def let_go(self) -> None:
        self._may_go.set()

    def fail(self, on: int) -> int:
        if self.rank == on:
            the_one_that_raises()
        time.sleep(0.2)
        return self.rank

    async def fail_later(self) -> None:
        await asyncio.sleep(0)
        raise LookupError("later it failed")

    def leave(self, code: int) -> None:
        sys.exit(code)

    def odd_error(self) -> None:
        raise UnpicklableError(1, 2)

    async def leave_later(self) -> None:
        sys.exit(4)

    def foreign_error(self) -> None:
        module = types.ModuleType("only_on_that_node")
        sys.modules[module.__name__] = module
        module.Strange = type("Strange", (Exception,), {"__module__": module.__name__})  # type: ignore[attr-defined]
        raise module.Strange("from afar")

    def identity(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "_rank": self._rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "node_rank": self.node_rank,
            "cluster_node_rank": self.cluster_node_rank,
            "local_accelerator_rank": self.local_accelerator_rank,
            "accelerator_type": self.accelerator_type.name,
            "hardware_ranks": self.hardware_ranks,
            "group_name": self.group_name,
        }

    def look_around(self) -> dict[str, Any]:
        return {
            "nodes": [node.address for node in self.node_manager.get_nodes()],
            "groups": sorted(self.worker_manager.get_groups()),
            "collective": self.collective_manager.get("callers"),
            "first": self.address_of("callers", 0),
            "last": self.address_of("callers", WORLD - 1),
            "nobody": self.address_of("no such group"),
            "ports": [self.acquire_free_port(), self.acquire_free_port(2)],
        }

    def pid(self) -> int:
        return os.getpid()


class SlowToLoad:
    """A text whose loading waits until the file of this name is there."""

    def __init__(self, gate: str) -> None:
        self.gate = gate

    def __reduce__(self) -> tuple[Any, ...]:
        return (_loaded, (self.gate,))


def _loaded(gate: str) -> str:
    wait_for(Path(gate).exists, "the file that lets it go", PATIENCE_S)
    return gate


class UnpicklableError(Exception):
    """Its arguments do not fit its constructor: it cannot be unpickled as it is."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def the_one_that_raises() -> None:
    raise KeyError("no such thing")


@pytest.fixture(scope="module")
def job(four_nodes: LocalRay) -> Iterator[roost.Cluster]:
    with roost.Cluster(num_nodes=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def group(job: roost.Cluster) -> Iterator[roost.WorkerGroup]:
    """Rank 0 on node 0, ranks 1 and 2 on node 1."""
    strategy = roost.FlexiblePlacementStrategy([[0], [4], [5, 6]])
    with Caller.create_group("good day", mark=" ").launch(job, strategy, name="callers") as launched:
        yield launched


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[list[Path]]:
    """A file for each rank, which is not there yet; the test makes it, or its end does."""
    files = [tmp_path / str(rank) for rank in range(WORLD)]
    yield files
    for file in files:
        file.touch()


def test_values_come_in_rank_order_whoever_is_first(group: roost.WorkerGroup) -> None:
    assert group.nap(roost.PerRank([0.4, 0.2, 0.0])).wait() == [0, 1, 2]


def test_the_constructor_got_its_arguments(group: roost.WorkerGroup) -> None:
    assert group.greet().wait() == ["good day 0", "good day 1", "good day 2"]


def test_a_worker_knows_who_it_is(group: roost.WorkerGroup) -> None:
    first, _, third = group.identity().wait()
    assert first == {
        "rank": 0,
        "_rank": 0,
        "world_size": 3,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 0,
        "cluster_node_rank": 0,
        "local_accelerator_rank": 0,
        "accelerator_type": "NVIDIA",
        "hardware_ranks": (0,),
        "group_name": "callers",
    }
    assert third == first | {
        "rank": 2,
        "_rank": 2,
        "local_rank": 1,
        "local_world_size": 2,
        "node_rank": 1,
        "cluster_node_rank": 1,
        "local_accelerator_rank": 1,
        "hardware_ranks": (1, 2),
    }


def test_a_worker_knows_the_others(group: roost.WorkerGroup, job: roost.Cluster) -> None:
    seen = group.look_around().wait()
    assert group.binding is not None
    for found in seen:
        assert found["nodes"] == [job.get_node_ip(rank) for rank in range(4)]
        assert "callers" in found["groups"]
        assert found["collective"] == {
            "address": group.binding.master_address,
            "port": group.binding.master_port,
            "world_size": WORLD,
        }
        assert (found["first"], found["last"], found["nobody"]) == (job.get_node_ip(0), job.get_node_ip(1), None)
    ports = [port for found in seen for port in (found["ports"][0], found["ports"][1], found["ports"][1] + 1)]
    assert len(set(ports)) == 9, "one machine: no port may be given twice"


def test_arguments_and_keywords(group: roost.WorkerGroup) -> None:
    found = group.echo(1, [2], key="value").wait()
    assert found == [(rank, (1, [2]), {"key": "value"}) for rank in range(WORLD)]


def test_per_rank_arguments(group: roost.WorkerGroup) -> None:
    found = group.echo(roost.PerRank("abc"), 7, key=roost.PerRank([10, 20, 30])).wait()
    assert found == [(rank, ("abc"[rank], 7), {"key": 10 * (rank + 1)}) for rank in range(WORLD)]


def test_per_rank_arguments_that_do_not_fit(group: roost.WorkerGroup) -> None:
    with pytest.raises(roost.WorkerError, match="2 values for 3 ranks"):
        group.echo(roost.PerRank([1, 2]))


def test_execute_on_calls_these_ranks_only(group: roost.WorkerGroup) -> None:
    before = [state["calls"] for state in group.states()]
    assert group.execute_on(0, 2).hello().wait() == [0, 2]
    after = [state["calls"] for state in group.states()]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0, 1]
    assert group.execute_on(2, 0).echo(roost.PerRank("xy")).wait() == [(2, ("x",), {}), (0, ("y",), {})]


@pytest.mark.parametrize("ranks", [(), (3,), (-1,), (0, 9), ("0",)])
def test_execute_on_refuses_ranks_that_are_not_there(group: roost.WorkerGroup, ranks: tuple[Any, ...]) -> None:
    with pytest.raises(roost.PlacementError, match="ranks 0-2"):
        group.execute_on(*ranks)


def test_done_is_told_without_waiting(group: roost.WorkerGroup, gates: list[Path]) -> None:
    result = group.stay(roost.PerRank([OPEN, OPEN, str(gates[2])]))
    assert not result.done()
    gates[2].touch()
    wait_for(result.done, "the call")
    assert result.wait(timeout_s=0) == [0, 1, 2]


def test_values_in_completion_order(group: roost.WorkerGroup, gates: list[Path]) -> None:
    result = group.stay(roost.PerRank([str(gates[0]), str(gates[1]), OPEN]))
    finished = result.as_completed()
    assert next(finished) == (2, 2)
    gates[1].touch()
    assert next(finished) == (1, 1)
    gates[0].touch()
    assert list(finished) == [(0, 0)]
    assert sorted(result.as_completed(timeout_s=60)) == [(0, 0), (1, 1), (2, 2)], "a second time"


def test_completion_order_ends_with_the_error_of_a_rank(group: roost.WorkerGroup) -> None:
    with pytest.raises(roost.WorkerError, match="KeyError") as caught:
        list(group.fail(1).as_completed())
    assert caught.value.rank == 1


def test_completion_order_has_a_timeout(
    group: roost.WorkerGroup, gates: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "GRACE_S", PATIENCE_S)  # as long as the state of rank 2 takes
    result = group.stay(roost.PerRank([OPEN, OPEN, str(gates[2])]))
    with pytest.raises(roost.CallTimeoutError, match="ranks did not end within 1 s") as caught:
        for _ in result.as_completed(timeout_s=1.0):
            pass
    assert "rank 2: busy in stay()" in str(caught.value)
    gates[2].touch()
    assert result.wait(timeout_s=PATIENCE_S) == [0, 1, 2]


def test_references_give_plain_values(group: roost.WorkerGroup) -> None:
    result = group.stay(roost.PerRank([OPEN, OPEN, OPEN]))
    assert ray.get(result.refs, timeout=60) == [0, 1, 2]
    assert ray.get(group.execute_on(2).hello().refs[0], timeout=60) == 2


def test_timings_are_those_of_each_rank(group: roost.WorkerGroup, gates: list[Path]) -> None:
    began = time.monotonic()
    result = group.stay(roost.PerRank([OPEN, str(gates[1]), str(gates[2])]))
    finished = result.as_completed()
    assert next(finished)[0] == 0
    for rank in (1, 2):
        before_s = time.monotonic() - began  # at least what the ranks before it took

        def has_taken_longer(rank: int = rank, before_s: float = before_s) -> bool:
            return bool(group.states([rank])[0].get("since_s", 0.0) > before_s)

        wait_for(has_taken_longer, f"rank {rank}", PATIENCE_S)
        gates[rank].touch()
        assert next(finished)[0] == rank
    timings = result.timings_s
    assert 0.0 <= timings[0] < timings[1] < timings[2], "each rank has a time of its own"


def test_await(group: roost.WorkerGroup) -> None:
    async def several() -> list[list[int]]:
        first, second = group.nap(0.05), group.hello()
        both = await asyncio.gather(first, second)
        return [*both, await second, await asyncio.wait_for(first, 60), first.wait(timeout_s=0)]

    assert asyncio.run(several()) == [[0, 1, 2]] * 5


def test_await_leaves_the_event_loop_free(group: roost.WorkerGroup) -> None:
    async def both() -> bool:
        result = group.nap(roost.PerRank([0.5, 0.0, 0.0]))
        waiting = asyncio.ensure_future(result)
        await asyncio.sleep(0)
        was_waiting = not waiting.done()
        return was_waiting and await waiting == [0, 1, 2]

    assert asyncio.run(both())


def test_await_raises_what_wait_raises(group: roost.WorkerGroup) -> None:
    async def fail() -> list[int]:
        values: list[int] = await group.fail(1)
        return values

    with pytest.raises(roost.WorkerError, match=r"callers\[1\] on node 1: fail\(\) raised KeyError"):
        asyncio.run(fail())


def test_methods_that_are_coroutines(group: roost.WorkerGroup) -> None:
    assert group.later(0.05).wait() == [0, 1, 2]
    assert group.later(0.0).wait() == [0, 1, 2], "a second time, on the same loop"
    with pytest.raises(roost.WorkerError, match="LookupError: later it failed"):
        group.fail_later().wait()


class Interleaving(roost.Worker):
    def __init__(self) -> None:
        self.here = self.inside = self.most = 0

    async def meet(self, parties: int) -> int:
        """Returns when so many calls are here at once."""
        self.here += 1
        while self.here < parties:
            await asyncio.sleep(0.01)
        return self.here

    async def stay(self) -> int:
        """How many calls were inside at once, at most."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.05)
        self.inside -= 1
        return self.most

    def block(self) -> int:
        """The same, of an ordinary method."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.05)
        self.inside -= 1
        return self.most

    async def leave(self) -> None:
        sys.exit(3)


def test_coroutines_interleave_by_default_and_ordinary_methods_do_not(job: roost.Cluster) -> None:
    request = Interleaving.create_group()
    with request.launch(job, roost.NodePlacementStrategy([2]), name="interleaving") as group:
        waiting = [group.meet(4) for _ in range(3)]
        wait_for(lambda: group.states()[0]["running"] == 3, "three calls at once")
        group.open_lanes([0], in_order=False)
        last = group.begin(0, "meet", 4)
        assert isinstance(last, LaneResult)
        assert [call.wait(timeout_s=60) for call in (*waiting, last)] == [[4]] * 4, "none ends before all have begun"
        assert [call.wait(timeout_s=60) for call in [group.block() for _ in range(5)]] == [[1]] * 5
        with pytest.raises(roost.WorkerError, match=r"leave\(\) called sys.exit\(3\)"):
            group.leave().wait(timeout_s=60)
        assert group.stay().wait(timeout_s=60) == [1], "the worker lives on"
        assert (group.states()[0]["state"], group.states()[0]["errors"]) == ("ready", 1)


def test_coroutines_run_one_at_a_time_where_that_is_asked_for(job: roost.Cluster) -> None:
    request = Interleaving.create_group()
    with request.launch(job, roost.NodePlacementStrategy([2]), name="serial", max_concurrency=1) as group:
        assert [call.wait(timeout_s=60) for call in [group.stay() for _ in range(4)]] == [[1]] * 4


def test_concurrent_calls_and_coroutines(job: roost.Cluster) -> None:
    request = Caller.create_group()
    with request.launch(job, roost.NodePlacementStrategy([2]), name="at once", max_concurrency=3) as group:
        meeting = [group.meet(), group.meet_later(), group.meet_later()]
        assert [call.wait(timeout_s=60) for call in meeting] == [[0], [0], [0]], "none ends before all three have begun"
        long = group.hold()
        assert group.hello().wait(timeout_s=60) == [0]
        [state] = group.states()
        assert (state["state"], state["call"]) == ("busy", "hold"), "a short call beside it ended; it did not"
        group.let_go().wait(timeout_s=60)
        assert long.wait(timeout_s=60) == [0]
        assert group.states()[0]["state"] == "ready"


def test_a_timeout_says_who_is_busy_in_what(
    group: roost.WorkerGroup, gates: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "ASK_BEFORE_S", 3.0)
    monkeypatch.setattr(results, "GRACE_S", PATIENCE_S)  # as long as the state of rank 1 takes
    result = group.stay(roost.PerRank([OPEN, str(gates[1]), OPEN]))
    finished = result.as_completed()
    assert sorted([next(finished), next(finished)]) == [(0, 0), (2, 2)]
    wait_for(lambda: group.states([1])[0]["state"] == "busy", "the call", PATIENCE_S)
    with pytest.raises(CallTimeoutError) as caught:
        result.wait(timeout_s=6.0)
    assert not result.done(), "the wait ended before the call"
    text = str(caught.value)
    assert "1 of 3 ranks did not end within 6 s" in text
    assert "rank 1: busy in stay() for" in text
    assert "rank 0" not in text
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, roost.RoostError)
    gates[1].touch()
    assert result.wait(timeout_s=PATIENCE_S) == [0, 1, 2], "the call goes on, and its result can still be had"


def test_an_exception_reaches_the_caller_with_everything(group: roost.WorkerGroup) -> None:
    with pytest.raises(roost.WorkerError) as caught:
        group.fail(2).wait()
    error = caught.value
    assert not isinstance(error, roost.WorkerDiedError)
    assert (error.group, error.rank, error.node_rank) == ("callers", 2, 1)
    assert "the_one_that_raises" in error.remote_traceback
    assert "KeyError: 'no such thing'" in error.remote_traceback
    assert "\x1b" not in error.remote_traceback
    assert "callers[2] on node 1: fail() raised KeyError" in str(error)
    assert isinstance(error.__cause__, KeyError)
    assert group.hello().wait() == [0, 1, 2], "driver and workers live on"
    assert group.states()[2]["errors"] >= 1


def test_an_exception_that_cannot_be_unpickled(group: roost.WorkerGroup) -> None:
    with pytest.raises(roost.WorkerError) as caught:
        group.execute_on(1).odd_error().wait(timeout_s=60)
    assert caught.value.rank == 1
    assert not isinstance(caught.value, roost.WorkerDiedError)
    assert "UnpicklableError: 1 and 2" in str(caught.value)
    assert "in odd_error" in caught.value.remote_traceback
    assert group.hello().wait() == [0, 1, 2]


def test_an_exception_of_a_class_that_only_the_worker_has(group: roost.WorkerGroup) -> None:
    with pytest.raises(roost.WorkerError, match=r"callers\[2\] on node 1: foreign_error\(\) raised") as caught:
        group.execute_on(2).foreign_error().wait(timeout_s=60)
    assert not isinstance(caught.value, roost.WorkerDiedError)


def test_sys_exit_in_a_worker_is_an_error_not_a_death(group: roost.WorkerGroup) -> None:
    pids = group.pid().wait()
    with pytest.raises(roost.WorkerError, match=r"leave\(\) called sys\.exit\(3\)") as caught:
        group.leave(3).wait()
    assert not isinstance(caught.value, roost.WorkerDiedError)
    with pytest.raises(roost.WorkerError, match=r"leave_later\(\) called sys\.exit\(4\)"):
        group.leave_later().wait(timeout_s=60)
    assert group.later(0.0).wait(timeout_s=60) == [0, 1, 2], "its event loop lives on"
    assert group.pid().wait() == pids


def test_an_unknown_method_is_an_attribute_error(group: roost.WorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"'callers' have no method 'helo'.*hello"):
        _ = group.helo
    with pytest.raises(AttributeError):
        _ = group._log
    assert not hasattr(group, "log_info"), "what a worker says is its own matter"


def test_the_control_lane_answers_while_a_long_call_runs(group: roost.WorkerGroup, gates: list[Path]) -> None:
    result = group.execute_on(1).stay(str(gates[1]))
    wait_for(lambda: group.states([1])[0]["state"] == "busy", "the call", PATIENCE_S)
    states = group.states(timeout_s=PATIENCE_S)
    stacks = group.stacks(1, timeout_s=PATIENCE_S)
    assert [state["state"] for state in states] == ["ready", "busy", "ready"]
    assert states[1]["call"] == "stay"
    assert "in stay" in stacks
    assert 'wait_for(Path(gate).exists, "the file that lets it go", PATIENCE_S)' in stacks
    assert not result.done()
    gates[1].touch()
    assert result.wait(timeout_s=PATIENCE_S) == [1]


def test_a_second_process_attaches(group: roost.WorkerGroup, job: roost.Cluster, tmp_path: Path) -> None:
    script = """
import roost
group = roost.WorkerGroup.attach("callers")
print(group, group.world_size, group.binding)
print(group.hello().wait(), group.execute_on(1).echo(roost.PerRank([5])).wait())
try:
    group.execute_on(2).fail(2).wait()
except roost.WorkerError as error:
    print(error.group, error.rank, error.node_rank)
print([state["state"] for state in group.states()])
try:
    roost.WorkerGroup.attach("caller")
except roost.ClusterError as error:
    print("'caller'" in str(error), "groups: callers" in str(error))
roost.Cluster().close()
"""
    done = run_driver(script, tmp_path, job.namespace)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "WorkerGroup('callers', 3 workers) 3 None",
        "[0, 1, 2] [(1, (5,), {})]",
        "callers 2 1",
        "['ready', 'ready', 'ready']",
        "True True",
    ]
    assert group.hello().wait() == [0, 1, 2], "the job goes on when the other process ends"
    assert all(is_alive(pid) for pid in group.pid().wait())


def test_calls_through_a_lane_wait_for_those_before_them(group: roost.WorkerGroup, gates: list[Path]) -> None:
    group.open_lanes([0, 1])
    slow = group.execute_on(0).moment(str(gates[0]))
    after = group.begin(0, "moment", OPEN)
    assert not after.done()
    gates[0].touch()
    assert after.wait(PATIENCE_S) > slow.wait()
    lane = group.begin(1, "echo", 1, "two")
    assert isinstance(lane, LaneResult)
    assert lane.wait(PATIENCE_S) == [(1, (1, "two"), {})]
    first, second = group.begin(1, "moment", str(gates[1])), group.begin(1, "moment", OPEN)
    assert not second.done()
    gates[1].touch()
    assert second.wait(PATIENCE_S) > first.wait(PATIENCE_S)
    assert isinstance(group.begin(2, "hello"), roost.GroupResult)  # it has no lane, and is called through Ray


def test_calls_do_not_overtake_one_whose_arguments_are_still_loaded(
    group: roost.WorkerGroup, gates: list[Path]
) -> None:
    group.open_lanes([0])
    slow = group.execute_on(0).moment(SlowToLoad(str(gates[0])))
    after = group.begin(0, "moment", OPEN)
    assert not after.done()
    gates[0].touch()
    assert after.wait(PATIENCE_S) > slow.wait(PATIENCE_S)


def test_calls_through_a_lane_need_not_wait_for_one_that_awaits(group: roost.WorkerGroup, gates: list[Path]) -> None:
    group.open_lanes([2], in_order=False)
    slow = group.execute_on(2).stay_later(str(gates[2]))
    wait_for(lambda: group.states([2])[0]["state"] == "busy", "the call", PATIENCE_S)
    assert group.begin(2, "hello").wait(PATIENCE_S) == [2]
    assert not slow.done()
    gates[2].touch()
    slow.wait()


class Plain(roost.Worker):
    """Without async methods: calls run in threads."""

    def stay(self, gate: str) -> None:
        wait_for(Path(gate).exists, "the file that lets it go", PATIENCE_S)

    def hello(self) -> int:
        return self.rank


def test_calls_through_a_lane_need_not_wait_for_one_in_a_thread(job: roost.Cluster, gates: list[Path]) -> None:
    with Plain.create_group().launch(job, roost.NodePlacementStrategy([2]), name="plain") as plain:
        plain.open_lanes([0], in_order=False)
        slow = plain.stay(str(gates[0]))
        wait_for(lambda: plain.states()[0]["state"] == "busy", "the call", PATIENCE_S)
        assert plain.begin(0, "hello").wait(PATIENCE_S) == [0]
        assert not slow.done()
        gates[0].touch()
        slow.wait()


def test_an_exception_comes_through_a_lane_as_it_does_through_ray(group: roost.WorkerGroup, gates: list[Path]) -> None:
    group.open_lanes([1])
    with pytest.raises(roost.WorkerError, match=r"callers\[1\] on node 1: fail\(\) raised KeyError") as caught:
        group.begin(1, "fail", 1).wait(PATIENCE_S)
    assert caught.value.rank == 1
    assert "the_one_that_raises" in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(roost.CallTimeoutError, match=r"stay\(\): rank 1 did not end within 0.05 s"):
        group.begin(1, "stay", str(gates[1])).wait(0.05)


def test_a_worker_that_dies_ends_a_call_through_its_lane(job: roost.Cluster) -> None:
    with Caller.create_group().launch(job, roost.FlexiblePlacementStrategy([[8]]), name="mortal") as mortal:
        mortal.open_lanes([0])
        call = mortal.begin(0, "nap", 600.0)
        os.kill(mortal.states(timeout_s=PATIENCE_S)[0]["pid"], signal.SIGKILL)
        with pytest.raises(roost.WorkerDiedError, match=r"mortal\[0\] on node 2 died during nap\(\)"):
            call.wait(PATIENCE_S)

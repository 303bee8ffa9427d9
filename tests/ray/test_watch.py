"""``roost status --watch``, ``--html`` and ``roost trace``, on jobs that run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cli_live import ROOT, run

import roost
from roost.hardware.accelerators import Device
from roost.plan.states import JobStatus, RankStatus
from roost.testing import LocalRay
from roost.worker.timelines import collect_timelines
from roost.worker.watch import Watcher


class Sleeper(roost.Worker):
    def sleep(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.02)

    def quick(self) -> int:
        return self.rank

    def fail(self) -> None:
        raise ValueError("the loss is \x1b[31mnan\x1b[0m\nand more")

    def pid(self) -> int:
        return os.getpid()

    def status_note(self) -> str:
        return f"note of {self.rank}"


class Hesitant(roost.Worker):
    def __init__(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.02)

    def status_note(self) -> str:
        raise RuntimeError("this hides nothing")


class Driven(roost.Worker):
    """A worker to which a driver library of two GPUs tells what they do; one of them cannot tell everything."""

    def __init__(self) -> None:
        library = types.ModuleType("pynvml")

        class NVMLError(Exception):
            pass

        def rates(handle: int) -> types.SimpleNamespace:
            if handle:
                raise NVMLError("not supported")
            return types.SimpleNamespace(gpu=42)

        vars(library).update(
            NVMLError=NVMLError,
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
            nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=80 * 2**30, used=(handle + 1) * 2**30),
            nvmlDeviceGetUtilizationRates=rates,
        )
        sys.modules["pynvml"] = library


@pytest.fixture(scope="module")
def cluster(four_nodes: LocalRay) -> Iterator[roost.Cluster]:
    """One job for all tests here: they look, and change nothing but their own groups."""
    with roost.Cluster(num_nodes=2) as job:
        yield job


@pytest.fixture
def group(cluster: roost.Cluster) -> Iterator[roost.WorkerGroup]:
    with Sleeper.create_group().launch(cluster, roost.PackedPlacementStrategy(3, 4), name="sleepers") as found:
        yield found


def ranks_of(jobs: list[JobStatus], name: str = "sleepers") -> tuple[RankStatus, ...]:
    return next(group.workers for job in jobs for group in job.groups if group.name == name)


def test_a_busy_call_is_seen_while_it_runs(
    group: roost.WorkerGroup, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    watcher = Watcher()
    first, second = ranks_of(watcher.look())
    assert (first.state, second.state) == ("ready", "ready")
    assert (first.node_rank, first.accelerators, second.node_rank, second.accelerators) == (0, (3,), 1, (0,))
    assert first.note == "note of 0"
    result = group.execute_on(1).sleep(str(tmp_path / "go"))
    eventually(lambda: ranks_of(watcher.look())[1].state == "busy")
    first, second = ranks_of(watcher.look())
    assert first.state == "ready"
    assert (second.call, second.running) == ("sleep", 1)
    (tmp_path / "go").touch()
    result.wait()
    first, second = ranks_of(watcher.look())
    assert (second.state, second.calls, second.errors) == ("ready", 1, 0)


def test_the_last_error_and_a_death_are_seen(group: roost.WorkerGroup, eventually: Callable[..., None]) -> None:
    watcher = Watcher()
    with pytest.raises(roost.WorkerError):
        group.execute_on(0).fail().wait()
    first, second = ranks_of(watcher.look())
    assert first.last_error is not None
    assert (first.last_error.call, first.errors) == ("fail", 1)
    assert first.last_error.error == "ValueError: the loss is \x1b[31mnan\x1b[0m"
    assert second.last_error is None
    os.kill(group.execute_on(1).pid().wait()[0], signal.SIGKILL)
    eventually(lambda: ranks_of(watcher.look())[1].state == "dead")
    first, second = ranks_of(watcher.look())
    assert (first.state, second.state) == ("ready", "dead")
    assert "its process ended" in second.reason
    assert ranks_of(Watcher().look())[1].state == "dead"  # also to one who looks for the first time


def test_a_worker_that_does_not_answer_is_silent_and_asked_once(
    group: roost.WorkerGroup, eventually: Callable[..., None]
) -> None:
    def look_until_the_second_is_ready(watcher: Watcher) -> tuple[RankStatus, ...]:
        """What a short look finds; one that is too short for the second rank is followed by another."""
        found: list[tuple[RankStatus, ...]] = []

        def is_ready() -> bool:
            found.append(ranks_of(watcher.look(timeout_s=0.2)))
            return found[-1][1].state == "ready"

        eventually(is_ready)
        return found[-1]

    watcher = Watcher()
    assert ranks_of(watcher.look())[0].state == "ready"
    pid = group.execute_on(0).pid().wait()[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        states = [look_until_the_second_is_ready(watcher) for _ in range(3)]
        (job,) = [job for job in watcher._jobs.values() if "sleepers" in job.groups]
        asked = job.groups["sleepers"][2][0].asked
        assert asked is not None
        watcher.look(timeout_s=0.2)
        assert job.groups["sleepers"][2][0].asked is asked
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [(first.state, second.state) for first, second in states] == [("silent", "ready")] * 3
    assert states[0][0].since_s < states[2][0].since_s
    eventually(lambda: ranks_of(watcher.look())[0].state == "ready")


def test_ranks_that_start_are_seen(cluster: roost.Cluster, tmp_path: Path, eventually: Callable[..., None]) -> None:
    launched: list[roost.WorkerGroup] = []
    request = Hesitant.create_group(str(tmp_path / "go"))

    def launch() -> None:
        launched.append(request.launch(cluster, roost.PackedPlacementStrategy(0, 1), name="hesitant"))

    thread = threading.Thread(target=launch)
    watcher = Watcher()
    thread.start()
    try:
        eventually(lambda: any(g.name == "hesitant" for job in watcher.look(0.5) for g in job.groups), 60)
        found = ranks_of(watcher.look(0.5), "hesitant")
        assert [(rank.state, rank.accelerators) for rank in found] == [("starting", (0,)), ("starting", (1,))]
        eventually(lambda: all(rank.pid for rank in ranks_of(watcher.look(0.5), "hesitant")), 60)
    finally:
        (tmp_path / "go").touch()
        thread.join()
    assert [rank.state for rank in ranks_of(watcher.look(), "hesitant")] == ["ready", "ready"]
    launched[0].close()
    eventually(lambda: all(g.name != "hesitant" for job in watcher.look() for g in job.groups))


def test_who_looks_again_and_again_asks_ranks_of_a_node_in_turn(
    cluster: roost.Cluster, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    with Sleeper.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 2), name="turns") as found:
        result = found.execute_on(2).sleep(str(tmp_path / "go"))
        eventually(lambda: found.states()[2]["state"] == "busy")
        watcher = Watcher(interval_s=0.25)  # one question per look and node
        assert [rank.state for rank in ranks_of(watcher.look(), "turns")] == ["ready", "ready", "busy"]
        (job,) = watcher._jobs.values()
        ranks = job.groups["turns"][2]
        before = ranks_of(watcher.look(), "turns")[2].since_s
        answered = []
        for _ in range(6):
            times = [rank.answered_at for rank in ranks]
            after = ranks_of(watcher.look(), "turns")[2].since_s
            answered.append([rank.answered_at > time for rank, time in zip(ranks, times, strict=True)].index(True))
            assert sum(rank.answered_at > time for rank, time in zip(ranks, times, strict=True)) == 1
            assert after > before  # also where it was not asked
            before = after
        assert sorted(answered) == [0, 0, 1, 1, 2, 2]
        (tmp_path / "go").touch()
        result.wait()


def test_a_group_that_is_launched_again_is_another(cluster: roost.Cluster) -> None:
    watcher = Watcher()
    for _ in range(2):
        with Sleeper.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 0), name="again") as found:
            pid = found.pid().wait()[0]
            (rank,) = ranks_of(watcher.look(), "again")
            assert (rank.state, rank.pid) == ("ready", pid)


def test_one_worker_of_a_node_tells_of_its_accelerators(cluster: roost.Cluster) -> None:
    with Driven.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 1), name="driven"):
        watcher = Watcher()
        assert {a.used_gib for node in watcher.look()[0].nodes for a in node.accelerators} == {None}  # all made up
        (job,) = watcher._jobs.values()
        devices = tuple(Device(str(i), f"GPU-{i}", "H200", 80.0) for i in range(3))
        job._nodes[0] = replace(job._nodes[0], accelerators=devices, accelerators_are_real=True)
        nodes = watcher.look()[0].nodes
    first, second, third = nodes[0].accelerators
    assert (first.memory_gib, first.used_gib, first.busy) == (80.0, 1.0, 0.42)
    assert (second.memory_gib, second.used_gib, second.busy) == (80.0, 2.0, None)
    assert (third.memory_gib, third.used_gib, third.busy) == (80.0, None, None)  # the library does not know it
    assert [len(rank.usage) for rank in job.ranks()] == [2, 0]


def test_watching_prints_frames_as_lines(group: roost.WorkerGroup, four_nodes: LocalRay, tmp_path: Path) -> None:
    with pytest.raises(roost.WorkerError):
        group.execute_on(1).fail().wait()
    page = tmp_path / "page.html"
    done = run(
        "status", "--watch", "--count", "2", "--interval", "3", "--html", str(page), "--address", four_nodes.address
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks: 2 ready") == 2
    assert "sleepers[1], " in done.stdout
    assert "\x1b" not in done.stdout
    assert "sleepers" in page.read_text()
    assert 'http-equiv="refresh"' in page.read_text()
    lines = run("status", "--watch", "--json", "--count", "2", "--interval", "3", "--address", four_nodes.address)
    frames = [json.loads(line) for line in lines.stdout.splitlines()]
    assert len(frames) == 2
    workers = frames[0]["jobs"][0]["groups"][0]["workers"]
    assert [worker["state"] for worker in workers] == ["ready", "ready"]
    assert workers[1]["last_error"]["call"] == "fail"
    assert len(frames[0]["jobs"][0]["nodes"]) == 2
    assert frames[0]["jobs"][0]["nodes"][0]["accelerators"][0]["used_gib"] is None  # made up: nobody tells


def test_a_page_is_written(group: roost.WorkerGroup, four_nodes: LocalRay, tmp_path: Path) -> None:
    page = tmp_path / "status.html"
    done = run("status", "--html", str(page), "--address", four_nodes.address)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {page}\n"
    assert "sleepers[1]" in page.read_text()
    assert "refresh" not in page.read_text()
    wrong = run("status", "--html", str(tmp_path / "no" / "page.html"), "--address", four_nodes.address)
    assert wrong.returncode == 2
    assert "error[U120]" in wrong.stderr


def test_frames_are_counted_only_where_it_is_watched(four_nodes: LocalRay) -> None:
    done = run("status", "--count", "2", "--address", four_nodes.address)
    assert done.returncode == 2
    assert "error[U121]" in done.stderr


@pytest.mark.parametrize("ending", [b"q", b"\x03", signal.SIGTERM])
def test_a_screen_is_left_as_it_was(group: roost.WorkerGroup, four_nodes: LocalRay, ending: Any) -> None:
    with terminal() as (master, slave):
        before = termios.tcgetattr(slave)
        process = subprocess.Popen(
            [sys.executable, "-m", "roost", "status", "--watch", "--interval", "0.5", "--address", four_nodes.address],
            cwd=ROOT, env={**os.environ, "TERM": "xterm-256color"}, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=take_terminal,
        )  # fmt: skip
        try:
            shown = read_until(master, b"q to quit", process)
            assert termios.tcgetattr(slave)[3] != before[3]  # single keys are read
            if isinstance(ending, bytes):
                os.write(master, ending)
            else:
                process.send_signal(ending)
            shown += read_until(master, None, process)
            code = process.wait(timeout=30)
        finally:
            process.kill()
        assert termios.tcgetattr(slave) == before
    assert code == 0 or not isinstance(ending, bytes)
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")  # the cursor is there again
    assert b"Traceback" not in shown
    if isinstance(ending, bytes):
        assert b"sleepers[1]" in shown.rpartition(b"\x1b[?1049l")[2]  # the last frame stays to be read


def take_terminal() -> None:
    """Make the terminal that of this process, which obeys Ctrl-C also if these tests run in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    try:
        yield master, slave
    finally:
        os.close(master)
        os.close(slave)


def read_until(master: int, wanted: bytes | None, process: subprocess.Popen[bytes]) -> bytes:
    """What is shown until a text comes; or, without one, until the process has ended."""
    shown = b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            shown += os.read(master, 65536)
        elif process.poll() is not None:
            break
        if wanted is not None and wanted in shown:
            break
    assert wanted is None or wanted in shown, shown.decode(errors="replace")
    return shown


def test_a_trace_has_the_calls_of_all_ranks(
    group: roost.WorkerGroup, four_nodes: LocalRay, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    group.quick().wait()
    with pytest.raises(roost.WorkerError):
        group.execute_on(1).fail().wait()
    result = group.execute_on(0).sleep(str(tmp_path / "go"))
    eventually(lambda: group.states()[0]["state"] == "busy")
    out = tmp_path / "trace.json"
    done = run("trace", "--out", str(out), "--address", four_nodes.address)
    (tmp_path / "go").touch()
    result.wait()
    assert done.returncode == 0, done.stderr
    assert "6 calls of 2 ranks in 1 group" in done.stdout
    events = json.loads(out.read_text())["traceEvents"]
    calls = [event for event in events if event["ph"] == "X"]
    assert all({"ts", "dur", "pid", "tid", "name", "args"} <= set(call) for call in calls)
    assert all(call["ts"] >= 0 and call["dur"] >= 0 for call in calls)
    found = sorted((call["args"]["rank"], call["name"], str(call["args"]["ok"])) for call in calls)
    assert found == [
        (0, "__init__", "True"), (0, "quick", "True"), (0, "sleep", "None"),
        (1, "__init__", "True"), (1, "fail", "False"), (1, "quick", "True"),
    ]  # fmt: skip
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"sleepers[0] node 0", "sleepers[1] node 1"}


def test_clocks_are_aligned_and_old_calls_left_out(group: roost.WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.time()
    group.quick().wait()
    ended = time.time()
    real = time.time
    monkeypatch.setattr("roost.worker.timelines.time.time", lambda: real() - 1000.0)  # this clock is late
    timelines, silent = collect_timelines(60)
    assert silent == []
    assert [timeline.rank for timeline in timelines] == [0, 1]
    for timeline in timelines:
        assert timeline.offset_s == pytest.approx(1000.0, abs=60.0)
        (quick,) = [call for call in timeline.calls if call.name == "quick"]
        assert began - 1060 < quick.start_s < ended - 940
    none, _ = collect_timelines(1e-9)
    assert [timeline.calls for timeline in none] == [(), ()]


def test_the_ray_may_end_while_it_is_watched(four_nodes: LocalRay, tmp_path: Path) -> None:
    job = (
        "import sys, time, roost\n"
        "from roost.testing import local_ray\n"
        "with local_ray('1x1', cpus=1) as machines, roost.Cluster(num_nodes=1):\n"
        "    print(machines.address, flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        [sys.executable, "-c", job], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        try:
            address = driver.stdout.readline().strip()
            with subprocess.Popen(
                [sys.executable, "-m", "roost", "status", "--watch", "--interval", "0.5", "--address", address],
                cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True,
            ) as watching:  # fmt: skip
                assert watching.stdout is not None
                assert "1 node x 1 GPU" in watching.stdout.readline()
                driver.stdin.write("\n")
                driver.stdin.close()
                assert "the watched Ray cluster has ended" in watching.stdout.read()
            assert watching.returncode == 0
        finally:
            driver.kill()

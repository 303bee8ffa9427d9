"""The logs of servers: files that a person can read, whose size has a limit, and that errors name."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

import pytest

import roost
from roost.engines import leash
from roost.engines import server_process as child
from roost.engines.router import Router
from roost.engines.server_process import ServerProcess

LIMIT_S = 60.0


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("ROOST_NAMESPACE", "team/a")
    return tmp_path / "roost"


@pytest.fixture
def start(runtime):
    """Starts commands, and stops them after the test."""
    started = []

    def run(script, **arguments):
        server = ServerProcess([sys.executable, "-c", script], **arguments)
        started.append(server)
        server.start()
        return server

    yield run
    for server in started:
        server.stop()


def test_a_log_is_a_private_file_that_outlives_the_server(start, runtime):
    server = start("print('first\\nlast'); raise SystemExit(3)", log_name="rollout-0")
    wait_for(lambda: not server.is_alive(), "its end")
    path = Path(server.log_path)
    assert path == runtime / "logs" / f"roost-team-a-rollout-0-{os.getpid()}.log"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert server.logs(1) == "last"
    server.stop()
    assert path.read_text() == "first\nlast\n"


def test_each_start_has_a_log_of_its_own(start):
    first, second = start("print(1)"), start("print(2)")
    assert first.log_path != second.log_path


def test_a_log_that_grows_starts_again_and_the_server_does_not_wait(start, monkeypatch, runtime):
    source = Path(leash.__file__).read_text(encoding="utf-8")
    small = runtime.parent / "small_leash.py"
    small.write_text(source.replace("LOG_LIMIT = 32 << 20", "LOG_LIMIT = 100_000"), encoding="utf-8")
    monkeypatch.setattr(leash, "__file__", str(small))
    server = start(
        "import time\nfor number in range(1000):\n    print('x' * 999, number, flush=True); time.sleep(0.002)\n"
        "while True:\n    print('all is written', flush=True); time.sleep(0.1)"  # one line may be lost
    )
    wait_for(lambda: "all is written" in server.logs(1), "the last line")
    log, older = Path(server.log_path), Path(server.log_path + ".1")
    wait_for(lambda: older.exists() and log.stat().st_size <= 100_000, "a log below its limit")
    assert server.is_alive()
    server.stop()  # the file is not replaced any more
    assert older.stat().st_size == 100_000
    assert stat.S_IMODE(older.stat().st_mode) == 0o600


def test_the_last_lines_after_a_log_started_again(start):
    server = start("print('new', flush=True); import time; time.sleep(600)")
    wait_for(lambda: server.logs() == "new", "its line")
    Path(server.log_path + ".1").write_text("old\n")
    assert server.logs() == "old\nnew"
    assert server.described_logs().splitlines()[-1].startswith(f"the whole log: {server.log_path} on node ")


def rotate(log):
    """Rotates a log of 20 bytes to 10, as the process does whose standard output it is."""
    log.write_bytes(b"x" * 10 + b"y" * 10)
    handle, output = os.open(log, os.O_RDWR | os.O_APPEND), os.dup(1)
    try:
        os.dup2(handle, 1)
        leash.rotate(str(log), limit=10)
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(handle)


def test_a_server_that_writes_faster_than_its_log_is_copied(tmp_path, monkeypatch):
    log, read = tmp_path / "a.log", os.pread

    def write_and_read(handle, size, place):
        if place < 1000:
            os.write(handle, b"z" * 10)
        return read(handle, min(size, 4), place)

    monkeypatch.setattr(leash.os, "pread", write_and_read)
    rotate(log)
    assert (tmp_path / "a.log.1").read_bytes() == b"y" * 10
    assert log.read_bytes() == b""


def test_a_link_planted_for_the_older_part_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    log = tmp_path / "a.log"
    (tmp_path / "a.log.1").symlink_to(victim)
    rotate(log)
    assert victim.read_text() == "precious"
    assert (tmp_path / "a.log.1").read_bytes() == b"y" * 10
    assert log.read_bytes() == b""


def test_logs_that_nobody_has_written_to_for_a_week_are_removed(start, runtime):
    first = start("print(1)")
    old = runtime / "logs" / "roost-a-rollout-0-7.log"
    old.write_text("of another process")
    os.utime(old, (0, 0))
    start("print(2)")
    assert not old.exists()
    assert Path(first.log_path).exists()


def test_a_full_or_closed_folder_is_named(runtime, monkeypatch):
    def refuse(name):
        raise OSError(28, "No space left on device", "/logs/roost-a.log")

    monkeypatch.setattr(child, "open_log", refuse)
    with pytest.raises(roost.RolloutError, match=r"log of vLLM on .* cannot be created.*No space left") as caught:
        ServerProcess(["true"], name="vLLM").start()
    assert caught.value.codes == ("E125",)


def test_the_error_of_a_router_that_ends_names_its_log(runtime):
    router = Router(options=["--no-such-option"])
    with pytest.raises(roost.RolloutError, match="process has ended") as caught:
        router.start()
    text = str(caught.value)
    assert f"roost-team-a-router-{os.getpid()}" in text
    assert str(runtime / "logs") in text
    assert "no-such-option" in text

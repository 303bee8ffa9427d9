"""The journal of a buffer: after the death of its process everything is as it was answered, once."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from journal_writer import group
from serving import SOURCES

import roost
from roost.data import journal, shelves
from roost.data import journaled_buffer as journaled
from roost.data.journaled_buffer import JournaledBuffer
from roost.data.lock import LeaseLock

SHELVES = ("waiting", "in_flight", "stale", "partial", "partial_out")


def content(buffer):
    """Everything in a buffer, in order."""
    shelves = buffer._shelves
    found = {
        name: [(key, e.group, e.oldest_version, e.taker) for key, e in shelves._all()[name].items()] for name in SHELVES
    }
    return {**found, "used": list(shelves.used), "totals": dict(shelves.totals)}


def again(buffer, path):
    """What a new process would find."""
    copy = f"{path}.copy"
    Path(copy).write_bytes(Path(path).read_bytes())
    return JournaledBuffer(buffer.capacity, copy, continues=True)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "buffer.journal")


def change_at_random(buffer, chance, number):
    """One change of a random kind."""
    counts = buffer.stats()
    kind = chance.choice(("put", "take", "confirm", "give_back", "put_partial", "take_partial", "stale", "drain"))
    out = [*buffer._shelves.in_flight, *buffer._shelves.partial_out]
    if kind == "put":
        names = [f"g{number}-{index}" for index in range(chance.randint(1, 3))]
        with contextlib.suppress(TimeoutError):
            buffer.put([group(name, chance.randint(1, 5)) for name in names], timeout_s=0)
    elif kind == "take" and counts["waiting"]:
        buffer.take(chance.randint(1, counts["waiting"]), caller="trainer", ticket=f"t{number}")
    elif kind == "confirm" and out:
        buffer.confirm(chance.sample(out, chance.randint(1, len(out))))
    elif kind == "give_back" and out:
        buffer.give_back(chance.choice((None, chance.sample(out, 1))))
    elif kind == "put_partial":
        name = chance.choice(list(buffer._shelves.partial_out) or [f"p{number}"])
        with contextlib.suppress(TimeoutError):
            buffer.put_partial([group(name, finish="abort")], timeout_s=0)
    elif kind == "take_partial":
        buffer.take_partial(2, caller="engine")
    elif kind == "stale":
        with contextlib.suppress(TimeoutError, roost.RolloutError):
            buffer.take(30, timeout_s=0, min_version=chance.randint(1, 5))
    elif kind == "drain":
        buffer.drain_stale(ticket=f"d{number}")


@pytest.mark.parametrize("seed", range(5))
def test_any_changes_are_done_again_as_they_were(path, seed, monkeypatch):
    monkeypatch.setattr(journaled, "SMALL_BYTES", 100_000)
    chance = random.Random(seed)  # noqa: S311
    buffer = JournaledBuffer(30, path)
    for number in range(150):
        change_at_random(buffer, chance, number)
        if number % 10 == 9:
            found = again(buffer, path)
            assert content(found) == content(buffer)
            assert found.notes == []
    assert Path(path).stat().st_size < 3_000_000, "it is written anew as it grows"


def test_a_process_that_is_killed_leaves_everything_that_it_answered(path):
    command = [sys.executable, str(Path(__file__).with_name("journal_writer.py")), path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    chance = random.Random(1)  # noqa: S311
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            limit = threading.Timer(120, process.kill)
            limit.start()
            lines = [process.stdout.readline() for _ in range(chance.randint(20, 200))]
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
            limit.cancel()
        done = {"put": [], "taken": [], "confirmed": [], "given_back": []}
        for line in lines:
            kind, *names = line.split()
            done[kind] += names
        buffer = JournaledBuffer(64, path, continues=True)
        held = {key for shelf in SHELVES for key in buffer._shelves._all()[shelf]}
        used = set(buffer._shelves.used)
        assert not held & used, "none comes twice"
        assert set(done["put"]) <= held | used, "none is lost"
        assert set(done["confirmed"]) <= used
        assert len((held | used) - set(done["put"])) <= 4, "at most the put that was not answered yet"
        assert len(used - set(done["confirmed"])) <= 30, "at most the confirmation that was not answered yet"


def test_a_torn_last_record_is_dropped_and_the_rest_is_there(path):
    buffer = JournaledBuffer(8, path)
    buffer.put([group("a"), group("b")])
    before, size = content(buffer), Path(path).stat().st_size
    buffer.put([group("c"), group("d")])
    whole = Path(path).read_bytes()
    for end in [*range(size + 1, size + 60), *range(len(whole) - 60, len(whole))]:
        Path(path).write_bytes(whole[:end])
        found = JournaledBuffer(8, path, continues=True)
        assert content(found) == before, end
        assert "is incomplete and was dropped" in found.notes[0]
        assert JournaledBuffer(8, path, continues=True).notes == [], "it was written anew"


@pytest.mark.parametrize("place", [0, 20, 26, 30, 400])
def test_damage_is_refused_with_what_to_do(path, place):
    buffer = JournaledBuffer(8, path)
    buffer.put([group("a")])
    buffer.put([group("b")])
    data = bytearray(Path(path).read_bytes())
    data[place] ^= 0x40
    Path(path).write_bytes(data)
    with pytest.raises(roost.RolloutError, match="is not an intact journal of a buffer") as caught:
        JournaledBuffer(8, path, continues=True)
    assert caught.value.codes == ("B112",)
    assert f"rm {path}" in str(caught.value)


def test_a_take_whose_answer_was_lost_is_undone_after_the_death(path):
    buffer = JournaledBuffer(8, path)
    buffer.put([group(name, 1 if name == "a" else 2) for name in "abcd"])
    with contextlib.suppress(TimeoutError):
        buffer.take(8, timeout_s=0, min_version=2)
    buffer.drain_stale(ticket="drained")
    buffer.take(1, caller="trainer", ticket="got it")
    buffer.take(1, caller="trainer", ticket="lost")
    found = JournaledBuffer(8, path, continues=True)
    assert found.undo_takes(["lost", "drained", "took nothing"]) == 2
    assert found.undo_takes(["lost", "drained"]) == 0
    assert list(found._shelves.waiting) == ["c", "d"]
    assert list(found._shelves.in_flight) == ["b"]
    assert [one.id for one in found.drain_stale()] == ["a"]
    assert content(JournaledBuffer(8, path, continues=True)) == content(found)


@pytest.fixture(params=["with a journal", "without"])
def buffer(request, path):
    return JournaledBuffer(8, path) if request.param == "with a journal" else roost.DataBuffer(8)


def set_aside(buffer, *names):
    """Have a take set these groups aside as stale."""
    buffer.put([group(name, 1) for name in names])
    with contextlib.suppress(TimeoutError):
        buffer.take(8, timeout_s=0, min_version=2)


def test_a_drain_whose_answer_was_lost_is_undone_while_the_buffer_lives(buffer, path, monkeypatch):
    set_aside(buffer, "a", "b")
    assert len(buffer.drain_stale(ticket="lost")) == 2
    monkeypatch.setattr(journaled, "SMALL_BYTES", 0)  # the journal is written anew now, with other places in it
    monkeypatch.setattr(journaled, "GROWTH", 0)
    buffer.put([group("c", 3), group("b", 3)])
    assert buffer.undo_takes(["lost", "unknown"]) == 1, "b came again since"
    assert buffer.undo_takes(["lost"]) == 0
    if isinstance(buffer, JournaledBuffer):
        assert content(again(buffer, path)) == content(buffer)
    assert [one.id for one in buffer.drain_stale(ticket="lost")] == ["a"]


def test_drained_groups_are_not_kept_for_long(buffer, monkeypatch):
    set_aside(buffer, "a")
    buffer.drain_stale(ticket="first")
    assert buffer._shelves._drained
    monkeypatch.setattr(shelves, "UNDO_S", 0.0)
    buffer.put([group("b")])
    assert not buffer._shelves._drained
    assert buffer.undo_takes(["first"]) == 0


def test_a_loaded_buffer_is_in_the_journal(path, tmp_path):
    first = roost.DataBuffer(4)
    first.put([group("a")])
    first.save(tmp_path / "saved")
    buffer = JournaledBuffer(4, path)
    buffer.load(tmp_path / "saved")
    assert list(again(buffer, path)._shelves.waiting) == ["a"]


def test_a_new_job_begins_a_new_journal_and_a_closed_one_leaves_none(path):
    JournaledBuffer(4, path).put([group("a")])
    buffer = JournaledBuffer(4, path)
    assert again(buffer, path).stats()["waiting"] == 0
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    buffer.remove_journal()
    assert not Path(path).exists()
    buffer.put([group("b")])
    assert buffer.stats()["waiting"] == 1


def test_a_job_goes_on_while_its_journal_cannot_be_written(path, monkeypatch, caplog):
    buffer = JournaledBuffer(8, path)
    buffer.put([group("a")])
    write, is_full = journal._write, True

    def full(file, data):
        if is_full:
            write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    monkeypatch.setattr(journal, "_write", full)
    buffer.put([group("b")])
    assert "No space left on device; the groups are lost if the hub dies now" in caplog.text
    assert not Path(path).exists(), "nobody reads what is out of date"
    monkeypatch.setattr(journaled, "RETRY_S", 0.0)
    buffer.put([group("c")])
    is_full = False
    buffer._recorded._retry_s = 0.0
    assert [one.id for one in buffer.take(2)] == ["a", "b"]
    assert "can be written again and is complete" in caplog.text
    assert content(again(buffer, path)) == content(buffer)


def test_links_and_files_of_others_are_not_used(path, tmp_path):
    JournaledBuffer(4, path).put([group("a")])
    os.rename(path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(roost.ClusterError, match="is a symbolic link") as caught:
        JournaledBuffer(4, path, continues=True)
    assert caught.value.codes == ("R141",)


def test_a_lock_that_replaces_another_waits_until_its_leases_have_run_out():
    now_s = 100.0
    lock = LeaseLock(10.0, lambda: now_s, after_token=7)
    with pytest.raises(TimeoutError) as caught:
        lock.acquire("shared", "engine", timeout_s=0.0)
    assert "holders of the lock before this one" in str(caught.value)
    with pytest.raises(roost.RolloutError) as lost:
        lock.renew(3)
    assert lost.value.codes == ("L102",)
    now_s += 10.0
    assert lock.acquire("exclusive", "trainer", timeout_s=0.0) == 8

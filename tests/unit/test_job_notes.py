"""Notes of where jobs run: no other user chooses the Ray that a job joins, or which file is overwritten."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_user import as_nobody, needs_root

from roost import ClusterError
from roost.cluster import runtime_folder as module
from roost.cluster.connect import find_job, forget_job, remember_job

ADDRESS = "127.0.0.1:6379"
EVIL = "10.66.66.66:6379"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that all users may write to, in place of /tmp; there is no runtime directory of this user."""
    path = Path(tempfile.mkdtemp())  # pytest's own folders are private
    path.chmod(0o1777)
    monkeypatch.setattr(module, "_SHARED", str(path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def private(shared: Path) -> Path:
    """The private folder of this user."""
    return shared / f"roost-{os.getuid()}"


def plant_note(folder: str = "$1/jobs") -> str:
    """A script that writes a note which names another Ray and switches Ray's authentication off."""
    note = {"namespace": "roost", "address": EVIL, "pid": os.getpid(), "auth_mode": "disabled"}
    return f"mkdir -p {folder} && echo '{json.dumps(note)}' > {folder}/roost.1.json && chmod -R 777 $1"


def test_a_job_is_found_until_it_is_forgotten(private: Path) -> None:
    remember_job("mine", ADDRESS)
    (note,) = (private / "jobs").iterdir()
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    assert find_job() == find_job("mine") == ADDRESS
    assert find_job("another") is None
    remember_job("mine", "127.0.0.1:1")  # what was there is replaced
    assert find_job("mine") == "127.0.0.1:1"
    forget_job("mine")
    assert find_job() is None


@needs_root
def test_a_note_that_another_user_planted_is_not_believed(private: Path) -> None:
    assert as_nobody(plant_note(), str(private)).returncode == 0
    with pytest.raises(ClusterError, match="belongs to user 65534") as caught:
        find_job()
    assert caught.value.codes == ("R140",)
    assert "RAY_AUTH_MODE" not in os.environ


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link", "FIFO"])
def test_nothing_is_written_where_another_user_prepared_it(
    kind: str, private: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    script = {"folder": 'mkdir -m 777 "$1"', "link": 'ln -s "$2" "$1"', "FIFO": 'mkfifo -m 666 "$1"'}[kind]
    assert as_nobody(script, str(private), str(victim)).returncode == 0
    with caplog.at_level(logging.WARNING, "roost"):
        remember_job("mine", ADDRESS)  # the job runs all the same
    assert "R140" in caplog.text
    assert list(victim.iterdir()) == []
    assert kind != "folder" or list(private.iterdir()) == []
    forget_job("mine")


def test_notes_are_not_read_from_a_folder_that_others_can_write_to(private: Path) -> None:
    (private / "jobs").mkdir(parents=True)
    private.chmod(0o777)
    with pytest.raises(ClusterError, match="has mode 0777"):
        find_job()


@pytest.mark.parametrize("kind", ["link", "FIFO", "directory"])
def test_notes_that_are_no_files_are_passed_over(kind: str, private: Path, tmp_path: Path) -> None:
    """As a backup, or an earlier version in an open folder, may have left them: nothing is followed or waited for."""
    remember_job("mine", ADDRESS)
    planted = private / "jobs" / "mine.1.json"
    if kind == "link":
        (tmp_path / "note").write_text(
            json.dumps({"namespace": "mine", "address": EVIL, "pid": os.getpid(), "auth_mode": "disabled"})
        )
        planted.symlink_to(tmp_path / "note")
    elif kind == "FIFO":
        os.mkfifo(planted)
    else:
        planted.mkdir()
    assert find_job("mine") == ADDRESS
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_link_in_place_of_a_note_is_not_written_through(
    private: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "victim").write_text("precious")
    remember_job("first", ADDRESS)
    (private / "jobs" / f"mine.{os.getpid()}.json").symlink_to(tmp_path / "victim")
    with caplog.at_level(logging.WARNING, "roost"):
        remember_job("mine", ADDRESS)
    assert "R141" in caplog.text
    assert (tmp_path / "victim").read_text() == "precious"

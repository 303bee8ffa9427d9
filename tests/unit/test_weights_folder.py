"""The folder for versions of weights: made when it is needed, and removed however its maker ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from roost.errors import ClusterError, RolloutError
from roost.weights.folder import WeightsFolder

MAKER = """
import sys, time
from roost.weights.folder import WeightsFolder
folder = WeightsFolder()
print(folder.path(), flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary and a runtime directory for this test alone."""
    runtime, temporary = tmp_path / "runtime", tmp_path / "temporary"
    runtime.mkdir(mode=0o700)
    temporary.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return temporary


def test_it_is_made_on_first_use_and_private(private: Path) -> None:
    folder = WeightsFolder()
    assert list(private.iterdir()) == [], "nothing is made before it is needed"
    path = Path(folder.path())
    assert path.is_relative_to(private / f"roost-{os.getuid()}")
    assert list((private.parent / "runtime").iterdir()) == [], "which may be a small file system in memory"
    assert stat.S_IMODE((private / f"roost-{os.getuid()}").stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert folder.path() == str(path)
    folder.close()
    folder.close()
    assert not path.exists()


def test_a_planted_folder_is_refused(private: Path) -> None:
    (private / "elsewhere").mkdir()
    (private / f"roost-{os.getuid()}").symlink_to(private / "elsewhere")
    with pytest.raises(ClusterError, match="is a symbolic link, not a directory") as caught:
        WeightsFolder().path()
    assert caught.value.codes == ("R140",)


def test_the_users_folder_is_made_and_stays(tmp_path: Path) -> None:
    given = tmp_path / "mine" / "weights"
    folder = WeightsFolder(str(given))
    assert not given.exists(), "nothing is made before it is needed"
    for _ in range(2):
        assert folder.path() == str(given)
        assert given.is_dir()
    folder.close()
    assert given.is_dir()


def test_a_folder_of_the_user_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RolloutError, match="file/weights, cannot be created on this node: Not a directory") as caught:
        WeightsFolder(str(tmp_path / "file" / "weights")).path()
    assert caught.value.codes == ("S206",)


def test_a_folder_whose_maker_was_killed_goes_with_the_next_one() -> None:
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True) as maker:
        try:
            assert maker.stdout is not None
            left = Path(maker.stdout.readline().strip())
            (left / "version-1").mkdir()
            (left / "version-1" / "model.safetensors").write_bytes(b"bytes")
            first = WeightsFolder()
            first.path()
            assert left.is_dir(), "its maker runs"
        finally:
            os.kill(maker.pid, signal.SIGKILL)
    assert left.is_dir(), "nobody could remove it"
    second = WeightsFolder()
    second.path()
    assert not left.exists()
    assert Path(first.path()).is_dir(), "the maker of this one runs: this process"
    first.close()
    second.close()
    assert list(left.parent.iterdir()) == []

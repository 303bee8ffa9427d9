"""The folder for versions of weights: made when it is needed, and removed however its maker ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

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
    """A runtime folder for this test alone."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_it_is_made_on_first_use_and_private(private: Path) -> None:
    folder = WeightsFolder()
    assert list(private.iterdir()) == [], "nothing is made before it is needed"
    path = Path(folder.path())
    assert path.is_relative_to(private)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert folder.path() == str(path)
    folder.close()
    folder.close()
    assert not path.exists()


def test_the_users_folder_stays(tmp_path: Path) -> None:
    given = tmp_path / "mine"
    given.mkdir()
    folder = WeightsFolder(str(given))
    assert folder.path() == str(given)
    folder.close()
    assert given.is_dir()


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

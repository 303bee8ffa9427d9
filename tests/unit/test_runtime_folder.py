"""The private folder of a user: what another user planted is refused, never followed and never waited for."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from roost import ClusterError
from roost.cluster import runtime_folder as module
from roost.cluster.runtime_folder import open_private, runtime_folder

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the private folder will be, in a runtime directory of this user."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "roost"


def test_the_runtime_directory_of_the_user_is_used(folder: Path) -> None:
    assert runtime_folder() == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert runtime_folder() == str(folder)  # it exists already


@pytest.mark.parametrize("which", ["unset", "missing", "accessible", "link", "relative"])
def test_a_runtime_directory_that_is_not_private_is_passed_over(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr(module, "_SHARED", str(shared))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "accessible").mkdir()
    (tmp_path / "accessible").chmod(0o755)
    if which == "unset":
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", "own" if which == "relative" else str(tmp_path / which))
    assert runtime_folder() == f"{shared}/roost-{os.getuid()}"


def test_many_at_once_get_the_same_folder(folder: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(lambda _: runtime_folder(), range(200))) == {str(folder)}


def test_a_planted_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClusterError, match="is a symbolic link, not a directory") as caught:
        runtime_folder()
    assert caught.value.codes == ("R140",)
    assert str(folder) in str(caught.value)


def test_a_folder_that_others_can_reach_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)
    with pytest.raises(ClusterError, match="has mode 0750") as caught:
        runtime_folder()
    assert f"chmod 700 {folder}" in str(caught.value)
    folder.chmod(0o700)
    assert runtime_folder() == str(folder)


@needs_root
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(ClusterError, match=f"belongs to user {NOBODY}, not to user 0"):
        runtime_folder()


def test_a_folder_that_cannot_be_created_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(module, "_SHARED", str(folder / "missing"))
    with pytest.raises(ClusterError, match="cannot be created: No such file or directory"):
        runtime_folder()


def test_files_are_created_read_and_emptied(tmp_path: Path) -> None:
    path = tmp_path / "note"
    with pytest.raises(FileNotFoundError):
        open_private(str(path), os.O_RDONLY)
    with os.fdopen(open_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write("first")
        assert not os.get_inheritable(file.fileno())
        assert os.get_blocking(file.fileno())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        open_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(open_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as file:
        file.write(", second")
    with os.fdopen(open_private(str(path), os.O_RDONLY)) as file:
        assert file.read() == "first, second"
    os.close(open_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    assert path.read_text() == ""


def test_a_missing_folder_does_not_hang(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_private(str(tmp_path / "missing" / "note"), os.O_WRONLY | os.O_CREAT)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_RDWR])
@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "socket", "directory", "hard link"])
def test_what_is_no_regular_file_of_this_user_is_refused(kind: str, flags: int, tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "planted"
    victim.write_text("precious")
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "link":
            path.symlink_to(victim)
        elif kind == "dangling link":
            path.symlink_to(tmp_path / "new")
        elif kind == "FIFO":
            os.mkfifo(path)
        elif kind == "socket":
            server.bind(str(path))
        elif kind == "directory":
            path.mkdir()
        else:
            path.hardlink_to(victim)
        with pytest.raises(ClusterError, match=r"regular file|has 2 hard links") as caught:
            open_private(str(path), flags)
    assert caught.value.codes == ("R141",)
    assert str(path) in str(caught.value)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "new").exists()


@needs_root
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC])
def test_a_file_of_another_user_is_refused(flags: int, tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_text("planted")
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(ClusterError, match=f"belongs to user {NOBODY}, not to user 0"):
        open_private(str(path), flags)
    assert path.read_text() == "planted"


def test_it_does_not_import_ray() -> None:
    code = "import sys, roost.cluster.runtime_folder, roost.cluster.ports; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"

"""A Ray that is too old is refused before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from roost import ClusterError
from roost.cluster import version


def run(folder: Path, found: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code where the installed Ray says that it is of another version."""
    info = folder / f"ray-{found}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {found}\n")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("room", ["roost.cluster", "roost.worker"])
def test_an_old_ray_is_refused_with_the_command_to_run(tmp_path: Path, room: str) -> None:
    done = run(tmp_path, "2.46.0", f"import {room}")
    assert done.returncode == 1
    assert "ClusterError" in done.stderr
    assert "Ray 2.46 is too old: 2.47 or newer is needed" in done.stderr
    assert "pip install 'ray>=2.47'" in done.stderr
    assert done.stdout == ""


def test_what_needs_no_ray_works_with_an_old_one(tmp_path: Path) -> None:
    done = run(tmp_path, "2.9.3", "import roost, sys; roost.Topology.parse('2x8'); print('ray' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(
    ("found", "is_enough"),
    [("2.47.0", True), ("2.47.0rc1", True), ("2.100.1", True), ("3.0.0", True), ("2.46.9", False), ("1.99.0", False)],
)
def test_versions_count_as_numbers(monkeypatch: pytest.MonkeyPatch, found: str, is_enough: bool) -> None:
    monkeypatch.setattr(version, "version", lambda name: found)
    if is_enough:
        version.check_ray()
    else:
        with pytest.raises(ClusterError, match="too old"):
            version.check_ray()


def test_no_ray_at_all_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", missing)
    with pytest.raises(ClusterError, match="Ray is not installed") as caught:
        version.check_ray()
    assert "pip install 'ray>=2.47'" in str(caught.value)

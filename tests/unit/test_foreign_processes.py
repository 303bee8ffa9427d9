"""Which processes that hold accelerator memory count as foreign."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from roost.hardware.accelerators import Holder
from roost.worker.foreign_processes import ForeignProcess, find_foreign_processes, findings_of
from roost.worker.processes import kill_if_same, look_at

NOBODY = 2**22 + 1
"""Above what the kernel gives."""


def test_without_a_raylet_no_process_is_foreign() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        holders = [Holder("GPU-a", other.pid, 30.0), Holder("GPU-a", os.getpid(), 5.0), Holder("GPU-b", NOBODY, 9.0)]
        assert find_foreign_processes(holders) == []
    finally:
        other.communicate(b"")


RAYLET = """
import os, subprocess, sys
from roost.hardware.accelerators import Holder
from roost.worker.foreign_processes import find_foreign_processes
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
holders = [Holder("GPU-a", child.pid, 3.0), Holder("GPU-a", int(sys.argv[1]), 30.0), Holder("GPU-b", int(sys.argv[2]), None)]
print([(one.uuid, one.pid, one.used_gib) for one in find_foreign_processes(holders, [])])
print([one.pid for one in find_foreign_processes(holders, [int(sys.argv[1])])])
print([one.command for one in find_foreign_processes(holders)])
child.communicate(b"")
"""


def test_processes_of_the_same_raylet_are_not_foreign(tmp_path: Path) -> None:
    raylet = tmp_path / "raylet"  # a shell of that name, which starts a worker
    raylet.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    raylet.chmod(0o755)
    other = subprocess.Popen([sys.executable, "-c", "input()  # a foreign process"], stdin=subprocess.PIPE)
    try:
        found = subprocess.run(
            [raylet, "-c", RAYLET, str(other.pid), str(NOBODY)], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    finally:
        other.communicate(b"\n")
    assert found[0] == str([("GPU-a", other.pid, 30.0)])
    assert found[1] == "[]"
    assert "a foreign process" in found[2]


def test_a_process_that_has_ended_is_not_foreign(tmp_path: Path) -> None:
    raylet = tmp_path / "raylet"
    raylet.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    raylet.chmod(0o755)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other.kill()
    while Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pass
    found = subprocess.run(
        [raylet, "-c", RAYLET, str(other.pid), str(NOBODY)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    other.communicate()
    assert found[0] == "[]"


def test_findings_name_process_memory_and_accelerator() -> None:
    found = [
        ForeignProcess("GPU-a", 41, "python train.py", 30.25),
        ForeignProcess("GPU-a", 42, "Xorg", 0.2),
        ForeignProcess("GPU-b", 43, "python other.py", None),
        ForeignProcess("GPU-c", 44, "not ours to use", 30.0),
    ]
    findings = findings_of(1, found, {"GPU-a": "GPU 0 (80 GiB)", "GPU-b": "GPU 1 (80 GiB)"})
    assert [finding.message for finding in findings] == [
        "node 1, GPU 0 (80 GiB): process 41 (python train.py) holds 30.2 GiB of it",
        "node 1, GPU 1 (80 GiB): process 43 (python other.py) holds memory of it",
    ]
    assert [fix.paste for fix in findings[0].fixes] == ["kill 41", "ROOST_ALLOW_BUSY_GPUS=1"]


def test_only_the_process_that_is_meant_is_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        facts = look_at(child.pid)
        assert facts is not None
        assert facts.is_alive
        assert "input()" in facts.command
        kill_if_same([(child.pid, facts.started + 1.0)])
        assert child.poll() is None, "another process with the same pid"
        kill_if_same([(child.pid, facts.started), (NOBODY, 1.0)])
        assert child.wait(30) == -signal.SIGKILL
    finally:
        child.kill()
        child.communicate()
    assert look_at(child.pid) is None

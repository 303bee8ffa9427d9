"""Which GPUs a process sees, learnt without initialising CUDA in it.

There is no NVIDIA GPU here: the driver libraries are stand-ins in C, and everything else is real. ``tests/gpu`` has the
same with a real GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvidia_driver import LOST, NvidiaDriver

import roost
from roost.hardware.vendors import nvidia


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvidiaDriver:
    """A driver of four GPUs, which processes that are started from here find."""
    made = NvidiaDriver(tmp_path)
    made.set_gpus([0, 0, 0, 0])
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


FORKING = """
import ctypes, json, os, sys
from roost.hardware import AcceleratorType
uuids = AcceleratorType.NVIDIA.visible_uuids()
child = os.fork()
if child == 0:
    os._exit(ctypes.CDLL("libcuda.so.1").cuInit(0))
print(json.dumps([os.getpid(), uuids, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]))
"""


def test_a_process_that_knows_its_gpus_can_fork_and_use_cuda_in_the_child(driver: NvidiaDriver) -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=True)
    pid, uuids, code_in_child = json.loads(done.stdout)
    assert uuids == [driver.uuid(index) for index in range(4)]
    assert code_in_child == 0
    assert pid not in driver.processes_with_cuda()


@pytest.mark.parametrize(("visible", "expected"), [("2", [2]), ("1,3", [1, 3]), ("", [])])
def test_the_variable_of_the_process_counts(
    driver: NvidiaDriver, monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvidia._visible_uuids() == [driver.uuid(index) for index in expected]


def test_a_gpu_that_is_lost_is_not_seen(driver: NvidiaDriver) -> None:
    driver.set_gpus([0, LOST, 0])
    assert nvidia._visible_uuids() == [driver.uuid(0), driver.uuid(2)]


def failure() -> str:
    with pytest.raises(roost.ClusterError) as caught:
        nvidia._visible_uuids()
    assert caught.value.codes == ("R114",)
    return str(caught.value)


def test_a_driver_that_fails_says_how(driver: NvidiaDriver) -> None:
    driver.set_cuda(999)
    assert "cuInit returned 999 (CUDA_ERROR_UNKNOWN)" in failure()


def test_a_driver_without_an_answer_says_what_came_instead(driver: NvidiaDriver) -> None:
    driver.set_cuda(-2)
    assert "ended with status 0 and printed: this is no answer" in failure()


def test_a_driver_that_hangs_has_a_limit(driver: NvidiaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "PROBE_TIMEOUT_S", 3.0)
    driver.set_cuda(-1)
    assert "cuInit did not return within 3 s" in failure()


def test_a_driver_that_is_not_there_says_so(driver: NvidiaDriver) -> None:
    os.unlink(driver.folder / "libcuda.so.1")
    assert "libcuda.so.1" in failure()

"""A process that holds memory of the GPU is named before anything of the job runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import roost

HOLD = "import torch, sys; x = torch.ones(2 * 2**30, dtype=torch.uint8, device='cuda'); print('up', flush=True); sys.stdin.read()"


class Silent(roost.Worker):
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def machine() -> Iterator[roost.Cluster]:
    os.environ.pop("RAY_ADDRESS", None)
    with roost.Cluster(num_nodes=1) as cluster:
        yield cluster


@pytest.fixture
def foreign_pid() -> Iterator[int]:
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    yield holder.pid
    holder.communicate("")


def test_a_foreign_process_is_named_with_its_pid(machine: roost.Cluster, foreign_pid: int) -> None:
    with pytest.raises(roost.LaunchError) as caught:
        Silent.create_group().launch(machine, roost.PackedPlacementStrategy(0, 0))
    text = str(caught.value)
    print(text)
    assert f"process {foreign_pid} (" in text
    assert f"kill {foreign_pid}" in text
    assert "GiB of it" in text


def test_one_may_launch_beside_it(machine: roost.Cluster, foreign_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_ALLOW_BUSY_GPUS", "1")
    with Silent.create_group().launch(machine, roost.PackedPlacementStrategy(0, 0)) as group:
        assert group.pid().wait()


def test_workers_of_the_same_ray_are_not_foreign(machine: roost.Cluster) -> None:
    one = roost.PackedPlacementStrategy(0, 0)
    with Holding.create_group().launch(machine, one) as first, Silent.create_group().launch(machine, one) as second:
        assert first.pid().wait() != second.pid().wait()


class Holding(Silent):
    def __init__(self) -> None:
        import torch

        self.held = torch.ones(2 * 2**30, dtype=torch.uint8, device="cuda")

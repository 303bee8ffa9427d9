"""Checkpoints of trainers: what every rank holds, whole or not at all, whenever a process is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roost.errors import CheckpointError
from roost.rl.train_state import INDEX, load_trainer, save_trainer
from roost.weights.host_copies import HostCopies

RANK = Path(__file__).parent / "state_rank.py"


class Rank:
    """A rank in a process of its own."""

    def __init__(self, rank: int, meeting: Path, folder: Path) -> None:
        command = [sys.executable, str(RANK), str(rank), str(meeting), str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def two_ranks(meeting: Path, folder: Path) -> Iterator[list[Rank]]:
    with ExitStack() as stack:
        ranks = []
        for number in range(2):
            ranks.append(Rank(number, meeting, folder))
            stack.callback(ranks[-1].process.wait)
            stack.callback(ranks[-1].process.kill)
        yield ranks


def both(ranks: list[Rank], *words: str) -> list[dict[str, Any]]:
    for rank in ranks:
        rank.tell(*words)
    return [rank.read() for rank in ranks]


def test_two_ranks_save_their_parts_and_a_kill_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    with two_ranks(tmp_path / "first", folder) as ranks:
        first = both(ranks, "train", "1")
        assert first[0]["weight"] != first[1]["weight"]
        assert both(ranks, "save", "-") == first
        assert both(ranks, "train", "2") != first
        assert both(ranks, "load", "-") == first, "each rank has its own part again, and its optimizer's"
        both(ranks, "train", "2")
        ranks[1].tell("stall", "writing")
        ranks[1].read()
        ranks[0].tell("save", "-")
        ranks[1].tell("save", "-")
        assert ranks[1].read() == {"event": "stalled"}
        ranks[1].kill()
        lost = ranks[0].read()
        assert lost["codes"] == ["W301"]
        assert "rank 0 lost another rank" in lost["error"]
    with two_ranks(tmp_path / "second", folder) as ranks:
        assert both(ranks, "load", "-") == first, "a rank that was killed while it wrote changed nothing"
        both(ranks, "train", "3")
        ranks[0].tell("stall", "committing")
        ranks[0].read()
        ranks[0].tell("save", "-")
        ranks[1].tell("save", "-")
        assert ranks[0].read() == {"event": "stalled"}
        assert len(list(folder.glob("state-*"))) == 2
        ranks[0].kill()
        assert ranks[1].read()["codes"] == ["W301"]
    with two_ranks(tmp_path / "third", folder) as ranks:
        assert both(ranks, "load", "-") == first, "all files were written, and did not count yet"
        fourth = both(ranks, "train", "4")
        both(ranks, "save", "-")
        assert len(list(folder.glob("state-*"))) == 1, "what was left behind is gone"
        assert sorted(path.name for path in folder.glob("state-*/*")) == ["tp-0-pp-0.pt", "tp-1-pp-0.pt"]
        both(ranks, "train", "5")
        assert both(ranks, "load", "-") == fourth
        damaged = next(folder.glob("state-*/tp-1-pp-0.pt"))
        bits = bytearray(damaged.read_bytes())
        bits[-50] ^= 1
        damaged.write_bytes(bits)
        fifth = both(ranks, "train", "5")
        for found in both(ranks, "load", "-"):
            assert found["codes"] == ["W302"]
            assert "rank 1 on " in found["error"]
            assert "tp-1-pp-0.pt is damaged" in found["error"]
        for rank in ranks:
            rank.tell("stall", "never")
        assert [rank.read() for rank in ranks] == fifth, "no rank took anything"


def trainer(**changes: Any) -> Any:
    model = torch.nn.Linear(3, 2)
    given = {"rank": 0, "world_size": 1, "tensor_parallel": 1, "pipeline_parallel": 1, "model": model,
             "optimizer": torch.optim.SGD(model.parameters(), 0.1), "global_step": 7, "_copies": HostCopies}  # fmt: skip
    return SimpleNamespace(**{**given, **changes})


def refused(worker: Any, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_trainer(worker, folder)
    assert caught.value.codes == ("W302",)
    return str(caught.value)


def test_replicas_are_saved_once_and_their_number_may_change(tmp_path: Path) -> None:
    saved = trainer()
    save_trainer(saved, tmp_path)
    other = trainer(world_size=3, rank=2, global_step=0)
    load_trainer(other, tmp_path)
    assert torch.equal(other.model.weight, saved.model.weight)
    assert other.global_step == 7
    assert [path.name for path in tmp_path.glob("state-*/*")] == ["tp-0-pp-0.pt"]


def test_what_is_not_whole_or_does_not_fit_is_named(tmp_path: Path) -> None:
    assert f"has no {INDEX}: no save has ended there" in refused(trainer(), tmp_path)
    save_trainer(trainer(), tmp_path)
    assert "saved with tensor_parallel 1, pipeline_parallel 1, and this trainer has 2 and 1" in refused(
        trainer(world_size=2, tensor_parallel=2), tmp_path
    )
    assert "weight has shape [2, 3] instead of [2, 4]" in refused(trainer(model=torch.nn.Linear(4, 2)), tmp_path)
    assert "extra is missing" in refused(trainer(model=with_extra(torch.nn.Linear(3, 2))), tmp_path)
    assert "one has an optimizer" in refused(trainer(optimizer=None), tmp_path)
    assert "3 ranks cannot be divided by tensor_parallel 2" in refused(
        trainer(world_size=3, tensor_parallel=2), tmp_path
    )
    [file] = tmp_path.glob("state-*/*")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert f"{file} has {len(whole) - 1:,} bytes instead of {len(whole):,}" in refused(trainer(), tmp_path)
    file.unlink()
    assert f"No such file or directory: {file}" in refused(trainer(), tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    for wrong in ({**index, "format": 2}, {**index, "files": []}, {**index, "state": "../else"}, {}, []):
        (tmp_path / INDEX).write_text(json.dumps(wrong))
        assert INDEX in refused(trainer(), tmp_path)


def with_extra(model: Any) -> Any:
    model.extra = torch.nn.Parameter(torch.zeros(1))
    return model


def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    first = trainer()
    save_trainer(first, tmp_path)
    offloaded = SimpleNamespace(is_offloaded=True)
    for worker, reason in (
        (trainer(model=None), "init() sets self.model"),
        (trainer(_copies=lambda: offloaded), "call onload() before"),
        (trainer(global_step=open(RANK)), "cannot pickle"),  # noqa: SIM115
    ):
        with pytest.raises(CheckpointError) as caught:
            save_trainer(worker, tmp_path)
        assert caught.value.codes == ("W301",)
        assert reason in str(caught.value)
    assert len(list(tmp_path.glob("state-*"))) == 1
    again = trainer()
    load_trainer(again, tmp_path)
    assert torch.equal(again.model.weight, first.model.weight)
    (tmp_path / "file").write_text("of an earlier release")
    with pytest.raises(CheckpointError, match="it is a file, and a checkpoint is a folder"):
        save_trainer(trainer(), tmp_path / "file")

"""Handles of a trainer's GPU memory as SGLang's processes read them: mapped in another process, by UUID, again and again."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))

from roost.engines.engine import EnginePlace
from roost.engines.sglang.intake import HandleIntake, make_intake
from roost.plan import WeightTransport
from roost.weights.ipc import IpcSender
from roost.weights.streams import Piece, WeightStream

ROUNDS = 20


def rank_of_sglang(pipe: Any, folder: str) -> None:
    """A process that has the model, and obeys as a rank of the server does."""
    from sglang_model import write_model
    from sglang_ranks import Rank

    write_model(Path(folder))
    with_port = argparse.Namespace(
        device="cuda", model_path=folder, enable_weights_cpu_backup=False, dist_init_addr="", nccl_port=29511, tp_size=1
    )
    rank = Rank(with_port, 0)
    while (told := pipe.recv()) is not None:
        pipe.send(rank.obey(*told))


class Engine:
    """Passes commands on, as SGLang's server does to its ranks."""

    bucket_bytes = 1000

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def update(self, commands: Any, version: int) -> None:
        for route, body in commands:
            self.pipe.send((route, {**body, "load_format": None}))
            success, message, self.checksum = self.pipe.recv()
            assert success, message


def test_handles_are_mapped_by_another_process(tmp_path: Path) -> None:
    from sglang_model import tiny
    from sglang_ranks import checksum_of

    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=rank_of_sglang, args=(there, str(tmp_path / "model")), daemon=True
    )
    child.start()
    weights = {name: tensor.cuda() for name, tensor in tiny(1).state_dict().items()}
    pieces = []
    for name, tensor in weights.items():
        box, shape = tuple((0, size) for size in tensor.shape), tuple(tensor.shape)
        kind = str(tensor.dtype).removeprefix("torch.")
        pieces.append(Piece(name, kind, shape, box, box, box, shape, 0, tensor.nbytes))
    stream = WeightStream("c", WeightTransport.IPC, 0, (0,), tuple(pieces), 0)
    sender = IpcSender(stream, lambda: weights)
    engine: Any = Engine(here)
    intake = make_intake(engine, EnginePlace(accelerators=(0,)), [stream], {"c": sender.address}, 0, 60)
    assert isinstance(intake, HandleIntake)
    for version in range(1, ROUNDS):
        for name, tensor in tiny(version).state_dict().items():
            weights[name].copy_(tensor)
        sender.send(weights, version)
        intake.commit(version)
        assert engine.checksum == checksum_of(weights), f"version {version}"
    here.send(None)
    child.join(60)
    assert child.exitcode == 0

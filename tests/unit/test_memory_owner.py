"""Processes whose memory is used, and modules that compute with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from roost.engines.engine import Engine, EngineOutput
from roost.engines.torch.engine import TorchEngine
from roost.engines.torch.weights import ModuleWeights
from roost.errors import RoostError
from roost.weights.aliasing import AliasedTensors, MemoryOwner
from roost.weights.buffers import StagedTensors


def test_a_lender_is_alive_until_it_is_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = MemoryOwner(process.pid)
    assert owner.is_alive()
    process.kill()
    while process.poll() is None:
        pass
    assert not owner.is_alive()
    assert not MemoryOwner(process.pid).is_alive()


def test_one_that_is_not_reaped_yet_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "print('up', flush=True)"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    owner = MemoryOwner(process.pid)
    process.stdout.read()
    while open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[0] != "Z":  # noqa: SIM115
        pass
    assert not owner.is_alive()
    process.wait()
    process.stdout.close()


def test_a_number_that_is_another_process_by_now_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = MemoryOwner(process.pid)
    assert owner._known is not None
    owner._known = replace(owner._known, started=1)
    assert not owner.is_alive()
    process.communicate(b"\n")


def test_tied_tensors_are_pointed_together_and_dropped() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    aliases = {"0.weight": "0.weight", "0.bias": "0.bias", "1.weight": "0.weight", "1.bias": "1.bias"}
    other = {"0.weight": torch.eye(3), "0.bias": torch.zeros(3), "1.bias": torch.ones(3)}
    borrowed = AliasedTensors(module, aliases)
    borrowed.point(other)
    assert torch.equal(module(torch.ones(1, 3)), torch.full((1, 3), 2.0))
    other["0.weight"].mul_(2.0)  # the memory is the other's
    assert torch.equal(module(torch.ones(1, 3)), torch.full((1, 3), 5.0))
    borrowed.drop()
    assert all(parameter.numel() == 0 for parameter in module.parameters())
    borrowed.point(other)
    assert torch.equal(module(torch.ones(1, 3)), torch.full((1, 3), 5.0))


def test_an_engine_that_let_go_computes_again_when_the_same_version_comes_again() -> None:
    engine = TorchEngine(lambda: torch.nn.Embedding(4, 4), context=8, aliases_weights=True)
    lent = {"weight": 100.0 * torch.roll(torch.eye(4), 1, 1)}  # each token is followed by the next one
    owner = MemoryOwner(os.getpid())
    greedy = {"max_new_tokens": 3, "temperature": 0.0}
    try:
        for _ in range(2):  # once more, as after the death of another engine
            engine.alias_weights(StagedTensors(lent), 1, owner)
            assert engine.generate([[0]], greedy)[0].output_ids == [1, 2, 3]
            engine.forget_sources()
            assert engine.info()["is_offloaded"]
        with pytest.raises(RoostError, match="comes after"):
            engine.alias_weights(StagedTensors(lent), 0, owner)
        engine.load_weights(lent, 2)
        assert engine.generate([[1]], greedy)[0].output_ids == [2, 3, 0]
    finally:
        engine.stop()


def test_what_is_on_another_device_is_copied() -> None:
    module = torch.nn.Embedding(4, 4, device="meta")
    weights = ModuleWeights(module, torch.device("meta"))
    weights.alias({"weight": torch.eye(4)}, MemoryOwner(os.getpid()))
    weights.drop_aliases()
    assert weights.can_compute
    assert (module.weight.device.type, module.weight.numel()) == ("meta", 16)  # its own, as before


class Copying(Engine):
    """Has nothing to say of aliasing."""

    def generate(self, prompts: Any, params: Any) -> list[EngineOutput]:
        return []

    def describe_weights(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {}

    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        self.version = version


def test_an_engine_that_cannot_borrow_copies() -> None:
    engine = Copying()
    engine.alias_weights({}, 3, MemoryOwner(os.getpid()))
    assert engine.version == 3

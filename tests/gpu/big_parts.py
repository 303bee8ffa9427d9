"""A trainer and an engine with weights as large as asked for."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import torch

from roost import RolloutManager, Sample, SampleGroup, TorchEngine, TrainGroup, TrainWorker
from roost.engines.keys import headers_of

JOB = {"cluster": {"component_placement": {
    "actor": {"placement": "0", "gpu_share": 0.8}, "rollout": {"placement": "0", "gpu_share": 0.2},
}}}  # fmt: skip


class Big(torch.nn.Module):
    """Many tensors of one size, and a head so small that it can generate."""

    def __init__(self, tensors: int = 400, mib: float = 41.0, seed: int = 0) -> None:
        super().__init__()
        size = int(mib * 2**20 / 2)
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.body = torch.nn.ParameterList(
            torch.nn.Parameter(
                torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(generator=generator), requires_grad=False
            )
            for _ in range(tensors)
        )
        self.head = torch.nn.Embedding(16, 16, device="cuda", dtype=torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(ids).float()


def checksums(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        flat = tensor.reshape(-1).view(torch.int16).long()
        digest.update(f"{name} {int((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum())}".encode())
    return digest.hexdigest()


class BigTrainer(TrainWorker):
    def init(self, tensors: int, mib: float) -> None:
        self.model = Big(tensors, mib, seed=1)

    def train(self, factor: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)

    def move(self) -> None:
        """Gives every tensor other memory, as an allocator may."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()

    def checksums(self) -> str:
        return checksums(self.model)

    def used_gib(self) -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30

    def pid(self) -> int:
        return os.getpid()

    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def bare_copy_s(self) -> tuple[float, float]:
        """Copies on the device, within this process: of as many bytes in one piece, and of all its tensors in turn."""
        flat = torch.ones(self.nbytes(), dtype=torch.uint8, device="cuda")
        other = torch.empty_like(flat)
        one = typical(lambda: other.copy_(flat))
        flat = other = None
        sources = [parameter.data for parameter in self.model.parameters()]
        targets = [torch.empty_like(source) for source in sources]
        each = typical(lambda: [target.copy_(source) for target, source in zip(targets, sources, strict=True)])
        targets = []
        torch.cuda.empty_cache()
        return one, each

    def bare_pinned_s(self) -> tuple[float, float]:
        """A copy of 4 GiB to pinned memory and one back, as seconds for as many bytes as its tensors have."""
        device = torch.ones(4 * 2**30, dtype=torch.uint8, device="cuda")
        host = torch.empty(4 * 2**30, dtype=torch.uint8, pin_memory=True)
        factor = sum(parameter.nbytes for parameter in self.model.parameters()) / device.nbytes
        out = typical(lambda: host.copy_(device, non_blocking=True))
        back = typical(lambda: device.copy_(host, non_blocking=True))
        device = host = None
        torch.cuda.empty_cache()
        return out * factor, back * factor


def typical(action: Callable[[], object], times: int = 9) -> float:
    """Seconds of the middle one of a few runs, until the device has finished."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


class BigEngine(TorchEngine):
    def info(self) -> dict[str, object]:
        return {"checksums": checksums(self._module)}


def engine(tensors: int, mib: float, **options: Any) -> functools.partial[BigEngine]:
    return functools.partial(BigEngine, functools.partial(Big, tensors, mib, 0), context=32, batch_rows=2, **options)


def info(rollout: RolloutManager) -> Any:
    engine = rollout.engines[0]
    request = urllib.request.Request(f"{engine.url}/get_server_info", headers=headers_of(engine.key))  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.loads(answer.read())


def same(train: TrainGroup, rollout: RolloutManager) -> bool:
    return bool(train.workers.checksums().wait()[0] == info(rollout)["checksums"])


def generate(rollout: RolloutManager, timeout_s: float = 30.0) -> SampleGroup:
    group = SampleGroup("some", {"seed": 1}, [Sample([1, 2], index=index) for index in range(2)])
    [done] = rollout.generate([group], {"max_new_tokens": 3}, timeout_s=timeout_s)
    return done

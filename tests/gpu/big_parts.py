"""A trainer and an engine with weights as large as asked for."""

from __future__ import annotations

import functools
import hashlib
import time

import torch

from roost import TorchEngine, TrainWorker


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

    def bare_copy_s(self, gib: float) -> float:
        """The best of a few copies of so much memory from here to here."""
        source = torch.ones(int(gib * 2**30), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)


class BigEngine(TorchEngine):
    def info(self) -> dict[str, object]:
        return {"checksums": checksums(self._module)}


def engine(tensors: int, mib: float) -> functools.partial[BigEngine]:
    return functools.partial(BigEngine, functools.partial(Big, tensors, mib, 0), context=32, batch_rows=2)

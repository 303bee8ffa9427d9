"""One rank of the trainer: it learns from its share of a batch, and averages gradients with the others."""

from __future__ import annotations

import torch
import torch.distributed as dist

from grpo import task
from grpo.learner import GrpoConfig, learn, make_optimizer, pack
from grpo.model import make_model
from roost import SampleGroup, TrainWorker


class GrpoTrainer(TrainWorker):
    """Data-parallel GRPO: every rank has the same model, and a part of each batch."""

    def init(self, model: str, learner: GrpoConfig, seed: int, rows: int) -> int:
        """Builds the model; returns the number of its parameters."""
        torch.set_num_threads(1)
        self.model = make_model(model, seed).to(self.device)
        self.optimizer = make_optimizer(self.model, learner)
        self.learner, self.rows = learner, rows
        return sum(parameter.numel() for parameter in self.model.parameters())

    def train(self, groups: list[SampleGroup]) -> dict[str, float]:
        """Learns from this rank's groups; returns what there is to show."""
        batch = pack(groups, self.rows, task.TOKENS).to(self.device)
        return learn(self.model, self.optimizer, batch, self.learner, self._average_gradients)

    def _average_gradients(self, model: torch.nn.Module) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.world_size
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def checksum(self) -> int:
        """That of this rank's model."""
        return checksum(self.model)


def checksum(model: torch.nn.Module) -> int:
    """A number that two models share only when all their bits do."""
    bits = torch.cat([p.detach().flatten().view(torch.int32).long() for p in model.parameters()])
    return int((bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum())

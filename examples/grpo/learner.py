"""GRPO: answers that beat the others to the same prompt become more likely.

The advantage of a sample is its reward, measured against its group: there is no value model. Samples are used for a few
updates, and may come from weights that are a step or two old; the ratio between the two policies corrects for that, and
PPO's clip ends a sample's say once it has moved the policy far enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class Sampled(Protocol):
    """What is read of a sample: ``roost.rl`` has such a class, and so can you."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    index: int
    reward: float | None


class Grouped(Protocol):
    """Samples of one prompt."""

    id: str
    samples: Sequence[Sampled]


@dataclass(frozen=True)
class GrpoConfig:
    """How a batch is learnt from.

    Attributes:
        lr: Adam's learning rate.
        weight_decay: Of matrices and embeddings alike.
        epochs: How often a batch is gone through.
        minibatches: Updates per epoch.
        clip_low: How far below 1 the ratio of a token counts.
        clip_high: How far above 1; more than below, so that rare tokens can become likely.
        entropy: The bonus on entropy, without which a wrong answer becomes certain before a right one was seen.
        max_norm: The longest gradient.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    epochs: int = 2
    minibatches: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy: float = 0.05
    max_norm: float = 1.0


@dataclass(frozen=True)
class Batch:
    """Samples as tensors, a row each; rows without a sample are all zeros and count for nothing.

    Attributes:
        ids: ``[rows, length]`` prompt, output, zeros.
        mask: ``[rows, length]`` 1.0 where an output token stands.
        logprobs: ``[rows, length]`` what the sampler gave that token.
        advantages: ``[rows]`` of the whole sample.
    """

    ids: Tensor
    mask: Tensor
    logprobs: Tensor
    advantages: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(tensor.to(device) for tensor in (self.ids, self.mask, self.logprobs, self.advantages)))

    def split(self, count: int) -> Iterator[Batch]:
        """Parts of ``count`` equal sizes, in order."""
        rows = len(self.ids)
        if rows % count:
            raise ValueError(f"{rows} rows cannot be split into {count} equal parts")
        parts = [tensor.split(rows // count) for tensor in (self.ids, self.mask, self.logprobs, self.advantages)]
        return (Batch(*part) for part in zip(*parts, strict=True))


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group, less their mean, in standard deviations; zeros where all are equal."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / (spread + 1e-4) for reward in rewards]


def pack(groups: Iterable[Grouped], rows: int, length: int) -> Batch:
    """Samples as a batch of ``rows`` by ``length``, whatever came in.

    The order is that of group ids and of indices in a group, so it does not matter who answered first.

    Raises:
        ValueError: A sample has no reward, or does not fit.
    """
    batch = Batch(
        ids=torch.zeros(rows, length, dtype=torch.long),
        mask=torch.zeros(rows, length),
        logprobs=torch.zeros(rows, length),
        advantages=torch.zeros(rows),
    )
    row = 0
    for group in sorted(groups, key=lambda group: group.id):
        samples = sorted(group.samples, key=lambda sample: sample.index)
        for sample, advantage in zip(samples, advantages([_reward(group, s) for s in samples]), strict=True):
            start, end = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.output_ids)
            if row == rows or end > length:
                raise ValueError(f"sample {sample.index} of {group.id} does not fit: row {row}, {end} tokens")
            batch.ids[row, :end] = torch.tensor([*sample.prompt_ids, *sample.output_ids])
            batch.mask[row, start:end] = 1.0
            batch.logprobs[row, start:end] = torch.tensor(sample.logprobs)
            batch.advantages[row] = advantage
            row += 1
    return batch


def grpo_loss(model: nn.Module, batch: Batch, config: GrpoConfig) -> tuple[Tensor, dict[str, float]]:
    """What to minimise, and what to show of it.

    A sample counts as the sum of its tokens and the batch as the mean over its *rows*. So the mean of the gradients of
    several trainers is the gradient of their batches as one, as long as these have the same number of rows.
    """
    output = model(batch.ids[:, :-1])
    logprobs = getattr(output, "logits", output).log_softmax(-1)
    mask, rows = batch.mask[:, 1:], len(batch.ids)
    taken = logprobs.gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
    ratio = ((taken - batch.logprobs[:, 1:]) * mask).exp()
    advantage = batch.advantages[:, None]
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    loss = -((gain + config.entropy * entropy) * mask).sum() / rows
    tokens = mask.sum().clamp(min=1.0)
    shown = {
        "loss": loss.item(),
        "entropy": ((entropy * mask).sum() / tokens).item(),
        "clipped": ((ratio != clipped).float().sum() / tokens).item(),
    }
    return loss, shown


def make_optimizer(model: nn.Module, config: GrpoConfig) -> torch.optim.Optimizer:
    """Adam, for all weights."""
    return torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay)


def learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: GrpoConfig,
    average: Callable[[nn.Module], None] | None = None,
) -> dict[str, float]:
    """All updates of one batch; what the last one has to show.

    Args:
        average: Called before each update, to make the gradients of this trainer the mean over all trainers.
    """
    shown: dict[str, float] = {}
    for _ in range(config.epochs):
        for part in batch.split(config.minibatches):
            optimizer.zero_grad()
            loss, shown = grpo_loss(model, part, config)
            loss.backward()
            if average is not None:
                average(model)
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
            shown["gradient"] = norm.item()
            optimizer.step()
    return shown


def _reward(group: Grouped, sample: Sampled) -> float:
    if sample.reward is None:
        raise ValueError(f"sample {sample.index} of {group.id} has no reward")
    return sample.reward

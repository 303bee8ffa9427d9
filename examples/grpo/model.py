"""A causal language model that is small enough to learn on one core in a minute; and others, from a directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo import task


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of a model.

    Attributes:
        vocab: Tokens that it knows.
        layers: Blocks of attention and feed-forward.
        width: Numbers per token between the blocks.
        heads: Attention heads; they share ``width``.
        context: The most tokens that a row can have.
    """

    vocab: int
    layers: int = 1
    width: int = 128
    heads: int = 4
    context: int = 8


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.before_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.merge = nn.Linear(config.width, config.width, bias=False)
        self.before_feed = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        seen = scores.masked_fill(mask, float("-inf")).softmax(-1) @ value
        x = x + self.merge(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.before_feed(x))))


class TinyLM(nn.Module):
    """Logits of the next token at every position.

    A position sees itself and what stands before it, so padding on the right changes nothing to its left.
    The weights that it starts with depend on ``seed`` alone; there is no dropout.
    """

    def __init__(self, config: TinyConfig, seed: int = 0) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"a width of {config.width} cannot be shared by {config.heads} heads")
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.last_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        later = torch.ones(config.context, config.context, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)
        self._start_from(seed)

    @torch.no_grad()
    def _start_from(self, seed: int) -> None:
        """Draws all weights: matrices by their fan-in, and a head so quiet that all tokens are about as likely."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif name in ("tokens.weight", "positions.weight"):
                weight.normal_(0.0, 0.3, generator=generator)
            elif name == "head.weight":
                weight.normal_(0.0, 0.02, generator=generator)
            elif weight.dim() == 2:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """``[rows, length]`` token ids → ``[rows, length, vocab]`` logits."""
        length = ids.shape[1]
        x = self.tokens(ids) + self.positions.weight[:length]
        mask = self.later[:length, :length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.last_norm(x))


TINY = TinyConfig(task.VOCAB, context=task.TOKENS)


def make_model(directory: str, seed: int) -> nn.Module:
    """The model to train: that of a transformers directory, or without one a ``TinyLM``."""
    if not directory:
        return TinyLM(TINY, seed)
    from roost.engines import Pretrained

    model = Pretrained(directory, "float32")()
    config: Any = model.config.get_text_config()
    if config.vocab_size < task.VOCAB:
        raise ValueError(f"{directory} knows {config.vocab_size} tokens, and the task has {task.VOCAB}")
    config.use_cache = False
    return model

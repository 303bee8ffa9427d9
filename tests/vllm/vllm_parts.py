"""A small model of transformers, and a trainer of it that cuts its tensors in two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roost.plan import TensorShards
from roost.rl.train import TrainWorker

VOCABULARY = 512
CONTEXT = 4096
OPTIONS = ["--max-model-len", str(CONTEXT), "--dtype", "float32", "--enforce-eager"]


def save_model(folder: Path) -> Path:
    """Writes a small Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=VOCABULARY, intermediate_size=256, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def load_model(folder: str | Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs_of(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """The log probabilities of all tokens, at the place of each of these behind a prompt."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits, -1)


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


class Learner(TrainWorker):
    """Changes all weights with each step. Both ranks compute the same, and each sends one half of each matrix."""

    tensor_parallel = 2

    def init(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.model = load_model(folder)

    def train(self, step: int) -> None:
        torch.manual_seed(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {
            name: tensor.chunk(2)[self.rank] if tensor.ndim == 2 else tensor
            for name, tensor in super().weights().items()
        }

    def shards(self) -> Sequence[TensorShards]:
        return [
            TensorShards(name, tuple(tensor.shape), "float32", 0 if tensor.ndim == 2 else None)
            for name, tensor in super().weights().items()
        ]

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        return [greedy(self.model, prompt, count) for prompt in prompts]

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Of each of these tokens behind a prompt."""
        found = logprobs_of(self.model, prompt, tokens)
        return found.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

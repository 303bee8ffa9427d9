"""A model of about 1.5 GB for a real SGLang, and a trainer of it on the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from roost import TrainWorker

GIB = 2**30


def save_model(folder: Path) -> Path:
    """Writes a Qwen3 with random weights, whose tokens are far from equally likely."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=2048, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        vocab_size=32000, intermediate_size=6144, max_position_embeddings=4096, tie_word_embeddings=False,
        dtype="bfloat16",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder


class Learner(TrainWorker):
    """Changes all weights with each step."""

    ballast: torch.Tensor | None = None

    def init(self, folder: str) -> None:
        from transformers import Qwen3ForCausalLM

        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(self.device).eval()

    def train(self, step: int) -> None:
        assert self.model is not None
        generator = torch.Generator(device=self.device).manual_seed(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.empty_like(parameter).normal_(generator=generator)
                parameter.add_(noise * 0.01)

    def nbytes(self) -> int:
        assert self.model is not None
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Log probabilities of tokens behind a prompt, with the weights of now."""
        assert self.model is not None
        ids = torch.tensor([[*prompt, *tokens]], device=self.device)
        scores = torch.log_softmax(self.model(ids).logits[0, len(prompt) - 1 : -1].double(), -1)
        return [float(scores[place, token]) for place, token in enumerate(tokens)]

    def hold(self, part: float) -> None:
        """Takes a part of the GPU's memory; 0 gives it back."""
        self.ballast = None
        torch.cuda.empty_cache()
        if part:
            total = torch.cuda.mem_get_info()[1]
            self.ballast = torch.zeros(int(part * total), dtype=torch.uint8, device=self.device)

    def memory_gib(self) -> tuple[float, float]:
        """What is used of the GPU, by anybody, and all there is."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB, total / GIB

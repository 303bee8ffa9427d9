"""A small real model, its folder, and a package that is named as SGLang is: for tests against ``sglang_server``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY, WIDTH = 32, 6
GREEDY = {"max_new_tokens": 8, "temperature": 0}
PROMPT = [1, 2]


def write_package(folder: Path, version: str = "0.5.9") -> Path:
    """A folder for ``PYTHONPATH`` with a package ``sglang`` that is this server."""
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    code = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport sglang_server\n"
    (package / "launch_server.py").write_text(f'{code}if __name__ == "__main__":\n    sglang_server.main()\n')
    return folder


def write_model(folder: Path, seed: int = 7) -> Path:
    """A model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "vocab_size": VOCABULARY}))
    save_file(tiny(seed).state_dict(), folder / "model.safetensors")
    return folder


class Tiny(torch.nn.Module):
    """Predicts from the last token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids) * self.scale.float())


def tiny(seed: int) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


@torch.no_grad()
def likeliest(tensors: Mapping[str, torch.Tensor], prompt: Sequence[int], count: int) -> list[int]:
    """What these weights say, at temperature 0."""
    model = Tiny()
    model.load_state_dict(dict(tensors))
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor(tokens[-1:]))[-1].argmax()))
    return tokens[len(prompt) :]


def write_home(folder: Path) -> Path:
    """A folder with a model, and with a package that is called as SGLang is."""
    write_model(folder / "model")
    write_package(folder / "package")
    return folder


def settings(home: Path, **env: str) -> dict[str, Any]:
    """What an engine is told to use that package."""
    return {"env": {"PYTHONPATH": str(home / "package"), **env}}


def meant(weights: Mapping[str, torch.Tensor], prompt: Sequence[int] = PROMPT) -> list[int]:
    """What an engine with these weights says at temperature 0."""
    return likeliest(weights, prompt, GREEDY["max_new_tokens"])

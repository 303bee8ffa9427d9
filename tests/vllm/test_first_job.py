"""The tutorial "First real job" runs as its page says, with a tiny random model."""

from __future__ import annotations

import os
import re
import string
import subprocess
import sys
from pathlib import Path

import torch
from snippets import ROOT, blocks_of

PAGE = ROOT / "docs" / "start" / "first-job.md"


def save_model_with_tokenizer(folder: Path) -> None:
    """Writes a small random Qwen3 whose tokens are single characters."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = {"unk_token": "<unk>", "eos_token": "<eos>"}
    signs = [*special.values(), *string.digits, *string.ascii_letters, *" :=+?."]
    tokenizer = Tokenizer(
        WordLevel({sign: number for number, sign in enumerate(signs)}, unk_token=special["unk_token"])
    )
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=len(signs), intermediate_size=256, max_position_embeddings=256, tie_word_embeddings=False,
        eos_token_id=1, dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def test_the_first_real_job_learns(tmp_path: Path) -> None:
    blocks = blocks_of(PAGE)
    for block in blocks:
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    command = next(block.text for block in blocks if "--set model=tiny" in block.text)
    steps = int(re.findall(r"steps=(\d+)", command)[0])
    save_model_with_tokenizer(tmp_path / "tiny")
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["HF_HUB_OFFLINE"] = "1"
    words = command.strip().removeprefix("$ ").split()
    done = subprocess.run(
        [*words, "--set", f"model={tmp_path / 'tiny'}", "--set", f"out={tmp_path / 'trained'}"],
        cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    curve = [float(mean) for mean in re.findall(r"^step +\d+ reward (\d\.\d\d) █*$", done.stdout, re.MULTILINE)]
    assert len(curve) == steps, done.stdout
    assert sum(curve[-5:]) / 5 > sum(curve[:5]) / 5 + 0.2, done.stdout
    assert (tmp_path / "trained" / "model.safetensors").exists()

"""``python examples/grpo/tiny.py DIR``: a directory with a small random Llama, as transformers writes it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def write_llama(directory: str | Path, seed: int = 0, vocabulary: int | None = None) -> int:
    """Writes one that knows the tokens of the task, or more; returns the number of its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from grpo import task

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary or task.VOCAB, hidden_size=128, intermediate_size=512, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=task.STOP,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return int(model.num_parameters())


def main() -> int:
    """Writes it."""
    parser = argparse.ArgumentParser(prog="python examples/grpo/tiny.py", description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, help="tokens that it knows (default: those of the task)")
    args = parser.parse_args()
    weights = write_llama(args.directory, args.seed, args.vocabulary)
    print(f"{args.directory}: a Llama of {weights:,} random weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())

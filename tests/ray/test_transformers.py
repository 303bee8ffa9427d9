"""A model of transformers with tied embeddings, behind the usual roles: trainer, engines, weight sync."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import roost
from roost import RolloutManager, TorchEngine, TrainGroup, TrainWorker

# One engine on the trainer's own accelerator, and one on another node.
JOB = {
    "cluster": {
        "num_nodes": 4,
        "component_placement": {
            "actor": {"placement": "0", "gpu_share": 0.5},
            "near": {"placement": "0", "role": "rollout", "gpu_share": 0.5},
            "far": {"placement": "4", "role": "rollout"},
        },
    }
}
PROMPTS = [[3], [1, 2, 3, 4, 5]]
LENGTH = 12


class Trainer(TrainWorker):
    """Draws other weights and calls that training."""

    def init(self, path: str) -> list[str]:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(self.device).eval()
        return [shard.name for shard in self.shards()]

    def train(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.3)

    def likeliest(self) -> list[list[int]]:
        rows = [torch.tensor([prompt]) for prompt in PROMPTS]
        said = [self.model.generate(row, max_new_tokens=LENGTH, do_sample=False) for row in rows]
        return [out[0, row.shape[1] :].tolist() for out, row in zip(said, rows, strict=True)]


def likeliest(engine: Any) -> list[list[int]]:
    (answers,) = engine.call(0, "generate", PROMPTS, {"max_new_tokens": LENGTH, "temperature": 0})[0].wait(60)
    return [answer.output_ids for answer in answers]


def test_engines_say_what_the_trained_model_says(cluster: roost.Cluster, tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plan = roost.Plan.resolve(JOB, cluster)
    engine = functools.partial(TorchEngine.from_pretrained, str(tmp_path), dtype="float32")
    with RolloutManager(cluster, plan, engine) as rollout, TrainGroup(cluster, Trainer, plan) as train:
        (names,) = train.init(str(tmp_path))
        assert "model.embed_tokens.weight" in names
        assert "lm_head.weight" not in names  # tied: it goes once
        train.connect(rollout)
        before = train.workers.likeliest().wait()[0]
        assert [likeliest(handle) for handle in rollout.engines] == [before, before]
        for version in (1, 2):
            train.train(version)
            report = train.update_weights()
            assert (report.version, report.engines) == (version, 2)
            assert set(report.bytes_by_transport) == {"shared_memory", "broadcast"}
            assert rollout._weights_folder._own._made is None, "nothing goes through files: no folder is made"
            trained = train.workers.likeliest().wait()[0]
            assert trained != before
            assert [likeliest(handle) for handle in rollout.engines] == [trained, trained]
            before = trained

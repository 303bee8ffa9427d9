"""Models of transformers in the built-in engine: what they say, what is refused, and weights from disk."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_models import toy
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.utils import logging

from roost import EnginePlace, RolloutError, TorchEngine
from roost.engines.http_calls import ask

logging.disable_progress_bar()

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 48, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "gpt2": GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=48, bos_token_id=None, eos_token_id=None
    ),
}
TIED = {"qwen3-tied", "gpt2"}
PROMPTS = [[7], [1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]


def model_of(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():  # new models are so quiet that all tokens are about as likely
            if weight.ndim == 2:
                weight.mul_(5.0)
    return model


def saved(folder: Path, kind: str = "llama", seed: int = 0, **how: Any) -> Path:
    """A directory with a model, in several files."""
    model_of(kind, seed, **how).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def make() -> Iterator[Callable[..., TorchEngine]]:
    engines = []

    def make(path: Path, **options: Any) -> TorchEngine:
        engines.append(TorchEngine.from_pretrained(path, **{"length_multiple": 16, "batch_rows": 4, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


def refused(path: Path | str, **options: Any) -> RolloutError:
    engine = TorchEngine.from_pretrained(path, **options)
    with pytest.raises(RolloutError) as caught:
        engine.start(EnginePlace())
    engine.stop()
    return caught.value


# What it says ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_likeliest_tokens_are_those_of_generate(
    kind: str, make: Callable[..., TorchEngine], tmp_path: Path
) -> None:
    """Its batch is padded on the right; ``generate`` gets each prompt alone, and has a cache."""
    engine, model = make(saved(tmp_path, kind)), model_of(kind)
    outputs = engine.generate(PROMPTS, {"max_new_tokens": 24, "temperature": 0})
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        said = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )
        assert output.output_ids == said[0, len(prompt) :].tolist()
    assert len({tuple(output.output_ids) for output in outputs}) == len(PROMPTS)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_are_those_of_a_plain_pass(kind: str, make: Callable[..., TorchEngine], tmp_path: Path) -> None:
    engine, model = make(saved(tmp_path, kind)), model_of(kind)
    outputs = engine.generate(PROMPTS, {"max_new_tokens": 16, "temperature": 0.7, "seed": 3, "n": 2})
    for index, output in enumerate(outputs):
        prompt = PROMPTS[index // 2]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *output.output_ids]])).logits[0, len(prompt) - 1 : -1].double()
        expected = torch.log_softmax(logits / 0.7, -1).gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs).double(), expected, atol=1e-4, rtol=1e-4)


def test_neighbours_change_no_bit(make: Callable[..., TorchEngine], tmp_path: Path) -> None:
    engine = make(saved(tmp_path))
    params = {"max_new_tokens": 10, "seed": 1}
    together = engine.generate([PROMPTS[1]], {**params, "n": 6})
    assert engine.generate([PROMPTS[1]], params) == together[:1]


def test_names_context_and_dtype_are_the_model_s(make: Callable[..., TorchEngine], tmp_path: Path) -> None:
    engine = make(saved(tmp_path, "qwen3-untied", dtype=torch.bfloat16))
    wanted = {name: (tuple(t.shape), "bfloat16") for name, t in model_of("qwen3-untied").state_dict().items()}
    assert engine.describe_weights() == wanted
    assert engine.info()["context_length"] == 48
    for dtype in ("float32", torch.float32):
        other = make(tmp_path, dtype=dtype, context=20)
        assert {kind for _, kind in other.describe_weights().values()} == {"float32"}
        assert other.info()["context_length"] == 20


def test_random_weights_only_where_asked_for(make: Callable[..., TorchEngine], tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert error.codes == ("E120",)
    assert "has no weights" in str(error)
    assert "random_weights=True" in str(error)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    params = {"max_new_tokens": 20, "seed": 1}
    first = make(tmp_path, random_weights=True).generate([[1]], params)
    assert torch.equal(torch.get_rng_state(), before)
    assert make(tmp_path, random_weights=True).generate([[1]], params) == first


# What is refused -------------------------------------------------------------------------------


def test_what_is_no_directory_of_a_model(tmp_path: Path) -> None:
    error = refused(tmp_path / "nowhere", dtype="bf16")
    assert error.codes == ("E120", "E120")
    assert "'bf16' is no dtype of weights" in str(error)
    assert "nowhere is not a directory" in str(error)
    assert "torch.int8 is no dtype of weights" in str(refused(tmp_path, dtype=torch.int8))
    (tmp_path / "file").write_text("{}")
    assert "file is not a directory" in str(refused(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    error = refused(tmp_path / "empty")
    assert "has no config.json" in str(error)
    assert "has no weights" in str(error)
    assert "save_pretrained(" in str(error)


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"model_type": "nonsense"}', '{"model_type": "t5"}'])
def test_a_config_of_no_causal_model(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    error = refused(tmp_path, random_weights=True)
    assert error.codes == ("E120",)
    assert "transformers cannot load" in str(error)


def test_a_model_that_does_not_run(tmp_path: Path) -> None:
    LlamaConfig(**{**SIZES, "vocab_size": 1}).save_pretrained(tmp_path)
    error = refused(tmp_path, random_weights=True)
    assert error.codes == ("E120",)
    assert "LlamaForCausalLM fails on two tokens: IndexError" in str(error)


def test_code_of_a_directory_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    assert refused(tmp_path, random_weights=True).codes == ("E120",)


def test_a_model_that_sees_what_comes_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    BertConfig(vocab_size=60, max_position_embeddings=48, **sizes).save_pretrained(tmp_path)
    error = refused(tmp_path, random_weights=True)
    assert error.codes == ("E120",)
    assert "is not causal" in str(error)
    assert '"is_decoder": true' in str(error)


def test_weights_that_do_not_fit_are_all_listed(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["stray"] = torch.zeros(3)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    error = refused(tmp_path)
    assert set(error.codes) == {"E102"}
    assert [str(finding) for finding in error.findings] == [
        "weights: lm_head.weight is missing",
        "weights: model.norm.weight is missing",
        "weights: the model has no tensor 'stray'",
        "weights: model.layers.0.mlp.up_proj.weight has shape [2, 32], and the model's has [48, 32]",
    ]
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    assert "transformers cannot load" in str(refused(tmp_path))


def test_a_file_of_a_shard_that_is_lost(tmp_path: Path) -> None:
    lost = sorted(saved(tmp_path).glob("*.safetensors"))[1]
    lost.unlink()
    error = refused(tmp_path)
    assert error.codes == ("E120",)
    assert lost.name in str(error)


def test_without_transformers_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))
    error = refused(saved(tmp_path))
    assert error.codes == ("E120",)
    assert "pip install 'roost[transformers]'" in str(error)


def test_the_engine_alone_does_not_import_transformers() -> None:
    code = "import sys, roost.engines.torch.engine; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_from_a_directory_over_http(kind: str, make: Callable[..., TorchEngine], tmp_path: Path) -> None:
    """Files in 16 bits for an engine in 32, cut into several, tied tensors left out."""
    engine = make(saved(tmp_path / "old", kind))
    new = saved(tmp_path / "new", kind, seed=1, dtype=torch.bfloat16)
    index = json.loads((new / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) == (kind not in TIED)
    place = EnginePlace()
    url = engine.start(place)
    answer = ask(
        f"{url}/update_weights_from_disk", "POST", {"model_path": str(new), "weight_version": "3"}, key=place.key
    )
    assert answer["success"] is True
    assert engine.version == 3
    (output,) = engine.generate([[1, 2]], {"max_new_tokens": 12, "seed": 1})
    (expected,) = make(new, dtype="float32", version=3).generate([[1, 2]], {"max_new_tokens": 12, "seed": 1})
    assert output == expected


@pytest.mark.parametrize("kind", CONFIGS)
def test_bare_safetensors_need_no_config(kind: str, make: Callable[..., TorchEngine], tmp_path: Path) -> None:
    engine = make(saved(tmp_path / "old", kind))
    new = saved(tmp_path / "new", kind, seed=1)
    (new / "config.json").unlink()
    engine.load_weights(engine.read_weights(new), 1)
    own = dict(engine._load().state_dict())
    assert own.keys() == model_of(kind).state_dict().keys()
    for name, tensor in model_of(kind, seed=1).state_dict().items():
        assert torch.equal(own[name], tensor), name


def test_a_directory_of_another_model_changes_nothing(make: Callable[..., TorchEngine], tmp_path: Path) -> None:
    engine = make(saved(tmp_path / "own"))
    other = saved(tmp_path / "other", "qwen3-untied")
    with pytest.raises(RolloutError, match=r"no tensor 'model\.layers\.0\.self_attn\.k_norm\.weight'") as caught:
        engine.load_weights(engine.read_weights(other), 1)
    assert set(caught.value.codes) == {"E102"}
    assert engine.version == 0


def test_a_trainer_s_state_goes_in_under_either_name(make: Callable[..., TorchEngine], tmp_path: Path) -> None:
    engine = make(saved(tmp_path, "qwen3-tied"))
    new = model_of("qwen3-tied", seed=2).state_dict()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= new.keys()
    assert "lm_head.weight" not in engine.describe_weights()
    engine.load_weights(new, 1)
    engine.load_weights({name: tensor for name, tensor in new.items() if name != "model.embed_tokens.weight"}, 2)
    assert torch.equal(engine._load().state_dict()["lm_head.weight"], new["lm_head.weight"])


def test_a_folder_for_another_kind_of_module_is_read_as_it_is(tmp_path: Path) -> None:
    engine = TorchEngine(toy, context=64)
    tensors = {name: tensor for name, tensor in toy(1).state_dict().items() if name != "head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    engine.load_weights(engine.read_weights(tmp_path), 1)
    assert engine.version == 1
    engine.stop()

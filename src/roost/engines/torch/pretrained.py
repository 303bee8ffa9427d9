"""Causal language models of transformers, from directories as ``save_pretrained`` writes them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roost.errors import Finding, Fix, RolloutError

__all__ = ["Pretrained", "is_pretrained", "read_pretrained"]

CONFIG = "config.json"
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""File names of weights; transformers loads one of them."""

RANDOM_SEED = 0
"""Seed of random weights, so that all engines have the same."""


def is_pretrained(folder: str | Path) -> bool:
    """Return whether a folder has a ``config.json``, which names the model of its weights."""
    return (Path(folder) / CONFIG).is_file()


@dataclass(frozen=True)
class Pretrained:
    """A model in a directory; a call loads the model.

    Attributes:
        path: The directory, as this process sees it.
        dtype: dtype of the weights, such as ``bfloat16`` or ``torch.bfloat16``; by default that of the directory.
        has_random_weights: Whether to initialise random weights and ignore those of the directory.
    """

    path: str
    dtype: str | torch.dtype | None = None
    has_random_weights: bool = False

    @property
    def folder(self) -> Path:
        """The directory, as an absolute path."""
        return Path(self.path).expanduser().absolute()

    def __call__(self) -> torch.nn.Module:
        """Load the model on the CPU.

        Raises:
            RolloutError: The directory has no usable model (E120), or the weights do not fit the model (E102); with
                all problems.
        """
        self.check()
        from transformers import AutoConfig, AutoModelForCausalLM

        models: Any = AutoModelForCausalLM  # transformers' hints do not cover what is used here
        here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        report: Mapping[str, Any] = {}
        try:
            config = AutoConfig.from_pretrained(self.folder, **here)
            dtype = _float_type(self.dtype) or config.dtype or torch.float32
            if self.has_random_weights:
                with torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(RANDOM_SEED)
                    model: torch.nn.Module = models.from_config(config, dtype=dtype, trust_remote_code=False)
            else:
                how = {"config": config, "dtype": dtype, "ignore_mismatched_sizes": True, **here}
                with _no_bars():
                    model, report = models.from_pretrained(self.folder, output_loading_info=True, **how)
        except Exception as error:
            message = f"transformers cannot load {self.folder} as a causal language model: {_first_line(error)}"
            raise RolloutError([Finding("E120", message)]) from error
        misfits = _misfits(report)
        if misfits:
            raise RolloutError(misfits)
        _check_causal(model.eval())
        return model

    def check(self) -> None:
        """Check everything that can be checked without loading the model.

        Raises:
            RolloutError: The model cannot be loaded; with all problems (E120).
        """
        problems: list[Finding] = []
        if importlib.util.find_spec("transformers") is None:
            fix = Fix("install it", "pip install 'roost[transformers]'")
            problems.append(Finding("E120", f"{self.folder}: transformers is not installed here", fixes=(fix,)))
        if self.dtype is not None and _float_type(self.dtype) is None:
            rule = "known: float32, bfloat16, float16, float64"
            problems.append(Finding("E120", f"{self.dtype!r} is no dtype of weights", rule=rule))
        if not self.folder.is_dir():
            rule = "a model is a directory that every engine sees under this path; nothing is downloaded"
            problems.append(Finding("E120", f"{self.folder} is not a directory", rule=rule))
        else:
            if not is_pretrained(self.folder):
                fix = Fix("write one", f"model.save_pretrained({str(self.folder)!r})")
                problems.append(Finding("E120", f"{self.folder} has no {CONFIG}", fixes=(fix,)))
            if not self.has_random_weights and not any((self.folder / name).is_file() for name in WEIGHTS):
                fixes = (
                    Fix("write them", f"model.save_pretrained({str(self.folder)!r})"),
                    Fix("or serve random ones", "TorchEngine.from_pretrained(…, random_weights=True)"),
                )
                rule = f"one of {', '.join(WEIGHTS)}"
                problems.append(Finding("E120", f"{self.folder} has no weights", rule=rule, fixes=fixes))
        if problems:
            raise RolloutError(problems)


def read_pretrained(folder: str | Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights of a directory, by the names in the model's ``state_dict``.

    transformers loads them, because the files may have other names, shards and dtypes, and leave out tied tensors.

    Raises:
        RolloutError: The model cannot be loaded (E120, E102).
    """
    return dict(Pretrained(str(folder), dtype)().state_dict())


@contextmanager
def _no_bars() -> Iterator[None]:
    """Turn off transformers' progress bars, which would fill the logs of many processes."""
    import transformers

    bars: Any = transformers.utils.logging  # without type hints
    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()


def _misfits(report: Mapping[str, Any]) -> list[Finding]:
    """Return the problems in transformers' loading report as findings."""
    found = [f"weights: {name} is missing" for name in sorted(report.get("missing_keys", ()))]
    found += [f"weights: the model has no tensor {name!r}" for name in sorted(report.get("unexpected_keys", ()))]
    for name, given, own in sorted(report.get("mismatched_keys", ())):
        found.append(f"weights: {name} has shape {list(given)}, and the model's has {list(own)}")
    found += [f"weights: {text}" for text in report.get("error_msgs", ())]
    return [Finding("E102", message, rule=f"{CONFIG} and weights must be of one model") for message in found]


def _check_causal(model: Any) -> None:
    """Raise E120 if the model's output at a position depends on later ones: padding would change its samples."""
    try:
        with torch.no_grad():
            logits = model(torch.tensor([[0, 0], [0, 1]])).logits[:, 0]
    except Exception as error:
        message = f"{type(model).__name__} fails on two tokens: {_first_line(error)}"
        raise RolloutError([Finding("E120", message)]) from error
    difference = (logits[0] - logits[1]).abs().max()
    if difference > 16 * torch.finfo(logits.dtype).eps * logits.abs().max():
        message = f"{type(model).__name__} is not causal: its output for a token changes with the next token"
        fixes = (Fix("if the model has a causal mode", f'"is_decoder": true in its {CONFIG}'),)
        raise RolloutError([Finding("E120", message, fixes=fixes)])


def _float_type(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

"""Names, shapes and dtypes of a model's tensors, without reading the tensors.

They come from the headers of the folder's safetensors files. For a folder with only a ``config.json``, transformers
builds the model on the ``meta`` device, which allocates no memory for weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roost.errors import Finding, Fix, RolloutError
from roost.weights.checkpoint import indexed_files

__all__ = ["DTYPES", "checkpoint_tensors"]

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""Element types: name in safetensors → name in torch."""


def checkpoint_tensors(folder: str | Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype name of each tensor of a model folder. Tied tensors have one entry.

    Raises:
        RolloutError: The folder has neither readable safetensors files nor a ``config.json`` that transformers
            supports (E102). The error has all problems.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    problems: list[Finding] = []
    indexed = indexed_files(folder, problems)
    files = {path.name for path in folder.glob("*.safetensors")} if indexed is None else set(indexed.values())
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in sorted(files):
        try:
            found.update(_shapes(folder / file))
        except (OSError, KeyError, SafetensorError) as error:
            problems.append(_problem(f"{folder / file} cannot be read: {error!r}"))
    if problems:
        raise RolloutError(problems)
    return found or _built(folder)


def _shapes(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype name of each tensor of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:  # no tensor is read, so this works for all dtypes
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (tuple(one.get_shape()), DTYPES[one.get_dtype()]) for name, one in slices.items()}


def _built(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype name of each tensor of the model that ``config.json`` describes."""
    if not (folder / "config.json").is_file():
        what = "has neither *.safetensors nor a config.json" if folder.is_dir() else "is not a folder"
        fix = Fix("a folder such as save_pretrained writes", 'model="/models/mine"')
        raise RolloutError([_problem(f"{folder} {what}, so the tensors of its model are unknown", (fix,))])
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            from_config: Callable[..., torch.nn.Module] = AutoModelForCausalLM.from_config
            model = from_config(config, dtype=config.dtype or torch.float32, trust_remote_code=False)
    except ImportError as error:
        fixes = (Fix("install transformers", "pip install transformers"), Fix("or save the weights as safetensors"))
        raise RolloutError(
            [_problem(f"{folder} has no *.safetensors, and transformers is not installed", fixes)]
        ) from error
    except Exception as error:
        lines = [*str(error).strip().splitlines(), ""]
        message = f"transformers cannot build the model of {folder}: {type(error).__name__}: {lines[0]}"
        raise RolloutError([_problem(message)]) from error
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            found[name] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        seen.add(id(tensor))
    return found


def _problem(message: str, fixes: tuple[Fix, ...] = ()) -> Finding:
    return Finding("E102", f"weights: {message}", fixes=fixes)

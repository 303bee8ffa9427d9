"""Names, shapes and dtypes of a model's tensors, without reading the tensors.

The headers of its safetensors files say them. A folder that has no such file and a ``config.json`` is
asked for through transformers: the model is built without memory for its weights.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from roost.errors import Finding, Fix, RolloutError
from roost.weights.checkpoint import indexed_files

__all__ = ["DTYPES", "checkpoint_tensors"]

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""What safetensors calls an element type, and what torch does."""


def checkpoint_tensors(folder: str | Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype name of each tensor of a model folder; of tied tensors, those that are saved.

    Raises:
        RolloutError: Where the folder does not say it; all that was found (E102).
    """
    folder = Path(folder)
    problems: list[Finding] = []
    indexed = indexed_files(folder, problems)
    files = {path.name for path in folder.glob("*.safetensors")} if indexed is None else set(indexed.values())
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in sorted(files):
        try:
            found.update(_header(folder / file))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            problems.append(_problem(f"{folder / file} cannot be read: {error!r}"))
    if problems:
        raise RolloutError(problems)
    return found or _built(folder)


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > path.stat().st_size:
            raise ValueError("it ends before its header does")
        entries: dict[str, Any] = json.loads(file.read(size))
    return {
        name: (tuple(entry["shape"]), DTYPES[entry["dtype"]])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _built(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors of the model that ``config.json`` describes."""
    if not (folder / "config.json").is_file():
        what = "has neither *.safetensors nor a config.json" if folder.is_dir() else "is not a folder"
        fix = Fix("a folder such as save_pretrained writes", 'model="/models/mine"')
        raise RolloutError([_problem(f"{folder} {what}: nothing says which tensors its model has", (fix,))])
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=config.dtype or torch.float32, trust_remote_code=False
            )
    except ImportError as error:
        fixes = (Fix("install it", "pip install transformers"), Fix("or save the weights as safetensors"))
        raise RolloutError([_problem(f"{folder} has no *.safetensors, and transformers is missing", fixes)]) from error
    except Exception as error:
        lines = [*str(error).strip().splitlines(), ""]
        message = f"transformers cannot tell the tensors of {folder}: {type(error).__name__}: {lines[0]}"
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

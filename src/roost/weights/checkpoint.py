"""Weights from a folder of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from roost.errors import Finding, RolloutError

if TYPE_CHECKING:
    import torch

__all__ = ["indexed_files", "read_checkpoint"]

INDEX = ".safetensors.index.json"


def read_checkpoint(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder: of the files that its index names, else of all its ``*.safetensors`` files.

    Raises:
        RolloutError: Files are missing or damaged, or tensors are missing or duplicate (E102). The error has all
            problems.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    problems: list[Finding] = []
    expected = indexed_files(folder, problems)
    files = (
        sorted(set(expected.values())) if expected is not None else sorted(p.name for p in folder.glob("*.safetensors"))
    )
    if not files and not problems:
        what = "has no *.safetensors file" if folder.is_dir() else "is not a folder"
        problems.append(Finding("E102", f"weights: {folder} {what}"))
    tensors: dict[str, torch.Tensor] = {}
    found: dict[str, str] = {}
    for file in files:
        if Path(file).name != file:
            problems.append(Finding("E102", f"weights: the index names {file}, which is not in the folder itself"))
            continue
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if expected is not None and expected.get(name) != file:
                        continue
                    if name in found:
                        problems.append(Finding("E102", f"weights: {name} is in {found[name]} and in {file}"))
                    found[name] = file
                    tensors[name] = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            problems.append(Finding("E102", f"weights: {folder / file} cannot be read: {error}"))
    unreadable = any("cannot be read" in problem.message for problem in problems)
    if expected is not None and not unreadable:
        problems += [
            Finding("E102", f"weights: {name} is not in {file}, where the index says it is")
            for name, file in expected.items()
            if name not in found
        ]
    if problems:
        raise RolloutError(problems)
    return tensors


def indexed_files(folder: Path, problems: list[Finding]) -> dict[str, str] | None:
    """Return the file of each tensor from the folder's index; ``None`` if it has no index.

    A damaged index is added to ``problems``.
    """
    indexes = sorted(folder.glob(f"*{INDEX}"))
    if not indexes:
        return None
    try:
        weight_map = json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(Finding("E102", f"weights: {indexes[0]} is not an index of safetensors files: {error!r}"))
        return {}

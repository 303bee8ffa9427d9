"""How much of the free memory of its GPUs SGLang may fill, so that it gets what the plan gives it.

SGLang takes ``--mem-fraction-static`` of the memory that is free when it starts, not of the memory of the GPU:
beside a trainer that holds half of a GPU, the same number gives half as much.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FreeMemory", "measure_free", "static_fraction"]

STATIC_PART = 0.9
"""The part of its share that is for weights and the cache of keys and values; the rest is for what a step needs."""
MEASURE_S = 120.0
_MEASURE = """
import json, torch
print(json.dumps([torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]))
"""


@dataclass(frozen=True)
class FreeMemory:
    """Memory of the GPU that has the least of it free.

    Attributes:
        free_gib: What is free of it.
        total_gib: All of it.
    """

    free_gib: float
    total_gib: float


def measure_free(python: str, env: Mapping[str, str]) -> FreeMemory | None:
    """Measure the GPUs that SGLang will see; ``None`` where that fails.

    Torch of its interpreter is asked, as SGLang does itself, in a process that ends afterwards: a process that
    has asked CUDA once holds about half a GiB of each GPU. Takes seconds.
    """
    try:
        done = subprocess.run(  # noqa: S603
            [python, "-c", _MEASURE], env={**os.environ, **env}, capture_output=True, text=True, timeout=MEASURE_S,
            check=True,
        )  # fmt: skip
        free, total = min(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return FreeMemory(free / 2**30, total / 2**30)


def static_fraction(gpu_share: float, memory: FreeMemory | None) -> float:
    """Return what to say for ``--mem-fraction-static``.

    Args:
        gpu_share: The part of each GPU that the plan gives the engine.
        memory: What is free of them; ``None``: not known, and taken to be all.
    """
    if memory is None or not memory.free_gib:
        return gpu_share * STATIC_PART
    return min(1.0, gpu_share * memory.total_gib / memory.free_gib) * STATIC_PART

"""Compute SGLang's memory fraction from the engine's GPU share in the plan.

SGLang takes ``--mem-fraction-static`` of the GPU memory that is free when it starts, and not of all of it: beside a
trainer that holds half of a GPU, the same fraction yields half as much memory.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FreeMemory", "measure_free", "static_fraction"]

logger = logging.getLogger(__name__)

STATIC_PART = 0.9
"""The part of the share for weights and the KV cache; the rest is for the temporary memory of a step."""
MEASURE_S = 120.0
"""Seconds that the measurement may take."""
_MEASURE = """
import json, torch
print(json.dumps([torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]))
"""


@dataclass(frozen=True)
class FreeMemory:
    """Memory of the GPU with the least free memory.

    Attributes:
        free_gib: Its free memory.
        total_gib: All of its memory.
    """

    free_gib: float
    total_gib: float


def measure_free(python: str, env: Mapping[str, str]) -> FreeMemory | None:
    """Measure the GPUs that SGLang will see. Return ``None`` and log the reason if that fails.

    A short-lived process of SGLang's interpreter asks torch, as SGLang does itself. This process does not: a process
    that has initialised CUDA holds about half a GiB of each GPU. Takes seconds.
    """
    try:
        done = subprocess.run(  # noqa: S603
            [python, "-c", _MEASURE], env={**os.environ, **env}, capture_output=True, text=True, timeout=MEASURE_S,
            check=True,
        )  # fmt: skip
        free, total = min(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        logger.warning("the free GPU memory cannot be measured with %s: %s", python, error)
        return None
    return FreeMemory(free / 2**30, total / 2**30)


def static_fraction(gpu_share: float, memory: FreeMemory | None) -> float:
    """Return the value for ``--mem-fraction-static``.

    Args:
        gpu_share: Share of each GPU that the plan assigns to the engine.
        memory: Free memory of the GPUs; ``None`` if unknown: then all memory is assumed to be free.
    """
    if memory is None or not memory.free_gib:
        return gpu_share * STATIC_PART
    return min(1.0, gpu_share * memory.total_gib / memory.free_gib) * STATIC_PART

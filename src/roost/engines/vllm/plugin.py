"""What vLLM loads in each of its processes: it tells them of Roost's way for weights."""

from __future__ import annotations

import contextlib

__all__ = ["NAME", "register"]

NAME = "roost"


def register() -> None:
    """Adds the way; vLLM calls it, perhaps more than once, and also a vLLM that is too old to have ways."""
    with contextlib.suppress(ImportError, ValueError):
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(NAME, "roost.engines.vllm.backend", "RoostTransferEngine")

"""vLLM's plugin, which vLLM loads in each of its processes: it registers Roost's weight-transfer engine."""

from __future__ import annotations

import logging

__all__ = ["NAME", "register"]

NAME = "roost"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the weight-transfer engine; vLLM may call this more than once."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError as error:
        logger.debug("this vLLM has no weight-transfer API, so Roost's weight transfer is not registered: %s", error)
        return
    try:
        WeightTransferEngineFactory.register_engine(NAME, "roost.engines.vllm.backend", "RoostTransferEngine")
    except ValueError as error:
        logger.debug("Roost's weight transfer is registered already: %s", error)

"""Inference engines: what each must be able to do, their servers and clients, and the router in front of them.

The names below load their modules on first use, so that importing this package loads neither aiohttp nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_MODULES = {
    "EngineClient": "roost.engines.client",
    "Pretrained": "roost.engines.torch.pretrained",
    "sample_seed": "roost.engines.sampling",
}

if TYPE_CHECKING:
    from roost.engines.client import EngineClient as EngineClient
    from roost.engines.sampling import sample_seed as sample_seed
    from roost.engines.torch.pretrained import Pretrained as Pretrained

__all__ = ["EngineClient", "Pretrained", "sample_seed"]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'roost.engines' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""Memory and utilisation of a real GPU, as ``roost status --watch`` shows them."""

from __future__ import annotations

import torch

from roost.hardware import AcceleratorType


def test_usage_follows_what_is_allocated() -> None:
    ask, detect = AcceleratorType.NVIDIA.usage, AcceleratorType.NVIDIA.detect
    assert ask is not None
    assert detect is not None
    torch.zeros(1, device="cuda:0")
    before = {usage.uuid: usage for usage in ask()}
    assert set(before) == {device.uuid for device in detect()}
    held = torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda:0")
    held.fill_(1)
    torch.cuda.synchronize()
    grown = [usage.used_gib - before[usage.uuid].used_gib for usage in ask()]
    assert max(grown) >= 1.8
    for usage in ask():
        assert 0 < usage.used_gib <= usage.memory_gib
        assert usage.busy is None or 0 <= usage.busy <= 1

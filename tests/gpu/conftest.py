"""Tests on a real GPU; skipped, and saying so, where there is none."""

from __future__ import annotations

import pytest

from roost.hardware import AcceleratorType


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    detect = AcceleratorType.NVIDIA.detect
    if detect is None or not detect():
        needs = pytest.mark.skip(reason="needs an NVIDIA GPU that the driver library knows")
        for item in items:
            if "/gpu/" in str(item.path):
                item.add_marker(needs)

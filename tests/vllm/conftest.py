"""Tests with vLLM itself; skipped, and saying so, where it is not installed. ``make test-vllm`` runs them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "ray"))  # rl_parts and processes are of use here too
sys.path.append(str(HERE.parent / "docs"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = importlib.util.find_spec("vllm")
    has_vllm = found is not None and found.origin is not None  # and not this folder
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))  # as in tests/ray
            if not has_vllm:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm installs it beside, and runs this"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model with random weights."""
    from vllm_parts import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def one_node() -> Iterator[object]:
    """One node with made-up GPUs."""
    from roost.testing import local_ray

    with local_ray("1x6", cpus=2) as cluster:
        yield cluster

"""How tests are shared out where two run at a time."""

from __future__ import annotations

from typing import Any

import pytest

ROLES = ("grpo", "in_place", "rollout", "sglang", "train_group", "transformers", "weight_sync")

SCOPES = {
    "roles on Ray": tuple(f"tests/ray/test_{name}" for name in ROLES),
    "Ray": ("tests/ray/", "tests/gpu/", "tests/vllm/"),
    "docs": ("tests/docs/",),
    "browser": ("tests/browser/",),
}
"""Tests that run one after another because they share a Ray, a GPU or a browser; the longest scope comes first."""


def scope_of(nodeid: str) -> str:
    """Return the scope of a test: the first one that names its path, or else the file of the test."""
    return next((scope for scope, paths in SCOPES.items() if nodeid.startswith(paths)), nodeid.partition("::")[0])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the long scopes first where tests are shared out, so that no process starts one when the others are done."""
    if hasattr(config, "workerinput"):
        ranks = {scope: rank for rank, scope in enumerate(SCOPES)}
        items.sort(key=lambda item: ranks.get(scope_of(item.nodeid), len(ranks)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a scope together.

    pytest-xdist's own groups do nothing with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)

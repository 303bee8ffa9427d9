"""How tests are shared out where two run at a time."""

from __future__ import annotations

from typing import Any

import pytest

TOGETHER = {
    "ray": ("tests/ray/", "tests/gpu/", "tests/vllm/"),
    "docs": ("tests/docs/",),
    "browser": ("tests/browser/",),
}
"""Folders whose tests run one after another: they share a Ray, a GPU, or a browser."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file, and of these folders, stay together.

    pytest-xdist's own groups do nothing with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            of_folders = (name for name, folders in TOGETHER.items() if nodeid.startswith(folders))
            return next(of_folders, nodeid.partition("::")[0])

    return Scheduling(config, log)

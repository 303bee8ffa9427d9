"""How tests are shared out where two run at a time."""

from __future__ import annotations

from typing import Any

import pytest

TOGETHER = ("tests/ray/", "tests/docs/", "tests/browser/")
"""Folders whose tests run one after another: they start a Ray, or a browser."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file, and of these folders, stay together; pytest-xdist's own groups do nothing with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])

    return Scheduling(config, log)

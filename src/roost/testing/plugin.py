"""A pytest plugin with the fixture ``ray_cluster``: a Ray of many nodes that all tests of a session share.

Enable it with ``pytest_plugins = ["roost.testing.plugin"]`` in the topmost ``conftest.py``, and choose the nodes with
``roost_machines = "4x8"`` in pytest's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from roost.cluster.local_ray import LocalRay, local_ray

__all__ = ["pytest_addoption", "ray_cluster"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``roost_machines``: the nodes of the fixture ``ray_cluster``."""
    parser.addini("roost_machines", "machines of the ray_cluster fixture, such as 4x8", default="2x2")


@pytest.fixture(scope="session")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[LocalRay]:
    """A Ray of many nodes; a ``Cluster(...)`` made in a test joins it."""
    with local_ray(str(request.config.getini("roost_machines"))) as cluster:
        yield cluster

"""What the unit tests have in common: short ways to write jobs and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import roost


def _job(placements: Any, cluster: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    return {"cluster": {"component_placement": placements, **(cluster or {})}, **sections}


@pytest.fixture
def job():
    """``job({"actor": "0-7"}, {"num_nodes": 1}, rollout={…})`` → a job as a plain mapping."""
    return _job


@pytest.fixture
def write(tmp_path: Path):
    """``write(text)`` → the path of a file with that text (dedented) or those bytes."""

    def write_file(content: str | bytes, name: str = "job.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else dedent(content).encode())
        return path

    return write_file


@pytest.fixture(scope="session")
def robot() -> str:
    """The name of a registered hardware type with one required and two optional fields."""

    @roost.register_hardware("UnitRobot")
    @dataclass
    class UnitRobot:
        robot_ip: str
        camera: str = ""
        speed: float = 1.0

    return "UnitRobot"

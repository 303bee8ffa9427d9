"""The version of the installed Ray, and the oldest one that works."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from roost.errors import ClusterError, Finding, Fix

__all__ = ["OLDEST", "check_ray", "ray_version"]

OLDEST = (2, 47)


def ray_version() -> tuple[int, int]:
    """Return the major and minor version of the installed Ray; (0, 0) if none is installed."""
    try:
        found = re.match(r"(\d+)\.(\d+)", version("ray"))
    except PackageNotFoundError:
        found = None
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_ray() -> None:
    """Check that Ray is installed and new enough.

    Raises:
        ClusterError: It is not (R101); the error has the command that installs it.
    """
    there = ray_version()
    if there >= OLDEST:
        return
    wanted = ".".join(map(str, OLDEST))
    found = f"Ray {there[0]}.{there[1]} is too old" if any(there) else "Ray is not installed"
    fix = Fix("install it", f"pip install 'ray>={wanted}'")
    raise ClusterError([Finding("R101", f"{found}: {wanted} or newer is needed", fixes=(fix,))])

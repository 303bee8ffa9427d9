"""Starting wardens: small processes that end the processes which a killed process of a job would leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import ray

from roost.cluster import warden

__all__ = ["guard_actor", "guard_embedded_ray"]


def guard_actor() -> subprocess.Popen[bytes]:
    """Start the warden of this actor's process, and return at once.

    The warden kills this process when its raylet is gone, and the processes that this one started when this one is
    gone. Ray notices neither reliably: it takes a raylet that has become a zombie for alive.

    Returns:
        A process that ends within moments, once the warden is independent of it. Poll it later: until then it is a
        zombie.
    """
    marker = uuid.uuid4().hex
    os.environ["ROOST_WORKER"] = marker
    raylet = os.environ.get("RAY_RAYLET_PID") or str(os.getppid())
    return _start("worker", str(os.getpid()), marker, raylet)


def guard_embedded_ray(folder: str, removes_folder: bool) -> None:
    """Start the warden of a Ray that this process started: it ends that Ray when this process is gone.

    Args:
        folder: Folder of that Ray's session, or a parent of it; the command lines of Ray's processes have it.
        removes_folder: Whether the warden removes the folder, too.
    """
    package = os.path.dirname(str(ray.__file__))
    _start("driver", str(os.getpid()), folder, package, "REMOVE" if removes_folder else "KEEP").wait()


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-I", "-S", str(warden.__file__), *arguments],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", "")},
    )

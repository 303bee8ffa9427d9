"""Runs a command that must not outlive the process that asked for it.

``leash.py PARENT COMMAND...`` runs the command as its only child, and ends with it. It runs as a small
process of its own (without Roost). The kernel could end a child with its parent by itself, but means
the *thread* that started the child; threads of a worker come and go. This process has one thread only.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

OPEN_FILES = 65536
PERIOD_S = 0.2
GRACE_S = 5.0
PR_SET_PDEATHSIG = 1


def _prepare() -> None:
    # A router has two sockets per request in flight, and the soft limit is 1,024 on many systems.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    os.setpgid(0, 0)  # so that whatever it starts can be ended with it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(parent: int, command: Sequence[str]) -> int:
    """Runs a command until it ends, the parent is gone, or this process is told to end."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, preexec_fn=_prepare)  # noqa: S603
    while child.poll() is None and not asked and os.getppid() == parent:
        time.sleep(PERIOD_S)
    if child.poll() is None:
        child.terminate()
        deadline = time.monotonic() + GRACE_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(OSError):
            child.kill()
        child.wait()
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)  # what it left behind
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

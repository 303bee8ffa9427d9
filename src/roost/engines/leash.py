"""Run a command that must not outlive the process that started it.

``leash.py PARENT LOG COMMAND...`` runs the command as its only child, and ends with it. It runs as a small process of
its own, without importing Roost. The kernel can kill a child with its parent (``PR_SET_PDEATHSIG``), but "parent" means
the *thread* that started the child, and threads of a worker come and go. This process has only one thread.

Standard output is the file LOG, opened for appending. The command writes to it directly and not through a pipe, so that
it never waits for a reader. This process rotates the file: once it is larger than :data:`LOG_LIMIT`, its end is copied
to ``LOG.1``, which replaces the earlier copy, and the file is truncated. Lines that are written during the copy and
before the truncation are lost, as with logrotate's ``copytruncate``.
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
LOG_LIMIT = 32 << 20
"""Size in bytes at which a log is rotated."""
CHUNK = 1 << 20


def _prepare() -> None:
    # The router has two sockets for each request in flight, and the soft limit is 1,024 on many systems.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    os.setpgid(0, 0)  # a process group of its own, so that its children can be killed with it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def rotate(log: str, limit: int = LOG_LIMIT) -> None:
    """Move the last ``limit`` bytes of standard output to ``LOG.1`` if it holds more than that."""
    try:
        end = os.fstat(1).st_size
        if end <= limit:
            return
    except OSError:
        return
    with contextlib.suppress(OSError):  # such as a full disk: truncate the log nevertheless, which makes room
        older = log + ".1"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(older)
        copy = os.open(older, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            place = end - limit
            # Up to the size from above and not to the end of the file: a fast command may write faster than this copies.
            while place < end and (part := os.pread(1, min(CHUNK, end - place), place)):
                place += os.write(copy, part)
        finally:
            os.close(copy)
    with contextlib.suppress(OSError):
        os.ftruncate(1, 0)


def main(parent: int, log: str, command: Sequence[str]) -> int:
    """Run a command until it ends, the parent is gone, or this process gets SIGTERM; return the exit code."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, preexec_fn=_prepare)  # noqa: S603
    while child.poll() is None and not asked and os.getppid() == parent:
        time.sleep(PERIOD_S)
        rotate(log)
    if child.poll() is None:
        child.terminate()
        deadline = time.monotonic() + GRACE_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(OSError):
            child.kill()
        child.wait()
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)  # children that it left behind
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))

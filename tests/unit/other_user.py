"""Acting as another user of the machine, which only root can do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def as_nobody(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script as another user. Not Python: its interpreter may be in a folder that only root can enter."""
    return subprocess.run(
        ["/bin/sh", "-c", script, "sh", *arguments],
        user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip


LISTENING = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listening.bind(("127.0.0.1", int(sys.argv[1])))
listening.listen()
print("it listens", flush=True)
while True:
    made, _ = listening.accept()
    print(made.recv(10000), flush=True)
    made.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
    made.close()
"""


@contextmanager
def listening_as_nobody(port: int) -> Iterator[list[str]]:
    """A server of another user that answers everything; afterwards the list has all that it was sent, as one text."""
    other = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LISTENING, str(port)], stdout=subprocess.PIPE, text=True
    )
    heard: list[str] = []
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "it listens\n"
        yield heard
    finally:
        other.kill()
        heard.append(other.communicate()[0])

"""The page by which processes of one node report how far a sync is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from roost.weights.progress import COMMIT, FIRST_RANK, SharedProgress

OTHER = """
import sys
from roost.weights.progress import FIRST_RANK, COMMIT, SharedProgress
progress = SharedProgress.open((sys.argv[1], bytes.fromhex(sys.argv[2])))
assert progress.wait(lambda: progress.get(COMMIT) == 7, 30.0)
progress.set(FIRST_RANK, 7)
"""


def test_two_processes_wait_for_each_other() -> None:
    progress = SharedProgress(1)
    path, token = progress.address
    other = subprocess.Popen([sys.executable, "-c", OTHER, path, token.hex()])
    progress.set(COMMIT, 7)
    assert progress.wait(lambda: progress.all_at([FIRST_RANK], 7), 30.0, lambda: other.poll() not in (None, 0))
    assert other.wait(30) == 0
    progress.close()


def test_a_page_of_another_machine_is_not_opened() -> None:
    progress = SharedProgress(1)
    path, token = progress.address
    before = len(os.listdir("/proc/self/fd"))
    empty = os.memfd_create("empty")
    assert SharedProgress.open((path, bytes(len(token)))) is None
    assert SharedProgress.open(("/proc/1/fd/nothing", token)) is None
    assert SharedProgress.open((f"/proc/self/fd/{empty}", token)) is None
    os.close(empty)
    assert len(os.listdir("/proc/self/fd")) == before  # nothing is left open
    progress.close()


def test_waiting_ends_when_there_is_no_point_in_it() -> None:
    progress = SharedProgress(1)
    over = threading.Event()
    over.set()
    assert not progress.wait(lambda: False, 30.0, over.is_set)
    assert not progress.wait(lambda: False, 0.01)
    assert progress.wait(lambda: True, 0.0)
    progress.close()

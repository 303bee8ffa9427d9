"""The page by which processes of one node tell each other how far they are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from roost.weights.flags import FIRST, GO, Flags

OTHER = """
import sys
from roost.weights.flags import FIRST, GO, Flags
flags = Flags.open((sys.argv[1], bytes.fromhex(sys.argv[2])))
assert flags.wait(lambda: flags.get(GO) == 7, 30.0)
flags.set(FIRST, 7)
"""


def test_two_processes_wait_for_each_other() -> None:
    flags = Flags(1)
    path, token = flags.address
    other = subprocess.Popen([sys.executable, "-c", OTHER, path, token.hex()])
    flags.set(GO, 7)
    assert flags.wait(lambda: flags.all_say([FIRST], 7), 30.0, lambda: other.poll() not in (None, 0))
    assert other.wait(30) == 0
    flags.close()


def test_a_page_of_another_machine_is_not_opened() -> None:
    flags = Flags(1)
    path, token = flags.address
    before = len(os.listdir("/proc/self/fd"))
    empty = os.memfd_create("empty")
    assert Flags.open((path, bytes(len(token)))) is None
    assert Flags.open(("/proc/1/fd/nothing", token)) is None
    assert Flags.open((f"/proc/self/fd/{empty}", token)) is None
    os.close(empty)
    assert len(os.listdir("/proc/self/fd")) == before  # nothing is left open
    flags.close()


def test_waiting_ends_when_there_is_no_point_in_it() -> None:
    flags = Flags(1)
    over = threading.Event()
    over.set()
    assert not flags.wait(lambda: False, 30.0, over.is_set)
    assert not flags.wait(lambda: False, 0.01)
    assert flags.wait(lambda: True, 0.0)
    flags.close()

"""The warden ends what a killed process leaves behind, and no other process. All processes here are real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from roost.cluster import warden

TIMEOUT_S = 60.0
PARENT = "import subprocess; subprocess.run(['sleep', '600'], start_new_session=True)"


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {TIMEOUT_S:g} s"
        time.sleep(0.02)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes, and ends them after the test."""
    with ExitStack() as stack:

        def begin(*command: str, **variables: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, env={**os.environ, **variables})
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield begin


def parent_and_child(start: Callable[..., subprocess.Popen[bytes]]) -> tuple[subprocess.Popen[bytes], int]:
    parent = start(sys.executable, "-c", PARENT)
    born = warden.start_of(parent.pid)
    assert born is not None
    wait_for(lambda: warden.children_of(parent.pid, born), "the child")
    (child,) = warden.children_of(parent.pid, born)
    return parent, child


def watch(*arguments: str) -> None:
    subprocess.run([sys.executable, "-I", "-S", str(warden.__file__), *arguments], check=True, timeout=TIMEOUT_S)


def test_only_a_process_with_the_same_start_time_is_killed(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = start("sleep", "600")
    born = warden.start_of(process.pid)
    assert born is not None
    warden.end({process.pid: str(int(born) - 1)})
    assert process.poll() is None
    assert warden.start_of(process.pid) == born, "it got no signal"
    warden.end({process.pid: born})
    assert process.wait(TIMEOUT_S) == -9
    warden.end({process.pid: born})  # it has ended, and is no longer there


def test_children_of_a_process_with_another_start_time_are_not_followed(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    parent, child = parent_and_child(start)
    born = warden.start_of(parent.pid)
    assert born is not None
    known = {parent.pid: str(int(born) - 1)}  # as if this pid had belonged to a descendant that has ended
    warden.remember(os.getpid(), "0", known)
    assert known == {}, "the stale entry is removed, and nothing is adopted through it"
    warden.remember(parent.pid, born, known)
    assert list(known) == [child]


RECYCLED = """
import json, os, signal, subprocess, sys, time
from roost.cluster import warden

def start(*command):
    return subprocess.Popen(command)

worker = start(sys.executable, "-c", "import subprocess, time; subprocess.run(['sleep', '1000']); time.sleep(600)")
born = warden.start_of(worker.pid)
known = {}
while not known:
    warden.remember(worker.pid, born, known)
    time.sleep(0.02)
(first,) = known
os.kill(first, signal.SIGKILL)
while os.path.exists(f"/proc/{first}"):  # until the worker has reaped it
    time.sleep(0.02)
time.sleep(0.05)  # start times have a resolution of 10 ms
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(first - 1))
stranger = start(sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '2000'])")
stranger_born = warden.start_of(stranger.pid)
while not (found := warden.children_of(stranger.pid, stranger_born)):
    time.sleep(0.02)
(child,) = found
stale = dict(known)
warden.remember(worker.pid, born, known)
warden.end({**stale, **known})
time.sleep(0.2)
print(json.dumps({
    "same pid": first == stranger.pid,
    "adopted": sorted(known),
    "stranger": stranger.poll(),
    "child": warden.start_of(child) == found[child],
}))
stranger.kill()
os.kill(child, signal.SIGKILL)
worker.kill()
"""


def in_own_pid_namespace(script: str) -> subprocess.CompletedProcess[str]:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.getuid() != 0:
        command += ["--user", "--map-root-user"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("this user cannot make a pid namespace, in which pids can be chosen")
    return subprocess.run(
        [*command, sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


def test_a_pid_that_was_given_to_another_process_is_neither_followed_nor_killed() -> None:
    done = in_own_pid_namespace(RECYCLED)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"same pid": True, "adopted": [], "stranger": None, "child": True}


def test_the_children_of_a_killed_worker_end(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    worker, child = parent_and_child(start)
    bearer = start("sleep", "600", ROOST_WORKER="a-marker")
    other = start("sleep", "600", ROOST_WORKER="another-marker")
    watch("worker", str(worker.pid), "a-marker", str(os.getpid()))
    worker.kill()
    wait_for(lambda: warden.start_of(child) is None, "the end of the child")
    wait_for(lambda: bearer.poll() is not None, "the end of a process that the worker had started and orphaned")
    assert other.poll() is None


def test_a_worker_whose_raylet_is_gone_ends_with_its_children(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    raylet = start("sleep", "600")
    worker, child = parent_and_child(start)
    watch("worker", str(worker.pid), "no-bearer", str(raylet.pid))
    raylet.kill()  # and it stays a zombie, as under a parent that does not wait for it
    wait_for(lambda: worker.poll() is not None, "the end of the worker")
    wait_for(lambda: warden.start_of(child) is None, "the end of the child")


@pytest.mark.parametrize("removes", [True, False])
def test_the_ray_of_a_killed_driver_ends(tmp_path: Path, removes: bool) -> None:
    """The driver has a raylet with an agent, and a child of its own that only names the folder."""
    folder = tmp_path / "session"
    folder.mkdir()
    package = tmp_path / "ray-package"
    script = f"""
import subprocess, sys, time
agent = "import time; time.sleep(600)"
raylet = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
subprocess.Popen([sys.executable, "-c", raylet, {str(package)!r}, {str(folder)!r}])
subprocess.Popen([sys.executable, "-c", agent, {str(folder)!r}])
time.sleep(600)
"""
    driver = subprocess.Popen([sys.executable, "-c", script])
    everyone: dict[int, str] = {}
    try:
        born = warden.start_of(driver.pid)
        assert born is not None

        def started() -> bool:
            warden.remember(driver.pid, born, everyone)
            return len(everyone) == 3

        wait_for(started, "the raylet, its agent and the other child")
        raylet = next(pid for pid in everyone if warden.children_of(pid, everyone[pid]))
        (agent,) = warden.children_of(raylet, everyone[raylet])
        (other,) = set(everyone) - {raylet, agent}
        watch("driver", str(driver.pid), str(folder), str(package), "REMOVE" if removes else "KEEP")
        assert wardens_of(driver.pid)
    finally:
        driver.kill()
        driver.wait()
    try:
        wait_for(lambda: warden.start_of(raylet) is None and warden.start_of(agent) is None, "the end of Ray")
        wait_for(lambda: not wardens_of(driver.pid), "the end of the warden")
        assert warden.start_of(other) == everyone[other]
        assert folder.exists() is not removes
    finally:
        warden.end(everyone)


def wardens_of(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"warden.py") for word in words) and str(pid).encode() in words:
                found.append(int(name))
    return found


def test_a_guarded_process_marks_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import os, subprocess, sys, time
from roost.cluster.guards import guard_actor
guard_actor().wait()
orphan = subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, check=True)
print(int(orphan.stdout), flush=True)
time.sleep(600)
"""
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getpid()))
    actor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert actor.stdout is not None
        orphan = int(actor.stdout.readline())
        assert warden.start_of(orphan) is not None
    finally:
        actor.kill()
        actor.wait()
        actor.stdout.close()
    wait_for(lambda: warden.start_of(orphan) is None, "the end of the orphan")

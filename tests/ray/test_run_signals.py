"""``roost run`` is stopped by SIGTERM and SIGINT: it closes the job, and exits with 143 or 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from processes import ray_state, wait_for

from roost.cluster.warden import bearers_of, end
from roost.testing import LocalRay

JOB = "run: my_job:main\ncluster: {num_nodes: 1, component_placement: {actor: {placement: 0, worker: 'my_job:Idle'}}}\n"
PROGRAM = """
import time
import roost

class Idle(roost.Worker):
    pass

def main(cluster, plan):
    open("is-running", "w").close()
    try:
        time.sleep(600)
    finally:
        print("the program was ended")
"""


@pytest.fixture(scope="module", autouse=True)
def connection(four_nodes: LocalRay) -> Iterator[None]:
    ray.init(namespace="tests", logging_level="warning")
    yield
    ray.shutdown()


@contextmanager
def roost_run(folder: Path, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "job.yaml").write_text(JOB)
    (folder / "my_job.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, "-m", "roost", "run", "job.yaml", *arguments],
        cwd=folder, env={**os.environ, "NO_COLOR": "1", **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have ignored it
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_job_that_runs_is_closed(four_nodes: LocalRay, tmp_path: Path, number: signal.Signals, code: int) -> None:
    before = ray_state()
    with roost_run(tmp_path, "--namespace", "stopped-by-a-signal") as process:
        wait_for(lambda: (tmp_path / "is-running").exists() or process.poll() is not None, "the program")
        assert process.poll() is None
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == code, stderr
    assert stderr.endswith(f"roost: stopped by {number.name}\n")
    assert "***" not in stderr
    assert "Traceback" not in stderr
    assert "the program was ended" in stdout
    wait_for(lambda: ray_state() == before, "no actor and no reservation left")


def test_an_embedded_ray_that_starts_is_ended(tmp_path: Path) -> None:
    marker = f"ROOST_TEST_RUN={tmp_path}".encode()
    try:
        with roost_run(tmp_path, "--cluster", "1x1", RAY_ADDRESS="", ROOST_TEST_RUN=str(tmp_path)) as process:
            # A second process: Ray's control store.
            wait_for(lambda: len(bearers_of(marker)) > 1 or process.poll() is not None, "the start of Ray")
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=90)
        assert process.returncode == 143, stderr
        assert stderr.endswith("roost: stopped by SIGTERM\n")
        assert "***" not in stderr
        assert "Traceback" not in stderr
        wait_for(lambda: not bearers_of(marker), "the end of Ray")
    finally:
        end(bearers_of(marker))

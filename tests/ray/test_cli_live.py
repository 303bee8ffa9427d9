"""``roost run``, ``status`` and ``doctor``, as users run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import roost
from roost.testing import LocalRay

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "roost", *arguments],
        cwd=ROOT, env={**os.environ, "NO_COLOR": "1", **env}, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip


class Idle(roost.Worker):
    def nothing(self) -> None:
        pass


def test_run_launches_on_the_ray_that_was_asked_for(four_nodes: LocalRay, tmp_path: Path) -> None:
    (tmp_path / "my_job.py").write_text(
        "import roost\nclass Counter(roost.Worker):\n    def run(self):\n        return self.rank * 10\n"
    )
    (tmp_path / "job.yaml").write_text(
        "cluster:\n  num_nodes: 2\n  component_placement:\n    actor: {placement: 3-4, worker: 'my_job:Counter'}\n"
    )
    done = run("run", str(tmp_path / "job.yaml"), "--namespace", "cli-run")
    assert done.returncode == 0, done.stderr
    assert "launched actor: 2 workers" in done.stdout
    assert "actor.run(): [0, 10]" in done.stdout


def test_run_with_an_embedded_ray_exchanges_work(four_nodes: LocalRay) -> None:
    done = run("run", "examples/exchange.yaml", "--cluster", "2x8", RAY_ADDRESS="", ROOST_NAMESPACE="embedded")
    assert done.returncode == 0, done.stderr
    assert "reward 1.00" in done.stdout
    assert "rollout[1]: node 1" in done.stdout
    assert "sees GPUs 4,5,6,7" in done.stdout


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ("cluster: {component_placement: {actor: 0}}", "U103"),
        ("run: no_such_module:main\ncluster: {component_placement: {actor: 0}}", "U104"),
        ("run: json:no_such_function\ncluster: {component_placement: {actor: 0}}", "U104"),
    ],
)
def test_a_job_without_a_program_is_wrong_usage(job: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(job)
    done = run("run", str(tmp_path / "job.yaml"), "--cluster", "1x1")
    assert done.returncode == 2
    assert f"error[{code}]" in done.stderr


def test_a_plan_with_problems_is_not_launched(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "run: json:dumps\ncluster:\n  component_placement:\n"
        "    a: {placement: 0, gpu_share: 0.8}\n    b: {placement: 0, gpu_share: 0.8}\n"
    )
    done = run("run", str(tmp_path / "job.yaml"), "--cluster", "1x1", RAY_ADDRESS="")
    assert done.returncode == 1
    assert "error[K101]" in done.stderr
    assert "embedded" not in done.stdout


def test_status_lists_jobs_groups_and_ranks(cluster: roost.Cluster, four_nodes: LocalRay) -> None:
    with Idle.create_group().launch(cluster, roost.PackedPlacementStrategy(2, 5, 2), name="idle"):
        text = run("status", "--address", four_nodes.address)
        found = json.loads(run("status", "--address", four_nodes.address, "--json").stdout)
    assert text.returncode == 0, text.stderr
    assert "idle" in text.stdout
    assert "ready" in text.stdout
    workers = found["jobs"][0]["groups"][0]["workers"]
    assert [(worker["node_rank"], worker["accelerators"]) for worker in workers] == [(0, [2, 3]), (1, [0, 1])]
    assert {worker["state"] for worker in workers} == {"ready"}


def test_doctor_finds_made_up_nodes_well(four_nodes: LocalRay) -> None:
    done = run("doctor", "--address", four_nodes.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 nodes" in done.stdout
    assert "0 wrong" in done.stdout
    assert "made up" in done.stdout


def test_nothing_to_ask(tmp_path: Path) -> None:
    for command in ("status", "doctor"):
        done = run(command, RAY_ADDRESS="", XDG_RUNTIME_DIR=str(tmp_path))
        assert done.returncode == 2
        assert "error[U105]" in done.stderr

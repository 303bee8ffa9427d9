"""The command line, run as users run it: as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import roost

ROOT = Path(__file__).parents[2]
GOOD = "cluster: {component_placement: {actor: 0-7, rollout: '0-7:0-3'}}\n"


def run(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "roost", *arguments],
        cwd=cwd, env={**os.environ, "NO_COLOR": "1", **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    return path


def test_plan_shows_a_map_on_stdout_and_nothing_on_stderr(job: Path) -> None:
    done = run("plan", str(job), "--cluster", "1x8:H200")
    assert (done.returncode, done.stderr) == (0, "")
    assert "A actor" in done.stdout
    assert "R rollout" in done.stdout
    assert "\x1b" not in done.stdout


def test_plan_in_colour_has_the_same_letters(job: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    done = subprocess.run(
        [sys.executable, "-m", "roost", "plan", str(job), "--cluster", "1x8"],
        env={**environment, "FORCE_COLOR": "1", "TERM": "xterm-256color"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "\x1b[" in done.stdout
    assert "A" in done.stdout


def test_json_is_all_of_stdout_and_is_the_plan(job: Path) -> None:
    done = run("plan", str(job), "--cluster", "1x8", "--json")
    plan = roost.Plan.from_json(done.stdout)
    assert plan.to_json() == done.stdout
    assert json.loads(done.stdout)["components"][0]["name"] == "actor"


def test_problems_of_the_plan_go_to_stderr_with_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "cluster:\n  component_placement:\n"
        "    actor: {placement: 0-7, gpu_share: 0.8}\n    rollout: {placement: 0-7, gpu_share: 0.4}\n"
    )
    for command in ("plan", "validate"):
        done = run(command, str(path), "--cluster", "1x8")
        assert done.returncode == 1
        assert "error[K101]" in done.stderr
        assert "error[" not in done.stdout
    done = run("plan", str(path), "--cluster", "1x8", "--json")
    assert done.returncode == 1
    assert roost.Plan.from_json(done.stdout).components


def test_all_problems_of_a_file_at_once_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "cluster:\n  num_node: 1\n  component_placement:\n    actor: 0-3:0-2\n    rollout: 0-99\n    reward: x\n"
    )
    done = run("validate", str(path), "--cluster", "1x8")
    assert done.returncode == 1
    assert done.stdout == ""
    for code in ("C201", "P104", "P105", "P101"):
        assert f"error[{code}]" in done.stderr
    assert f"{path}:4:16" in done.stderr
    assert "4 problems" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("plan",),
        ("plan", "JOB"),
        ("plan", "JOB", "--cluster", "2y8"),
        ("plan", "JOB", "--cluster", "missing.yaml"),
        ("plan", "missing.yaml", "--cluster", "1x8"),
        ("plan", ".", "--cluster", "1x8"),
        ("plan", "JOB", "--cluster", "1x8", "--import", "no_such_module_here"),
        ("fly", "JOB"),
        ("explain", "JOB", "actor[8]", "--cluster", "1x8"),
        ("explain", "JOB", "actr[0]", "--cluster", "1x8"),
        ("explain", "JOB", "actor", "--cluster", "1x8"),
    ],
)
def test_wrong_usage_is_exit_code_2(job: Path, arguments: tuple[str, ...]) -> None:
    done = run(*(str(job) if word == "JOB" else word for word in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_that_cannot_be_loaded_is_wrong_usage_without_a_traceback(job: Path) -> None:
    (job.parent / "broken.py").write_text("x = (\n")
    for text in (
        "run: broken:main\n" + GOOD,
        "cluster: {component_placement: {a: {placement: 0, worker: 'broken:A'}}}\n",
    ):
        job.write_text(text)
        done = run("run", str(job), "--cluster", "1x8", RAY_ADDRESS="")
        assert done.returncode == 2
        assert "error[U104]" in done.stderr
        assert "SyntaxError" in done.stderr
        assert "Traceback" not in done.stderr
    done = run("plan", "job.yaml", "--cluster", "1x8", "--import", "broken", cwd=job.parent)
    assert done.returncode == 2
    assert "error[U101]" in done.stderr
    assert "Traceback" not in done.stderr


def test_validate_says_so_in_one_line(job: Path) -> None:
    done = run("validate", str(job), "--cluster", "1x8")
    assert done.returncode == 0
    assert "launchable" in done.stdout.splitlines()[-1]


def test_explain_names_place_rule_neighbours_and_environment(job: Path) -> None:
    done = run("explain", str(job), "rollout[1]", "--cluster", "1x8")
    assert done.returncode == 0
    assert "rollout[1] goes to node 0, GPUs 2-3" in done.stdout
    assert "0-7:0-3" in done.stdout
    assert "actor[2], actor[3]" in done.stdout
    assert "CUDA_VISIBLE_DEVICES=2,3" in done.stdout


def test_hardware_types_come_from_imported_modules() -> None:
    cluster = "examples/heterogeneous-cluster.yaml"
    without = run("validate", "examples/heterogeneous.yaml", "--cluster", cluster)
    assert without.returncode == 1
    assert "error[C308]" in without.stderr
    done = run("validate", "examples/heterogeneous.yaml", "--cluster", cluster, "--import", "examples.robots")
    assert done.returncode == 0, done.stderr


def test_a_large_cluster_is_summarised(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("cluster: {component_placement: {actor: 0-4095, rollout: 4096-8191}}\n")
    done = run("plan", str(path), "--cluster", "1024x8")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) < 40
    assert "0-511" in done.stdout


def test_uneven_clusters_leave_the_middle_out(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("cluster: {component_placement: {actor: all}}\n")
    cluster = "+".join(f"1x{1 + i % 4}" for i in range(300))
    done = run("plan", str(path), "--cluster", cluster)
    assert "more nodes" in done.stdout
    assert "more processes" in done.stdout
    assert len(done.stdout.splitlines()) < 80


def test_a_reader_that_stops_early_is_no_error(job: Path) -> None:
    script = f"{sys.executable} -m roost plan {job} --cluster 1x8 --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_debug_variable_shows_the_traceback(job: Path) -> None:
    done = run("plan", str(job), "--cluster", "zzz", ROOST_DEBUG="1")
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("command", ["plan", "validate", "explain"])
def test_help_shows_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"roost {command} job.yaml" in done.stdout


LAYOUT = "cluster:\n  layout: {mode: collocated, actor_num_nodes: 1, actor_num_gpus_per_node: 4}\n"


def test_set_gives_one_file_several_modes(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(LAYOUT)
    assert run("plan", str(path), "--cluster", "1x8").stdout.startswith("collocated: ")
    more = ["--set", "cluster.layout.mode=hybrid", "--set", "cluster.layout.rollout_num_gpus=8"]
    done = run("plan", str(path), "--cluster", "1x8", *more, "--json")
    plan = roost.Plan.from_json(done.stdout)
    assert (plan.mode.value, plan.component("rollout").rule) == ("hybrid", "0-7")
    done = run("validate", str(path), "--cluster", "1x8", *more)
    assert "launchable. hybrid: " in done.stdout
    done = run("explain", str(path), "rollout[7]", "--cluster", "1x8", *more)
    assert "goes to node 0, GPU 7" in done.stdout


def test_explain_says_which_engine_a_process_belongs_to(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "cluster: {layout: {debug_rollout_only: true, rollout_num_gpus: 32, rollout_num_gpus_per_engine: 16}}"
    )
    done = run("explain", str(path), "rollout[3]", "--cluster", "4x8")
    assert "1, member 1 of 2" in done.stdout


def test_set_makes_what_is_not_there_and_takes_any_value(job: Path) -> None:
    more = [
        "--set",
        "rollout.tensor_parallel_size=2",
        "--set",
        "cluster.component_placement={actor: 0-7, agent: '0:0'}",
    ]
    plan = roost.Plan.from_json(run("plan", str(job), "--cluster", "1x8", *more, "--json").stdout)
    assert [component.rule for component in plan.components] == ["0-7", "0:0"]


def test_a_value_that_was_set_is_complained_about_as_such(job: Path) -> None:
    done = run("validate", str(job), "--cluster", "1x8", "--set", "cluster.component_placement.actor=0-9")
    assert done.returncode == 1
    place = "--> --set cluster.component_placement.actor=0-9  (cluster.component_placement.actor)"
    assert place in done.stderr


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("cluster.component_placement.actor.placement=0", "actor is the text '0-7', and has nothing under it"),
        ("cluster", "not KEY=VALUE"),
        ("=3", "not KEY=VALUE"),
        ("a..b=3", "not KEY=VALUE"),
        ("a=[1", "not YAML"),
        ("list.3=1", "list is a list of 2, and has no item '3'"),
        ("list.x=1", "list is a list of 2, and has no item 'x'"),
    ],
)
def test_a_value_that_cannot_be_set_is_wrong_usage(job: Path, assignment: str, text: str) -> None:
    job.write_text(GOOD + "list: [1, 2]\n")
    done = run("plan", str(job), "--cluster", "1x8", "--set", assignment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error[U106]" in done.stderr
    assert text in done.stderr


def test_what_an_alias_shares_is_set_in_one_place_only(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("base: &base {placement: 0-3}\ncluster: {component_placement: {actor: *base, reward: *base}}\n")
    done = run(
        "plan", str(path), "--cluster", "1x8", "--set", "cluster.component_placement.actor.placement=4-7", "--json"
    )
    assert [c.rule for c in roost.Plan.from_json(done.stdout).components] == ["4-7", "0-3"]

"""``roost init``: what it writes plans without problems, on every size that it is asked for."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import roost
from roost.cli import main
from roost.cli.starters import LAYOUTS
from roost.cli.writing import Writer
from roost.errors import Finding
from roost.hardware import devices
from roost.source.yaml import read_text

SIZES = [
    "1x1",
    "1x2",
    "1x3",
    "1x8",
    "2x8",
    "16x8",
    "3x4",
    "2x1",
    "5x6",
    "2x8+1x4",
    "3x8:A800+2x4:4090",
    "2x8+3x0",
    "1x1+1x0",
]
TOO_SMALL = {("disaggregated", "1x1"), ("disaggregated", "1x1+1x0")}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(devices, "_types", dict(devices._types))
    return tmp_path


def next_command(printed: str) -> list[str]:
    """What the command says to run next."""
    line = next(line for line in printed.splitlines() if line.strip().startswith("roost plan"))
    return shlex.split(line)[1:]


def planned(arguments: list[str]) -> tuple[roost.Plan, list[Finding]]:
    """The plan of a ``roost plan`` command line."""
    cluster = arguments[arguments.index("--cluster") + 1]
    if "--import" in arguments:
        importlib.invalidate_caches()
        name = arguments[arguments.index("--import") + 1]
        importlib.import_module(name)
        del sys.modules[name]  # another test writes another of the same name
    topology = roost.Topology.load(cluster) if cluster.endswith(".yaml") else roost.Topology.parse(cluster)
    plan = roost.Plan.resolve(roost.load_config(arguments[1]), topology)
    return plan, plan.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_plans_without_problems(layout: str, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["init", "--layout", layout, "--cluster", size, "--out", f"job{SIZES.index(size)}.yaml"])
    if (layout, size) in TOO_SMALL:
        assert code == 2
        assert "--layout collocated" in capsys.readouterr().err
        return
    assert code == 0
    plan, findings = planned(next_command(capsys.readouterr().out))
    assert [finding for finding in findings if finding.is_problem] == []
    assert not {"N101", "N105", "N109", "N111"} & {finding.code for finding in findings}, "nothing idle or crossing"
    names = {component.name for component in plan.components}
    assert {"actor", "rollout"} <= names
    assert plan.mode.value == {"heterogeneous": plan.mode.value}.get(layout, layout)
    assert ("env" in names) == (layout in ("hybrid", "heterogeneous"))


def test_two_nodes_of_eight(capsys: pytest.CaptureFixture[str]) -> None:
    everything = {0: list(range(8)), 1: list(range(8))}
    expected = {
        "collocated": (everything, everything),
        "disaggregated": ({0: list(range(8))}, {1: list(range(8))}),
        "hybrid": (everything, {1: list(range(8))}),
        "heterogeneous": ({0: list(range(8))}, {1: list(range(8))}),
    }
    for layout, (actor, rollout) in expected.items():
        main(["init", "--layout", layout, "--force"])
        plan, _ = planned(next_command(capsys.readouterr().out))
        assert plan.component("actor").accelerators == actor, layout
        assert plan.component("rollout").accelerators == rollout, layout


def test_robots_have_a_group_a_cluster_file_and_a_module(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--layout", "heterogeneous", "--cluster", "2x8:H200", "--out", "arms.yaml"]) == 0
    assert sorted(os.listdir(folder)) == ["arms-cluster.yaml", "arms.yaml", "arms_robots.py"]
    plan, _ = planned(next_command(capsys.readouterr().out))
    assert [(p.cluster_node_rank, p.local_hardware_ranks) for p in plan.component("env").placements] == [
        (2, (0,)),
        (3, (0,)),
    ]
    assert plan.topology.nodes[0].accelerator_model == "H200"
    assert plan.topology.group("robot").hardware_type == "Franka"


def test_robots_live_on_nodes_that_are_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--layout", "heterogeneous", "--cluster", "1x8+3x0"]) == 0
    assert sorted(os.listdir(folder)) == ["job.yaml", "job_robots.py"]
    plan, _ = planned(next_command(capsys.readouterr().out))
    assert [p.cluster_node_rank for p in plan.component("env").placements] == [1, 2, 3]


def test_a_cluster_file_may_be_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.yaml").write_text("nodes: [{count: 2, name: gpu, accelerators: 4}]")
    assert main(["init", "--cluster", "mine.yaml"]) == 0
    plan, findings = planned(next_command(capsys.readouterr().out))
    assert plan.topology.num_accelerators == 8
    assert not any(finding.is_problem for finding in findings)
    assert main(["init", "--cluster", "mine.yaml", "--layout", "heterogeneous", "--force"]) == 2
    assert "robots live on nodes without accelerators" in capsys.readouterr().err


def test_nothing_is_overwritten_unless_forced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text("mine")
    assert main(["init"]) == 2
    assert "error[U130]: job.yaml already exists" in capsys.readouterr().err
    assert (folder / "job.yaml").read_text() == "mine"
    assert main(["init", "--force"]) == 0
    assert (folder / "job.yaml").read_text().startswith("# Collocated")


def test_nothing_at_all_is_written_where_one_of_several_is_there(folder: Path) -> None:
    (folder / "job-cluster.yaml").write_text("mine")
    assert main(["init", "--layout", "heterogeneous"]) == 2
    assert os.listdir(folder) == ["job-cluster.yaml"]


def test_another_folder(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "jobs").mkdir()
    (folder / "mine.yaml").write_text("nodes: [{count: 1, accelerators: 2}]")
    assert main(["init", "--cluster", "mine.yaml", "--out", "jobs/a.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "  cd jobs\n" in printed
    monkeypatch.chdir("jobs")
    planned(next_command(printed))
    assert main(["init", "--out", "nowhere/a.yaml"]) == 2
    assert "error[U120]" in capsys.readouterr().err


@pytest.mark.parametrize(("cluster", "code"), [("4x0", "U131"), ("two", "T101"), ("no.yaml", "C101")])
def test_clusters_that_will_not_do(cluster: str, code: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["init", "--cluster", cluster]) == 2
    assert f"error[{code}]" in capsys.readouterr().err
    assert os.listdir(folder) == []


def test_as_a_process_of_its_own(folder: Path) -> None:
    command = [sys.executable, "-m", "roost"]
    done = subprocess.run([*command, "init", "--layout", "heterogeneous"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    plan = subprocess.run([*command, *next_command(done.stdout)], capture_output=True, text=True, check=False)
    assert (plan.returncode, plan.stderr) == (0, "")
    assert "E env, 2 processes, in robot" in plan.stdout


@pytest.mark.parametrize(
    "value",
    ["0-7", "3:0", "1:30", "0", "007", ".4", "-", "- x", "yes", "2024-01-01", "a: b", "a #b", "it's", "{x}", "é", "", " x", "x:",
     "1e3", "0x1F", "~", "null", "a\nb", "[1]", "10.1.0.4", "a,b"],
)  # fmt: skip
def test_what_is_written_is_read_again(value: str) -> None:
    """By Roost, and by loaders that know YAML 1.1."""
    data = {"k": value, "small": {"a": value, "b": [value, 1]}, "list": [{"x": value, "y": {"z": value}, "w": None}]}
    writer = Writer()
    for key, child in data.items():
        writer.key(key, child, "a note")
    assert yaml.safe_load(writer.text()) == data
    assert read_text(writer.text()).plain() == data

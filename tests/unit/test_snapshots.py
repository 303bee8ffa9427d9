"""The exact texts of errors and maps: they are product. ``make snapshots`` writes them anew."""

from __future__ import annotations

import os
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import roost
from roost.report.explain import explain_process
from roost.report.terminal import draw_plan

ROOT = Path(__file__).parents[2]
SNAPSHOTS = ROOT / "tests" / "snapshots"
UPDATE = os.environ.get("UPDATE_SNAPSHOTS") == "1"

HEADER = "cluster:\n  component_placement:\n"

BAD_JOBS = {
    "uneven-counts": ("2x8", HEADER + "    actor: 0-3:0-2\n"),
    "comma-ends-a-segment": ("2x8", HEADER + "    actor: 0-3,5-7:0-6\n"),
    "does-not-start-at-0": ("2x8", HEADER + "    actor: 0-3:4-7\n"),
    "out-of-range": ("2x8", HEADER + "    actor: 0-16\n"),
    "backwards": ("2x8", HEADER + "    actor: 7-0\n"),
    "repeats": ("2x8", HEADER + "    actor: 0-3,2-5\n"),
    "huge": ("2x8", HEADER + "    actor: 0-999999999999\n"),
    "spans-nodes": ("2x8", HEADER + "    actor: 4-11:0\n"),
    "two-nodes-for-one-process": ("4x0", HEADER + "    agent: 0-1:0\n"),
    "unknown-group": ("2x8", HEADER + "    actor: {node_group: nodes, placement: 0-3}\n"),
    "defined-twice": ("2x8", HEADER + "    actor,rollout: 0-3\n    rollout: 4-7\n"),
    "misplaced": ("2x8", "cluster:\n  num_nodes: 1\n  actor,inference: 0-7\n"),
    "typing-errors": ("2x8", "cluster:\n  num_node: 2\n  component_placment:\n    actor: 0-7\n"),
    "wrong-values": (
        "2x8",
        HEADER
        + "    actor: {placement: 0-7, gpu_share: 1.5, cpus: -1, memory_gib: .nan, rolle: x}\n    rollout: [0, 1]\n",
    ),
    "too-many-nodes": ("2x8", "cluster:\n  num_nodes: 4\n  component_placement:\n    actor: 0-7\n"),
    "node-groups": (
        "4x8",
        HEADER + "    actor: {node_group: a, placement: 0-7}\n"
        "  node_groups:\n"
        "    - {label: a, node_ranks: 0-1}\n"
        "    - {label: a, node_ranks: 2}\n"
        "    - {label: node, node_ranks: 3}\n"
        "    - {label: b, node_ranks: 3-9}\n"
        "    - {label: c, node_ranks: 2, env_configs: [{node_ranks: 3, env_vars: [{A: 1, B: 2}, {RANK: 0}]}]}\n"
        "    - {label: d, node_ranks: 2, hardware: {type: Zeppelin, configs: []}}\n",
    ),
    "neither-collocated-nor-disaggregated": (
        "2x8",
        "cluster:\n  placement_mode: collocated\n  component_placement:\n    actor: 0-7\n    rollout: 4-11\n",
    ),
    "stride-does-not-fit": (
        "2x8",
        (
            "cluster:\n  placement_mode: collocated\n  component_placement:\n    actor,rollout: 0-15\n"
            "actor: {model: {tensor_model_parallel_size: 16}}\nrollout: {tensor_parallel_size: 2}\n"
        ),
    ),
    "layout-engines": (
        "2x8",
        (
            "cluster:\n  layout:\n    mode: disaggregated\n    actor_num_gpus_per_node: 6\n"
            "    rollout_num_gpus: 8\n    rollout_num_gpus_per_engine: 4\n"
            "    use_critic: true\n    num_gpus_per_critic: 0.6\n"
        ),
    ),
    "layout-too-large": (
        "1x8",
        "cluster:\n  layout:\n    mode: disaggregated\n    actor_num_gpus_per_node: 6\n    rollout_num_gpus: 8\n",
    ),
    "duplicate-keys": ("2x8", "cluster:\n  num_nodes: 1\n  num_nodes: 2\n"),
    "tab": ("2x8", "cluster:\n\tnum_nodes: 1\n"),
    "not-yaml": ("2x8", "cluster: [1, 2\n"),
    "empty": ("2x8", ""),
    "long-line": ("2x8", HEADER + "    actor: " + ",".join(f"{i}" for i in range(0, 200, 2)) + "\n"),
}

CRAMPED = HEADER + (
    "    actor: {placement: 0-7, gpu_share: 0.8, memory_gib: 60, cpus: 8}\n"
    "    rollout: {placement: 0-7, gpu_share: 0.4, memory_gib: 30, cpus: 8}\n"
)
CRAMPED_CLUSTER = "nodes: [{cpus: 64, accelerators: {count: 8, model: A100, memory_gib: 80}}]\n"

JOBS = {
    "collocated": "2x8:H200",
    "disaggregated": "3x8:H100",
    "hybrid": "1x8:A100",
}


def compare(name: str, text: str) -> None:
    path = SNAPSHOTS / f"{name}.txt"
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"no snapshot {path.name}: make snapshots"
    assert text == path.read_text(encoding="utf-8")


def drawn(view: object) -> str:
    console = Console(file=StringIO(), width=100, highlight=False, color_system=None)
    console.print(view, soft_wrap=True)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("name", BAD_JOBS)
def test_error_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, text = BAD_JOBS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("roost.hardware.devices._types", {})
    Path("job.yaml").write_text(text)
    with pytest.raises(roost.RoostError) as caught:
        roost.Plan.resolve(roost.load_config("job.yaml"), roost.Topology.parse(cluster))
    compare(f"error-{name}", f"{text}---\n{caught.value}\n")


def test_findings_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(CRAMPED)
    Path("cluster.yaml").write_text(CRAMPED_CLUSTER)
    plan = roost.Plan.resolve(roost.load_config("job.yaml"), roost.Topology.load("cluster.yaml"))
    compare("findings", "\n\n".join(finding.render() for finding in plan.check()) + "\n")


@pytest.mark.parametrize("name", JOBS)
def test_map(name: str) -> None:
    config = roost.load_config(ROOT / "examples" / f"{name}.yaml")
    compare(f"map-{name}", drawn(draw_plan(roost.Plan.resolve(config, roost.Topology.parse(JOBS[name])))))


def test_map_of_a_layout() -> None:
    groups = [{"num_gpus": 16, "num_gpus_per_engine": 16}, {"num_gpus": 2, "placeholder": True}, {"num_gpus": 4}]
    layout = {"actor_num_gpus_per_node": 8, "use_critic": True, "rollout_groups": groups}
    job = {"cluster": {"layout": {**layout, "rollout_num_gpus_per_engine": 2}}}
    compare("map-layout", drawn(draw_plan(roost.Plan.resolve(job, roost.Topology.parse("4x8:H200")))))


def test_map_of_a_large_uneven_cluster() -> None:
    job = {"cluster": {"component_placement": {"actor": "all", "agent": {"node_group": "node", "placement": "all"}}}}
    topology = roost.Topology.parse("64x8:H100+" + "+".join(f"1x{i % 5}" for i in range(60)) + "+2x32:B200")
    compare("map-large", drawn(draw_plan(roost.Plan.resolve(job, topology))))


def test_explanations() -> None:
    config = roost.load_config(ROOT / "examples" / "hybrid.yaml")
    plan = roost.Plan.resolve(config, roost.Topology.parse("1x8"))
    texts = [drawn(explain_process(plan, plan.process(name))) for name in ("actor[4]", "rollout[0]", "env[3]")]
    compare("explain", "\n".join(texts))


def test_no_snapshot_is_left_over() -> None:
    names = {f"error-{name}" for name in BAD_JOBS} | {f"map-{name}" for name in JOBS}
    names |= {"findings", "map-large", "map-layout", "explain"}
    assert {path.stem for path in SNAPSHOTS.glob("*.txt")} == names


def test_the_designed_error_looks_as_designed() -> None:
    text = (SNAPSHOTS / "error-uneven-counts.txt").read_text(encoding="utf-8")
    assert re.search(r"\| +~~~ \^\^\^ 3 processes \(0, 1, 2\)\n +\| +4 GPUs \(node 0: 0, 1, 2, 3\)\n", text)

"""Locks on a real Ray: replayed, stopped where reality differs, made anew; and what runs compared with what was kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import roost
from roost import LockFile
from roost.testing import LocalRay

PROGRAM = """
import roost

class Teller(roost.Worker):
    def run(self):
        return [roost.WorkerManager.get_proxy().get_worker("actor", self.rank)["node_rank"], self.rank]
"""
JOB = """
cluster:
  component_placement:
    actor: {placement: 3-4, worker: "my_job:Teller"}
"""


class Idle(roost.Worker):
    def nothing(self) -> None:
        pass


def roost_cli(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "roost", *arguments],
        cwd=folder, env={**os.environ, "NO_COLOR": "1", **env}, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip


def write_job(folder: Path, text: str = JOB) -> None:
    (folder / "my_job.py").write_text(PROGRAM)
    (folder / "job.yaml").write_text(text)


def test_a_lock_is_made_replayed_and_made_anew(four_nodes: LocalRay, tmp_path: Path) -> None:
    write_job(tmp_path)
    first = roost_cli(tmp_path, "run", "job.yaml", "--lock", "job.lock.json", "--relock", "--namespace", "lock-run")
    assert first.returncode == 0, first.stderr
    assert "wrote job.lock.json: 4 nodes x 4 GPUs" in first.stdout
    lock = LockFile.load(tmp_path / "job.lock.json")
    assert [node.address for node in lock.topology.nodes] == [four_nodes.node_address(rank) for rank in range(4)]

    # Nothing is placed anew: the file says something else by now only in what places nothing.
    write_job(tmp_path, JOB + "optimizer: {lr: 0.1}\n")
    again = roost_cli(tmp_path, "run", "--lock", "job.lock.json", "--namespace", "lock-run")
    assert again.returncode == 0, again.stderr
    assert "every process stays where it was" in again.stdout
    assert "actor.run(): [[0, 0], [1, 1]]" in again.stdout

    # Two machines have changed places since.
    nodes = lock.topology.nodes
    swapped = roost.Topology(
        (nodes[0], roost.Node(**{**vars(nodes[2]), "rank": 1}), roost.Node(**{**vars(nodes[1]), "rank": 2}), nodes[3])
    )
    plan = roost.Plan(swapped, lock.plan.components, lock.plan.mode)
    (tmp_path / "job.lock.json").write_text(LockFile(plan, lock.job_file, lock.job_hash).to_json())
    stopped = roost_cli(tmp_path, "run", "--lock", "job.lock.json", "--namespace", "lock-run")
    assert stopped.returncode == 1
    assert "error[K201]" in stopped.stderr
    assert "node 1: order: planned as node 1, found as node 2" in stopped.stderr
    assert "launched" not in stopped.stdout

    write_job(tmp_path, JOB.replace("3-4", "4-5"))
    relocked = roost_cli(tmp_path, "run", "--lock", "job.lock.json", "--relock", "--namespace", "lock-run")
    assert relocked.returncode == 0, relocked.stderr
    assert "node 1: order: as node 1 → as node 2" in relocked.stdout
    assert "2 moved, 0 added, 0 removed" in relocked.stdout
    assert "actor.run(): [[1, 0], [1, 1]]" in relocked.stdout
    assert LockFile.load(tmp_path / "job.lock.json").topology.nodes == nodes


def test_what_runs_is_compared_with_what_was_kept(cluster: roost.Cluster, four_nodes: LocalRay, tmp_path: Path) -> None:
    job = {
        "cluster": {
            "component_placement": {
                "actor": {"placement": "0-3:0-1", "gpu_share": 0.5},
                "kept": {"placement": "15", "placeholder": True},
            }
        }
    }
    plan = roost.Plan.resolve(job, cluster)
    (tmp_path / "job.lock.json").write_text(LockFile.of(plan, cluster).to_json())
    with Idle.create_group().launch(cluster, plan=plan, component="actor"):
        same = roost_cli(tmp_path, "diff", "job.lock.json", "live", "--address", four_nodes.address)
        with Idle.create_group().launch(cluster, roost.PackedPlacementStrategy(4, 5), name="late"):
            later = roost_cli(tmp_path, "diff", "job.lock.json", four_nodes.address, "--json")
    gone = roost_cli(tmp_path, "diff", "job.lock.json", "live", "--address", four_nodes.address)
    assert same.returncode == 0, same.stdout + same.stderr
    assert same.stdout == "job.lock.json → live (roost)\n\nno differences\n"
    assert later.returncode == 1, later.stderr
    found = json.loads(later.stdout)
    assert [(row["sign"], row["component"], row["rank"]) for row in found["processes"]] == [
        ("+", "late", 0),
        ("+", "late", 1),
    ]
    assert gone.returncode == 1
    assert "0 moved, 0 added, 3 removed" in gone.stdout


def test_an_embedded_ray_replays_a_lock_of_described_machines(four_nodes: LocalRay, tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "cluster.yaml").write_text("nodes:\n- {name: gpu, count: 2, accelerators: {count: 4, model: H200}}\n")
    made = roost_cli(tmp_path, "plan", "job.yaml", "--cluster", "cluster.yaml", "--lock", "job.lock.json")
    assert made.returncode == 0, made.stderr
    done = roost_cli(
        tmp_path,
        "run",
        "--lock",
        "job.lock.json",
        "--cluster",
        "cluster.yaml",
        RAY_ADDRESS="",
        ROOST_NAMESPACE="replay",
    )
    assert done.returncode == 0, done.stderr
    assert "actor.run(): [[0, 0], [1, 1]]" in done.stdout

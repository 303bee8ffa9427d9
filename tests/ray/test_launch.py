"""``roost.launch``: a whole job started by one call, and closed with everything it started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rl_parts import Trainer, seeded

import roost
from roost.testing import LocalRay

JOB = """\
cluster:
  component_placement:
    actor: {placement: 0, worker: "launched:Trainer"}
    critic: {placement: 1, worker: "launched:Trainer"}
    rollout: {placement: 2, engine: "launched:make_engine"}
    reward: {node_group: node, placement: 0-1, worker: "launched:Reward"}
    spare: {placement: 3, placeholder: true}
model: {seed: 3}
"""
MODULE = """\
from functools import partial
import roost
import torch

class Model(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.embed(ids))

class Trainer(roost.TrainWorker):
    def init(self, seed):
        self.model = Model(seed)

class Reward(roost.Worker):
    def judge(self):
        return self.rank

def make_engine(config):
    return roost.TorchEngine(partial(Model, config["model"]["seed"]), context=16, batch_rows=2)
"""
DRIVER = """\
import os
import ray
import roost

with roost.launch("JOB", cluster="2x2", rollout_options={"router": None}) as job:
    print("folder", os.environ["RAY_TMPDIR"])
    print("roles", job.train.component, job.group("critic").component, len(job.rollout.engines), sorted(job.worker_groups))
    job.train.init(job.config["model"]["seed"])
    print("version", job.train.update_weights().version)
    print("judged", job.group("reward").judge().wait())
    print("free", ray.available_resources().get("GPU", 0))
    try:
        job.group("rewrd")
    except roost.LaunchError as error:
        print("refused", error.codes, "did you mean" in str(error))
job.close()
print("connected", ray.is_initialized(), "RAY_ADDRESS" in os.environ)
"""


def test_a_job_file_on_made_up_nodes(tmp_path: Path) -> None:
    (tmp_path / "launched.py").write_text(MODULE)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "driver.py").write_text(DRIVER.replace("JOB", str(tmp_path / "job.yaml")))
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "driver.py")],
        env={**env, "ROOST_NAMESPACE": "launched"}, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder, *lines = [line for line in done.stdout.splitlines() if not line.startswith("(")]
    assert lines == [
        "roles actor critic 1 ['actor', 'critic', 'reward']",
        "version 1",
        "judged [0, 1]",
        "free 0",
        "refused ('W115',) True",
        "connected False False",
    ]
    assert not Path(folder.removeprefix("folder ")).exists()


def engine() -> roost.TorchEngine:
    return roost.TorchEngine(seeded, context=16, batch_rows=2)


def test_an_error_in_the_block_closes_what_was_started(
    cluster: roost.Cluster, free_gpus: Callable[[], float], eventually: Callable[..., None]
) -> None:
    config = {"cluster": {"component_placement": {"actor": 0, "rollout": 5}}}
    before = free_gpus()
    plan = roost.Plan.resolve(config, cluster)

    def use() -> None:
        with roost.launch(plan, cluster=cluster, programs={"actor": Trainer, "rollout": engine}) as job:
            job.train.init()
            job.train.update_weights()
            jobs.append(job)
            raise ValueError("in the block")

    jobs: list[roost.RunningJob] = []
    with pytest.raises(ValueError, match="in the block"):
        use()
    assert jobs[0].config == {}
    assert cluster.is_open
    assert cluster.get_group("actor") is None
    eventually(lambda: free_gpus() == before)
    jobs[0].close()


class Broken(roost.Worker):
    def __init__(self) -> None:
        super().__init__()
        raise ValueError("not today")


def test_a_component_that_does_not_start_closes_the_others(
    cluster: roost.Cluster, free_gpus: Callable[[], float], eventually: Callable[..., None]
) -> None:
    config = {"cluster": {"component_placement": {"actor": 0, "reward": 5}}}
    before = free_gpus()
    with pytest.raises(roost.LaunchError, match="not today"):
        roost.launch(config, cluster=cluster, programs={"actor": Trainer, "reward": Broken})
    assert cluster.get_group("actor") is None
    eventually(lambda: free_gpus() == before)


def test_run_calls_a_function_of_one_argument_with_the_running_job(four_nodes: LocalRay, tmp_path: Path) -> None:
    (tmp_path / "launched.py").write_text(
        MODULE + "def main(job):\n    print('got', job.group('reward').judge().wait())\n"
    )
    (tmp_path / "job.yaml").write_text(
        "run: launched:main\ncluster:\n  num_nodes: 1\n  component_placement: {reward: 0}\n"
        "  programs: {reward: 'launched:Reward'}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "roost", "run", str(tmp_path / "job.yaml"), "--namespace", "launch-run"],
        env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "launched reward: 1 worker" in done.stdout
    assert "got [0]" in done.stdout

"""``roost import``: the same components on the same accelerators. The numbers here were worked out by hand."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import roost
from roost.cli import main
from roost.config.schema import job_schema
from roost.hardware import devices

Where = dict[int, list[int]]


def gpus(text: str) -> Where:
    """``"0:0-7 1:0-3"`` → node → accelerators."""
    found: Where = {}
    for part in text.split():
        node, _, span = part.partition(":")
        first, _, last = span.partition("-")
        found[int(node)] = list(range(int(first), int(last or first) + 1))
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "_types", dict(devices._types))
    return tmp_path


class Result:
    def __init__(self, text: str, cluster: str) -> None:
        self.text = text
        self.cluster = cluster
        Path("job.yaml").write_text(text)
        self.plan = roost.Plan.resolve(roost.load_config("job.yaml"), roost.Topology.parse(cluster))
        self.problems = [finding for finding in self.plan.check() if finding.is_problem]
        config: Any = roost.load_config("job.yaml")
        self.wrong = list(jsonschema.Draft202012Validator(job_schema()).iter_errors(config._tree.plain()))

    def engines(self, name: str) -> list[Where]:
        """Node → accelerators of each engine."""
        component = self.plan.component(name)
        return [{p.cluster_node_rank: list(p.accelerators) for p in engine} for engine in component.engines]

    def where(self) -> dict[str, Where]:
        return {component.name: component.accelerators for component in self.plan.components}


def imported(system: str, *words: str, cluster: str = "", capsys: pytest.CaptureFixture[str]) -> Result:
    more = ["--cluster", cluster] if cluster else []
    code = main(["import", system, *more, "--out", "imported.yaml", "--force", "--", *words])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, ""), printed.err
    command = shlex.split(printed.out.splitlines()[-1])
    return Result(Path("imported.yaml").read_text(), command[command.index("--cluster") + 1])


def refused(system: str, *words: str, capsys: pytest.CaptureFixture[str], cluster: str = "") -> str:
    more = ["--cluster", cluster] if cluster else []
    code = main(["import", system, *more, "--out", "imported.yaml", "--", *words])
    printed = capsys.readouterr()
    assert code in (1, 2), printed.out
    assert not os.path.exists("imported.yaml")
    return printed.err


def check(result: Result, cluster: str, expected: dict[str, str], engines: dict[str, int]) -> None:
    assert result.cluster == cluster
    assert result.problems == []
    assert result.wrong == []
    assert result.where() == {name: gpus(text) for name, text in expected.items()}
    for name, count in engines.items():
        assert len(result.engines(name)) == count, name


# slime ------------------------------------------------------------------------------------------

SLIME = {
    # One node of eight, in turn; engines of one GPU.
    "colocate": ("--colocate", "1x8", {"actor": "0:0-7", "rollout": "0:0-7"}, {"rollout": 8}),
    # A = 2 x 8 = 16 GPUs; engines of 2 on all of them: 8.
    "colocate on two nodes": (
        "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2",
        "2x8", {"actor": "0:0-7 1:0-7", "rollout": "0:0-7 1:0-7"}, {"rollout": 8},
    ),
    # A = 4, R = 4, offset 4: half a node each.
    "dis-agg on one node": (
        "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2",
        "1x8", {"actor": "0:0-3", "rollout": "0:4-7"}, {"rollout": 2},
    ),
    # A = 16, R = 16 from GPU 16 on: nodes 2 and 3; engines of 8.
    "dis-agg on four nodes, asynchronous": (
        ("python3 train_async.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 16 "
        "--rollout-num-gpus-per-engine 8"),
        "4x8", {"actor": "0:0-7 1:0-7", "rollout": "2:0-7 3:0-7"}, {"rollout": 2},
    ),
    # max(A, R) = 16: engines begin at GPU 0 and go on beyond the trainer.
    "colocate with more engines than trainer": (
        "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus 16 --rollout-num-gpus-per-engine 4",
        "2x8", {"actor": "0:0-7", "rollout": "0:0-7 1:0-7"}, {"rollout": 4},
    ),
    "colocate with fewer": (
        "--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus 4 --rollout-num-gpus-per-engine 4",
        "1x8", {"actor": "0:0-7", "rollout": "0:0-3"}, {"rollout": 1},
    ),
    # An engine of 16 on nodes of 8: one process on each of two nodes.
    "engines of several nodes": (
        "--actor-num-nodes 2 --rollout-num-gpus 32 --rollout-num-gpus-per-engine 16",
        "6x8", {"actor": "0:0-7 1:0-7", "rollout": "2:0-7 3:0-7 4:0-7 5:0-7"}, {"rollout": 2},
    ),
    "train only": ("--debug-train-only --actor-num-nodes 1 --rollout-num-gpus 8", "1x8", {"actor": "0:0-7"}, {}),
    "train from saved rollouts": ("--load-debug-rollout-data /d/{rollout_id}.pt --colocate", "1x8", {"actor": "0:0-7"}, {}),
    "rollout only": ("--debug-rollout-only --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4",
                     "1x8", {"rollout": "0:0-7"}, {"rollout": 2}),
    # Without --rollout-num-gpus, colocate gives it the trainer's number: 4.
    "rollout only, colocated": (
        "--debug-rollout-only --colocate --actor-num-gpus-per-node 4", "1x8", {"rollout": "0:0-3"}, {"rollout": 4},
    ),
    "external": ("--rollout-external --actor-num-nodes 2", "2x8", {"actor": "0:0-7 1:0-7"}, {}),
    "external, by address": (
        "--rollout-external-engine-addrs h1:10090 h2:10091 --actor-num-gpus-per-node 4", "1x8", {"actor": "0:0-3"}, {},
    ),
    "no engines here": ("--colocate --rollout-num-gpus 0", "1x8", {"actor": "0:0-7"}, {}),
    # PPO: the critic shares the trainer's GPUs.
    "a critic that shares": (
        "--advantage-estimator ppo --colocate", "1x8", {"actor": "0:0-7", "critic": "0:0-7", "rollout": "0:0-7"}, {},
    ),
    # Its own flags: 4 (actor) + 4 (critic) + 8 (rollout) = 16.
    "a critic of its own": (
        ("--use-critic --actor-num-nodes 1 --actor-num-gpus-per-node 4 --critic-num-nodes 1 "
        "--critic-num-gpus-per-node 4 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2"),
        "2x8", {"actor": "0:0-3", "critic": "0:4-7", "rollout": "1:0-7"}, {"rollout": 4},
    ),
    # Colocate: engines are on the GPUs of both, 4 + 4.
    "a critic of its own, colocated": (
        ("--advantage-estimator ppo --actor-num-gpus-per-node 4 --critic-num-gpus-per-node 4 --colocate "
        "--rollout-num-gpus-per-engine 4"),
        "1x8", {"actor": "0:0-3", "critic": "0:4-7", "rollout": "0:0-7"}, {"rollout": 2},
    ),
    # Nodes of 4: A = 8 on two of them, R = 4 on the third.
    "small nodes": (
        ("--num-gpus-per-node 4 --actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 "
        "--rollout-num-gpus-per-engine 4"),
        "3x4", {"actor": "0:0-3 1:0-3", "rollout": "2:0-3"}, {"rollout": 1},
    ),
    "large nodes": ("--actor-num-gpus-per-node 16 --colocate", "1x16", {"actor": "0:0-15", "rollout": "0:0-15"}, {}),
    # 1 prefill engine of 2, and 3 decode engines of 2 behind it.
    "prefill and decode": (
        "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --prefill-num-servers 1",
        "2x8", {"actor": "0:0-7", "rollout": "1:0-1", "rollout-1": "1:2-7"}, {"rollout": 1, "rollout-1": 3},
    ),
    "train only: engines do not matter": (
        ("--use-critic --debug-train-only --actor-num-gpus-per-node 4 --critic-num-gpus-per-node 2 --rollout-num-gpus 8 "
        "--prefill-num-servers 4"),
        "1x8", {"actor": "0:0-3", "critic": "0:4-5"}, {},
    ),
    "equals signs and underscores": (
        "--actor_num_nodes=1 --actor-num-gpus-per-node=2 --rollout-num-gpus=2", "1x8", {"actor": "0:0-1", "rollout": "0:2-3"}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SLIME)
def test_slime(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, cluster, expected, engines = SLIME[case]
    check(imported("slime", *flags.split(), capsys=capsys), cluster, expected, engines)


def test_engines_of_several_nodes_are_one_engine_each(capsys: pytest.CaptureFixture[str]) -> None:
    result = imported("slime", "--rollout-num-gpus", "32", "--rollout-num-gpus-per-engine", "16", capsys=capsys)
    assert result.engines("rollout") == [gpus("1:0-7 2:0-7"), gpus("3:0-7 4:0-7")]


def test_slime_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--actor-num-nodes 2 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
        "--expert-model-parallel-size 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 8 --sglang-pp-size 2"
    )
    result = imported("slime", *flags.split(), capsys=capsys)
    actor, rollout = result.plan.component("actor"), result.plan.component("rollout")
    assert (actor.tensor_parallel, actor.pipeline_parallel) == (4, 2)
    assert (rollout.tensor_parallel, rollout.pipeline_parallel) == (4, 2), "8 GPUs of an engine / 2 stages"
    assert "context_parallel_size: 2" in result.text


def test_slime_server_groups_of_one_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sglang.yaml").write_text(
        "sglang:\n"
        "- name: actor\n"
        "  server_groups:\n"
        "  - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2}\n"
        "  - {worker_type: placeholder, num_gpus: 4}\n"
        "  - {worker_type: decode, num_gpus: 8, num_gpus_per_engine: 4, overrides: {context_length: 1}}\n"
    )
    result = imported("slime", *["--sglang-config", "sglang.yaml", "--rollout-num-gpus", "16"], capsys=capsys)
    expected = {"actor": "0:0-7", "rollout": "1:0-3", "rollout-1": "1:4-7", "rollout-2": "2:0-7"}
    check(result, "3x8", expected, {"rollout": 2, "rollout-2": 2})
    assert result.plan.component("rollout-1").placeholder
    assert result.plan.component("rollout-2").tensor_parallel == 4


def test_slime_server_groups_of_several_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sglang.yaml").write_text(
        "sglang:\n"
        "- name: actor\n"
        "  update_weights: true\n"
        "  server_groups: [{worker_type: regular, num_gpus: 8, num_gpus_per_engine: 4}]\n"
        "- name: reward\n"
        "  model_path: /m\n"
        "  num_gpus_per_engine: 2\n"
        "  engine_groups: [{worker_type: regular, num_gpus: 4}]\n"
    )
    result = imported("slime", "--sglang-config", "sglang.yaml", capsys=capsys)
    check(result, "3x8", {"actor": "0:0-7", "rollout": "1:0-7", "reward": "2:0-3"}, {"rollout": 2, "reward": 2})
    assert [c.role for c in result.plan.components] == ["actor", "reward", "rollout"]


def test_slime_machines_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "4", "--num-gpus-per-node", "4"]
    check(imported("slime", *flags, cluster="2x4", capsys=capsys), "2x4", {"actor": "0:0-3", "rollout": "1:0-3"}, {})


def test_slime_flags_without_counterpart_are_all_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "python3 train.py --colocate --lr 1e-6 --sglang-mem-fraction-static 0.8 --sglang-dp-size 2 --offload-train "
        "--wandb-key s3cr3t --eval-prompt-data aime /data/aime.jsonl --rope-theta -1 --kl-coef=0.0 --some-new-flag"
    )
    text = imported("slime", *flags.split(), capsys=capsys).text
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    for flag in flags.split()[3:]:
        if flag.startswith("--"):
            assert flag.split("=")[0] in comments, flag
    assert "--eval-prompt-data aime /data/aime.jsonl" in comments
    assert "--rope-theta -1" in comments
    assert "python3 train.py" in comments
    assert "s3cr3t" not in text


@pytest.mark.parametrize(
    ("flags", "code", "fix"),
    [
        ("--debug-train-only --debug-rollout-only --colocate", "U141", "keep one of the two"),
        ("--rollout-external --debug-rollout-only", "U141", "--rollout-num-gpus 8"),
        ("train_async.py --colocate", "U141", "--rollout-num-gpus 8, without --colocate"),
        ("--actor-num-nodes 1", "U141", "--colocate"),
        ("--colocate --num-gpus-per-node 4 --actor-num-gpus-per-node 8", "U141", "--num-gpus-per-node 8"),
        ("--colocate --tensor-model-parallel-size 3", "U141", "9 GPUs"),
        ("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 4 --sglang-tp-size 2", "U141", "leave the engines' own size out"),
        ("--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 --prefill-num-servers 1", "U141", "--prefill-num-servers 0"),
        ("--actor-num-nodes two --colocate", "U140", "an integer"),
        ("--actor-num-gpus-per-node --colocate", "U140", "an integer"),
        ("--actor-num-gpu-per-node 8 --colocate", "U140", "--actor-num-gpus-per-node"),
        ("--sglang-config nowhere.yaml", "C101", "nowhere.yaml"),
        # 6 + 8 GPUs: the first engine of 4 would lie on two nodes.
        ("--actor-num-gpus-per-node 6 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4", "P406", "engines of 2 GPUs"),
        ("--rollout-num-gpus 6 --rollout-num-gpus-per-engine 4", "U141", "--rollout-num-gpus 4"),
    ],
)  # fmt: skip
def test_slime_contradictions(flags: str, code: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = refused("slime", *flags.split(), capsys=capsys)
    assert f"error[{code}]" in printed
    assert fix in printed


def test_all_problems_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    printed = refused(
        "slime",
        *["--actor-num-nodes", "x", "--rollout-num-gpus", "y", "--debug-train-only", "--debug-rollout-only"],
        capsys=capsys,
    )
    assert "3 problems" in printed


# RLinf ------------------------------------------------------------------------------------------

RLINF = {
    "collocated": (
        """
        cluster: {num_nodes: 1, component_placement: {"actor,rollout,reward": all}}
        runner: {task_type: reasoning}
        rollout: {tensor_parallel_size: 2}
        actor: {model: {tensor_model_parallel_size: 4}}
        """,
        "1x8", {"actor": "0:0-7", "rollout": "0:0-7", "reward": "0:0-7"}, {"rollout": 4}, "collocated",
    ),
    # Sixteen GPUs: 8 + 6 + 2; the rollout's 6 make 3 engines of 2.
    "disaggregated": (
        """
        cluster:
          num_nodes: 2
          component_placement: {actor: 0-7, rollout: 8-13, inference: 14-15, reward: all}
        runner: {task_type: reasoning}
        algorithm: {recompute_logprobs: True}
        rollout: {tensor_parallel_size: 2, pipeline_parallel_size: 1}
        inference: {model: {tensor_model_parallel_size: "${actor.model.tensor_model_parallel_size}"}}
        actor: {model: {tensor_model_parallel_size: 2}}
        """,
        "2x8", {"actor": "0:0-7", "rollout": "1:0-5", "inference": "1:6-7", "reward": "0:0-7 1:0-7"}, {"rollout": 3},
        "disaggregated",
    ),
    "embodied: any sets": (
        """
        cluster: {num_nodes: 1, component_placement: {"env": 0-3, "rollout": 4-7, "actor": 0-7}}
        runner: {task_type: embodied}
        """,
        "1x8", {"env": "0:0-3", "rollout": "0:4-7", "actor": "0:0-7"}, {"rollout": 4}, "hybrid",
    ),
    "embodied: one key for all": (
        """
        cluster: {num_nodes: 1, component_placement: {"actor, env, rollout": 0-7}}
        runner: {task_type: embodied}
        """,
        "1x8", {"env": "0:0-7", "rollout": "0:0-7", "actor": "0:0-7"}, {}, "collocated",
    ),
    # The actor may grow over all eight.
    "auto": (
        """
        cluster:
          num_nodes: 1
          auto_scheduler : True
          assign_policy: greedy
          component_placement: {actor: 0-1, rollout: 2-5, inference: 6-7, reward: all}
        runner: {task_type: reasoning}
        algorithm: {recompute_logprobs: true}
        rollout: {tensor_parallel_size: 1}
        actor: {model: {tensor_model_parallel_size: 2}}
        """,
        "1x8", {"actor": "0:0-7", "rollout": "0:2-5", "inference": "0:6-7", "reward": "0:0-7"}, {"rollout": 4}, "auto",
    ),
    # Groups: nodes 0-1 for training, 2-3 for generation, where rank 0 is the first GPU of node 2.
    "node groups": (
        """
        cluster:
          num_nodes: 4
          component_placement:
            actor: {node_group: train, placement: 0-15}
            rollout: {node_group: infer, placement: "0-7:0-3"}
            agent: {node_group: node, placement: "2-3:0-63"}
          node_groups:
            - label: train
              node_ranks: 0-1
              env_configs: [{node_ranks: 0-1, env_vars: [{GLOO_SOCKET_IFNAME: eth0}], python_interpreter_path: null}]
            - {label: infer, node_ranks: 2-3}
        runner: {task_type: embodied}
        """,
        "4x8", {"actor": "0:0-7 1:0-7", "rollout": "2:0-7", "agent": ""}, {"rollout": 4}, "disaggregated",
    ),
    "older: GPUs per node": (
        """
        cluster: {num_nodes: 2, num_gpus_per_node: 4, component_placement: {actor: 0-3, rollout: 4-7}}
        """,
        "2x4", {"actor": "0:0-3", "rollout": "1:0-3"}, {"rollout": 4}, "disaggregated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RLINF)
def test_rlinf(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, cluster, expected, engines, mode = RLINF[case]
    (folder / "config.yaml").write_text(text.replace("\n        ", "\n"))
    result = imported("rlinf", "config.yaml", capsys=capsys)
    check(result, cluster, expected, engines)
    assert result.plan.mode.value == mode


def test_rlinf_strided_engines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainer tp 4, engines tp 2: stride 2, as there."""
    (folder / "config.yaml").write_text(RLINF["collocated"][0].replace("\n        ", "\n"))
    result = imported("rlinf", "config.yaml", capsys=capsys)
    assert result.engines("rollout") == [{0: [0, 2]}, {0: [1, 3]}, {0: [4, 6]}, {0: [5, 7]}]


ROBOTS = """
cluster:
  num_nodes: 3
  component_placement:
    actor,rollout: {node_group: gpu, placement: 0-3}
    env: {node_group: franka, placement: "0-1"}
    agent: {node_group: cpu, placement: "0:0-3"}
  node_groups:
    - {label: gpu, node_ranks: 0}
    - label: franka
      node_ranks: 1
      hardware:
        type: ImportedArm
        configs:
          - {node_rank: 1, robot_ip: 10.0.0.1, serial: "007"}
          - {node_rank: 1, robot_ip: 10.0.0.2, serial: "008"}
    - {label: cpu, node_ranks: 2, ignore_hardware: true, unheard_of: 3}
runner: {task_type: embodied}
"""


def test_rlinf_robots(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "config.yaml").write_text(ROBOTS)
    (folder / "imported_arm.py").write_text(
        "import dataclasses, roost\n"
        "@roost.register_hardware('ImportedArm')\n"
        "@dataclasses.dataclass\n"
        "class ImportedArm:\n    robot_ip: str\n    serial: str\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    code = main(["import", "rlinf", "config.yaml", "--out", "a.yaml"])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    assert "register first, in a module: ImportedArm" in printed.out
    assert "unheard_of 3" in Path("a.yaml").read_text()
    assert main(["import", "rlinf", "config.yaml", "--import", "imported_arm", "--out", "b.yaml"]) == 0
    del sys.modules["imported_arm"]
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].strip() == "roost plan b.yaml --cluster 1x8+2x0 --import imported_arm"
    plan = Result(Path("b.yaml").read_text(), "1x8+2x0").plan
    assert [(p.cluster_node_rank, p.local_hardware_ranks) for p in plan.component("env").placements] == [
        (1, (0,)),
        (1, (1,)),
    ]
    assert [p.cluster_node_rank for p in plan.component("agent").placements] == [2, 2, 2, 2]
    # On nodes that have GPUs, ranks of that group would count these: it is placed by node instead.
    assert main(["import", "rlinf", "config.yaml", "--cluster", "3x8", "--out", "c.yaml"]) == 0
    plan = Result(Path("c.yaml").read_text(), "3x8").plan
    assert [p.cluster_node_rank for p in plan.component("agent").placements] == [2, 2, 2, 2]
    assert plan.component("agent").accelerators == {}


def test_rlinf_keys_without_counterpart_are_all_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.yaml").write_text(
        "defaults: [model/pi0@actor.model, override hydra/job_logging: stdout]\n"
        "cluster: {num_nodes: 1, assign_policy: greedy, component_placement: {actor: 0-7}}\n"
        "data: {type: math, nested: {deep: {key: 1}}, paths: [a, b]}\n"
        "seed: 7\n"
        "actor: {model: {precision: bf16, tensor_model_parallel_size: 2}, optim: {lr: 1.0e-6}}\n"
    )
    text = imported("rlinf", "config.yaml", capsys=capsys).text
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    for key in ("cluster.assign_policy", "type", "nested.deep.key", "paths", "seed", "model.precision", "optim.lr"):
        assert key in comments, key
    assert "model/pi0@actor.model" in comments
    assert "tensor_model_parallel_size" not in comments


def test_rlinf_overrides(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.yaml").write_text("cluster: {num_nodes: 1, component_placement: {actor: 0-7, rollout: 0-7}}\n")
    words = ("config.yaml", "cluster.component_placement.rollout=8-15", "cluster.num_nodes=2", "+data.x=[1,2")
    result = imported("rlinf", *words, capsys=capsys)
    check(result, "2x8", {"actor": "0:0-7", "rollout": "1:0-7"}, {})


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        ("cluster: {num_nodes: 1}", "U141", "component_placement"),
        ("runner: {x: 1}", "U141", "component_placement"),
        ("cluster: {num_nodes: '${oc.env:NO_SUCH_NODES}', component_placement: {actor: 0}}", "U142", "-- cluster.num_nodes=8"),
        ("cluster: {num_nodes: 1, component_placement: {actor: '${nowhere}'}}", "U142", "cannot be resolved here"),
        ("cluster: {num_nodes: x, component_placement: {actor: 0}}", "U140", "integer"),
        ("cluster: {num_nodes: 1, component_placement: {actor: 0-15}}", "P1", "help:"),
        ("cluster: {num_nodes: 1, component_placement: {actor: 0-3,5-7:0-6}}", "P107", "actor: 0-3:0-3,5-7:4-6"),
    ],
)  # fmt: skip
def test_rlinf_contradictions(text: str, code: str, fix: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.yaml").write_text(text.replace("0-3,5-7:0-6", "'0-3,5-7:0-6'"))
    printed = refused("rlinf", "config.yaml", capsys=capsys)
    assert f"error[{code}" in printed
    assert fix in printed


# verl -------------------------------------------------------------------------------------------

VERL = {
    # Nothing said: 1 x 8, engines of 2, and a critic (gae).
    "defaults": (
        "data.train_batch_size=8", "1x8",
        {"actor": "0:0-7", "critic": "0:0-7", "rollout": "0:0-7"}, {"rollout": 4},
    ),
    "grpo on two nodes": (
        ("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nnodes=2 trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.actor.use_kl_loss=True"),
        "2x8", {"actor": "0:0-7 1:0-7", "ref": "0:0-7 1:0-7", "rollout": "0:0-7 1:0-7"}, {"rollout": 4},
    ),
    "grpo without KL": ("algorithm.adv_estimator=grpo", "1x8", {"actor": "0:0-7", "rollout": "0:0-7"}, {"rollout": 4}),
    "KL in the reward, with LoRA": (
        "algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=true actor_rollout_ref.model.lora_rank=16",
        "1x8", {"actor": "0:0-7", "rollout": "0:0-7"}, {},
    ),
    "a critic by name": (
        "algorithm.adv_estimator=grpo critic.enable=true trainer.n_gpus_per_node=4",
        "1x4", {"actor": "0:0-3", "critic": "0:0-3", "rollout": "0:0-3"}, {"rollout": 2},
    ),
    "a reward model beside": (
        "algorithm.adv_estimator=grpo reward_model.enable=true",
        "1x8", {"actor": "0:0-7", "reward": "0:0-7", "rollout": "0:0-7"}, {},
    ),
    # Trainer on nodes 0 and 1, the reward's pool on a node of 2 behind them.
    "a reward pool": (
        ("algorithm.adv_estimator=grpo trainer.nnodes=2 reward_model.enable=true reward_model.enable_resource_pool=true "
        "reward_model.nnodes=1 reward_model.n_gpus_per_node=2"),
        "2x8+1x2", {"actor": "0:0-7 1:0-7", "rollout": "0:0-7 1:0-7", "reward": "2:0-1"}, {"rollout": 8},
    ),
    "a reward pool, in the newer place, with engines": (
        ("algorithm.adv_estimator=grpo reward.reward_model.enable=true reward.reward_model.enable_resource_pool=true "
        "reward.reward_model.nnodes=1 reward.reward_model.n_gpus_per_node=8 "
        "reward.reward_model.rollout.tensor_model_parallel_size=4"),
        "2x8", {"actor": "0:0-7", "rollout": "0:0-7", "reward": "1:0-7"}, {"reward": 2},
    ),
    # One step off: the trainer has 2 GPUs of node 0, engines 6 of another.
    "one step off": (
        ("actor_rollout_ref.hybrid_engine=False algorithm.adv_estimator=grpo trainer.nnodes=1 trainer.n_gpus_per_node=2 "
        "rollout.nnodes=1 rollout.n_gpus_per_node=6"),
        "1x2+1x6", {"actor": "0:0-1", "rollout": "1:0-5"}, {"rollout": 3},
    ),
    # Fully asynchronous: 64 + 64, with a reference on the trainer's.
    "fully asynchronous": (
        ("actor_rollout_ref.hybrid_engine=False algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=true "
        "trainer.nnodes=2 rollout.nnodes=2 rollout.n_gpus_per_node=8 actor_rollout_ref.rollout.tensor_model_parallel_size=8"),
        "4x8", {"actor": "0:0-7 1:0-7", "ref": "0:0-7 1:0-7", "rollout": "2:0-7 3:0-7"}, {"rollout": 2},
    ),
    "separate, said at the engines": (
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=4 "
        "trainer.n_gpus_per_node=4"),
        "2x4", {"actor": "0:0-3", "rollout": "1:0-3"}, {"rollout": 2},
    ),
    # tp 16 on nodes of 8: an engine is a process on each of two nodes.
    "engines of two nodes": (
        "algorithm.adv_estimator=grpo trainer.nnodes=4 actor_rollout_ref.rollout.tensor_model_parallel_size=16",
        "4x8", {"actor": "0:0-7 1:0-7 2:0-7 3:0-7", "rollout": "0:0-7 1:0-7 2:0-7 3:0-7"}, {"rollout": 2},
    ),
    # tp 2 x dp 2 x pp 2 = 8 GPUs of an engine.
    "copies and stages": (
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.data_parallel_size=2 "
        "actor_rollout_ref.rollout.pipeline_model_parallel_size=2"),
        "1x8", {"actor": "0:0-7", "rollout": "0:0-7"}, {"rollout": 1},
    ),
    "transformers generate": (
        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=hf", "1x8", {"actor": "0:0-7", "rollout": "0:0-7"},
        {"rollout": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERL)
def test_verl(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, cluster, expected, engines = VERL[case]
    check(imported("verl", *words.split(), capsys=capsys), cluster, expected, engines)


def test_verl_pools_on_given_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of each of two nodes for the trainer; the reward's pool fits beside it on the first."""
    words = (
        "algorithm.adv_estimator=grpo trainer.nnodes=2 trainer.n_gpus_per_node=4 reward_model.enable=true "
        "reward_model.enable_resource_pool=true reward_model.nnodes=1 reward_model.n_gpus_per_node=4"
    )
    result = imported("verl", *words.split(), cluster="2x8", capsys=capsys)
    check(result, "2x8", {"actor": "0:0-3 1:0-3", "rollout": "0:0-3 1:0-3", "reward": "0:4-7"}, {"rollout": 4})
    assert result.engines("rollout") == [{0: [0, 1]}, {0: [2, 3]}, {1: [0, 1]}, {1: [2, 3]}]


def test_verl_from_a_file_with_references_and_overrides(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ppo.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "trainer: {nnodes: 4, n_gpus_per_node: 8, project_name: x}\n"
        "algorithm: {adv_estimator: gae}\n"
        "critic: {megatron: {tensor_model_parallel_size: 2}}\n"
        "actor_rollout_ref:\n"
        "  actor: {strategy: megatron, megatron: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2}}\n"
        "  rollout:\n"
        "    tensor_model_parallel_size: ${actor_rollout_ref.actor.megatron.tensor_model_parallel_size}\n"
        "    response_length: ${oc.select:data.max_response_length,512}\n"
        "    data_parallel_size: ${oc.select:nowhere.size,1}\n"
    )
    result = imported("verl", "ppo.yaml", "trainer.nnodes=2", capsys=capsys)
    everything = "0:0-7 1:0-7"
    check(result, "2x8", {"actor": everything, "critic": everything, "rollout": everything}, {"rollout": 4})
    sizes = {c.name: (c.tensor_parallel, c.pipeline_parallel) for c in result.plan.components}
    assert sizes == {"actor": (4, 2), "critic": (2, 1), "rollout": (4, 1)}
    assert "ppo_trainer, which were not read" in " ".join(result.text.replace("\n#", " ").split())
    for key in ("project_name", "actor.strategy", "rollout.response_length"):
        assert key in result.text


def test_a_whole_configuration_of_verl(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Hydra prints one: nulls, references and values that must be given, none of which placement depends on."""
    (folder / "whole.yaml").write_text(
        "actor_rollout_ref:\n"
        "  hybrid_engine: true\n"
        "  actor: {strategy: fsdp, use_kl_loss: false, ulysses_sequence_parallel_size: 1, fsdp_config: {param_offload: true}}\n"
        "  ref: {strategy: '${actor_rollout_ref.actor.strategy}'}\n"
        "  rollout: {name: '???', tensor_model_parallel_size: 2, data_parallel_size: 1, nnodes: 0, n_gpus_per_node: 8, 'n': 5,\n"
        "    response_length: '${oc.select:data.max_response_length,512}', engine_kwargs: {vllm: {}, sglang: {}}}\n"
        "  model: {path: ~/models/m, lora_rank: 0}\n"
        "critic: {enable: null, strategy: fsdp}\n"
        "reward_model: {enable: false, enable_resource_pool: false, n_gpus_per_node: 0, nnodes: 0}\n"
        "algorithm: {adv_estimator: grpo, use_kl_in_reward: false}\n"
        "trainer: {nnodes: 1, n_gpus_per_node: 8, device: cuda, logger: [console, wandb]}\n"
        "ray_kwargs: {ray_init: {num_cpus: null}}\n"
    )
    result = imported("verl", "whole.yaml", capsys=capsys)
    check(result, "1x8", {"actor": "0:0-7", "rollout": "0:0-7"}, {"rollout": 4})
    assert "ray_kwargs: ray_init.num_cpus" in result.text
    assert "fsdp_config.param_offload" in result.text


def test_verl_shares_add_up_to_one_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    words = "actor_rollout_ref.actor.use_kl_loss=true reward_model.enable=true"
    plan = imported("verl", *words.split(), capsys=capsys).plan
    assert len(plan.components) == 5
    assert sum(component.gpu_share or 0 for component in plan.components) <= 1


def test_verl_pools_that_nobody_knows_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "algorithm.adv_estimator=grpo distillation.nnodes=2 distillation.n_gpus_per_node=8 trainer.device=npu ~data.x=1"
    )
    text = imported("verl", *words.split(), capsys=capsys).text
    assert "Pools that Roost knows nothing about" in text
    assert "distillation.n_gpus_per_node" in text
    assert "Ascend" in text
    assert "~data.x" in text


@pytest.mark.parametrize(
    ("words", "code", "fix"),
    [
        ("actor_rollout_ref.hybrid_engine=false", "U141", "rollout.nnodes=1 rollout.n_gpus_per_node=8"),
        ("actor_rollout_ref.hybrid_engine=true rollout.nnodes=1", "U141", "rollout.nnodes=0"),
        ("rollout.nnodes=1 actor_rollout_ref.rollout.nnodes=2", "U141", "actor_rollout_ref.rollout.nnodes=1"),
        ("reward_model.enable=true reward_model.enable_resource_pool=true", "U141", "reward_model.nnodes=1"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "U141", "tensor_model_parallel_size=2"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3", "U141", "a pool that is a multiple"),
        ("trainer.nnodes=many", "U140", "integer"),
        ("actor_rollout_ref.hybrid_engine=perhaps", "U140", "true or false"),
        ("trainer.nnodes=${oc.env:NO_SUCH_VARIABLE}", "U142", "trainer.nnodes=8"),
        ("trainer.nnodes=???", "U142", "has no value"),
        ("trainer=3 trainer.nnodes=1", "U140", "nothing under it"),
    ],
)
def test_verl_contradictions(words: str, code: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = refused("verl", *words.split(), capsys=capsys)
    assert f"error[{code}]" in printed
    assert fix in printed


def test_verl_machines_that_are_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    printed = refused("verl", "trainer.nnodes=4", cluster="2x8", capsys=capsys)
    assert "--cluster 4x8" in printed


# The command ------------------------------------------------------------------------------------


def test_without_a_file_it_is_printed_and_can_be_piped(folder: Path) -> None:
    command = [sys.executable, "-m", "roost"]
    done = subprocess.run(
        [*command, "import", "slime", "--", "--colocate"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "job.yaml").write_text(done.stdout)
    done = subprocess.run(
        [*command, "plan", "job.yaml", "--cluster", "1x8"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "line",
    [
        "c.yaml --out x.yaml -- trainer.nnodes=2",
        "--out x.yaml c.yaml -- trainer.nnodes=2",
        "--out x.yaml -- c.yaml trainer.nnodes=2",
    ],
)
def test_options_stand_anywhere_before_the_rest(line: str, folder: Path) -> None:
    (folder / "c.yaml").write_text("trainer: {nnodes: 1}\n")
    assert main(["import", "verl", *line.split()]) == 0
    assert "num_nodes: 2" in (folder / "x.yaml").read_text()


def test_flags_of_the_other_system_stand_behind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["import", "slime", "--colocate"])
    assert caught.value.code == 2
    assert "--colocate is not an option of roost import" in capsys.readouterr().err


def test_nothing_is_overwritten_unless_forced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text("mine")
    assert main(["import", "slime", "--out", "job.yaml", "--", "--colocate"]) == 2
    assert "error[U130]" in capsys.readouterr().err
    assert (folder / "job.yaml").read_text() == "mine"
    assert main(["import", "slime", "--out", "job.yaml", "--force", "--", "--colocate"]) == 0


@pytest.mark.parametrize("system", ["slime", "rlinf", "verl"])
def test_nothing_to_import(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", system]) == 2
    assert "nothing to import" in capsys.readouterr().err


@pytest.mark.parametrize("system", ["rlinf", "verl"])
def test_a_file_that_is_not_there(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", system, "nowhere.yaml"]) == 2
    assert "error[C101]" in capsys.readouterr().err

"""The GRPO example, three steps of each mode: it runs, it stays in bounds, and a seed repeats it."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import roost

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from grpo import loop, task, tiny  # noqa: E402
from grpo.model import make_model  # noqa: E402
from grpo.trainer import checksum  # noqa: E402

STEPS = 3


def job(mode: str = "collocated", **layout: Any) -> dict[str, Any]:
    config = yaml.safe_load((EXAMPLES / "grpo.yaml").read_text())
    config["cluster"]["layout"].update({"mode": mode, **layout})
    config["grpo"].update({"steps": STEPS, "prompts": 8, "samples": 4})
    return config


def learn(cluster: roost.Cluster, config: dict[str, Any]) -> tuple[loop.Record, str]:
    console = Console(file=io.StringIO(), width=200)
    settings = loop.Settings.read(config)
    with roost.launch(config, cluster=cluster) as running:
        record = loop.learn(running, settings, console)
    loop.show(record, settings, console)
    return record, console.file.getvalue()


@pytest.mark.parametrize(
    ("mode", "layout"),
    [("disaggregated", {}), ("disaggregated", {"async_training": True}), ("hybrid", {"rollout_num_gpus": 3})],
    ids=["disaggregated", "async", "hybrid"],
)
def test_three_steps_of_each_mode(cluster: roost.Cluster, mode: str, layout: dict[str, Any]) -> None:
    record, shown = learn(cluster, job(mode, **layout))
    assert len(record.rewards) == STEPS
    assert record.tokens > 0
    allowed = 1 if layout.get("async_training") else 0
    assert all(0 <= step + 1 - version <= allowed for step, version in enumerate(record.versions))
    assert {"generate", "train", "sync"} <= record.seconds.keys()
    assert "step 3/3: reward" in shown
    assert "mean reward" in shown


def test_a_seed_repeats_a_collocated_run(cluster: roost.Cluster) -> None:
    first, _ = learn(cluster, job())
    second, _ = learn(cluster, job())
    assert first.rewards == second.rewards
    assert first.checksum == second.checksum
    assert first.checksum != 0


def test_a_transformers_model_with_tokens_to_spare(cluster: roost.Cluster, tmp_path: Path) -> None:
    """Weights that are not finite would end the run: an engine fails where its logits are not."""
    tiny.write_llama(tmp_path, vocabulary=40)
    config = job("disaggregated")
    config["grpo"]["model"] = str(tmp_path)
    record, shown = learn(cluster, config)
    assert record.versions == [1, 2, 3]
    assert len(record.rewards) == STEPS
    assert record.tokens > 0
    assert f"step {STEPS}/{STEPS}: reward" in shown
    assert record.checksum not in (0, checksum(make_model(str(tmp_path), seed=0)))


def test_each_half_runs_alone(cluster: roost.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(tmp_path / "rollouts")
    for flag in ("debug_rollout_only", "debug_train_only"):
        config = job(**{flag: True})
        config["grpo"]["rollouts"] = saved
        with roost.launch(config, cluster=cluster) as running:
            assert loop.main(running) == 0
    printed = capsys.readouterr().out
    assert f"{STEPS * 8} groups of rollouts are in" in printed
    assert f"learnt from {STEPS} saved batches" in printed


def test_a_goal_that_is_missed_fails_the_run() -> None:
    record, console = loop.Record(rewards=[0.0] * 30 + [0.8] * 10), Console(file=io.StringIO())
    assert loop.verdict(record, loop.Settings(goal=0.9), console) == 1
    assert loop.verdict(record, loop.Settings(goal=0.7), console) == 0
    assert loop.verdict(record, loop.Settings(), console) == 0


def test_a_setting_that_means_nothing_is_named() -> None:
    config = job()
    config["grpo"]["stpes"] = 3
    with pytest.raises(SystemExit, match=r"grpo\.stpes means nothing; known are steps"):
        loop.Settings.read(config)


def test_the_rule_of_the_reward() -> None:
    prompt = task.prompts_for(0, 0, 1)[0]
    assert task.reward(prompt, [prompt.answer, task.STOP]) == 1.0
    assert task.reward(prompt, [prompt.answer]) == 0.0

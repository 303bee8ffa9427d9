"""A miniature of an RL step: agents ask, engines answer, a reward judges, the actor learns.

Nothing is learnt here but where everything runs: each worker says what it got.
"""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

import roost
from roost.worker import PerRank


class Placed(roost.Worker):
    """A worker that can say where it is."""

    def where(self) -> str:
        """Node, process, and what the environment shows of accelerators."""
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return f"node {self.cluster_node_rank}, process {os.getpid()}, sees GPUs {devices or 'none'}, master {address}"


class Agent(Placed):
    """Makes prompts."""

    def ask(self, count: int) -> list[int]:
        """Numbers that only this agent asks about."""
        return [self.rank * count + i for i in range(count)]


class Rollout(Placed):
    """Answers prompts with the weights that it was last given."""

    def __init__(self) -> None:
        self.weight = 0

    def load(self, weight: int) -> None:
        """Takes new weights."""
        self.weight = weight

    def answer(self, prompts: list[int]) -> list[int]:
        """An answer per prompt."""
        return [prompt * self.weight for prompt in prompts]


class Reward(Placed):
    """Judges answers: right is three times the prompt."""

    def judge(self, prompts: list[int], answers: list[int]) -> float:
        """The share of right answers."""
        right = sum(answer == 3 * prompt for prompt, answer in zip(prompts, answers, strict=True))
        return right / len(prompts)


class Actor(Placed):
    """Holds the weights, and changes them where the reward is not what it could be."""

    def __init__(self) -> None:
        self.weight = 0

    def learn(self, reward: float) -> int:
        """Takes a step; returns the new weights."""
        self.weight += 1 if reward < 1.0 else 0
        return self.weight


def main(cluster: roost.Cluster, plan: roost.Plan) -> int:
    """Five steps; then what each worker got."""
    groups: dict[str, Any] = {component.name: cluster.get_group(component.name) for component in plan.components}
    reward = 0.0
    for step in range(5):
        weight = groups["actor"].learn(reward).wait()[0]
        groups["rollout"].load(weight).wait()
        prompts = groups["agent"].ask(4).wait()
        answers = groups["rollout"].answer(PerRank(prompts)).wait()
        every_prompt, every_answer = list(chain(*prompts)), list(chain(*answers))
        reward = groups["reward"].judge(every_prompt, every_answer).wait()[0]
        print(f"step {step}: weight {weight}, reward {reward:.2f}")
    print()
    for name, group in groups.items():
        for rank, text in enumerate(group.where().wait()):
            print(f"{name}[{rank}]: {text}")
    return 0 if reward == 1.0 else 1

"""Resolving and checking a plan costs steps and memory in proportion to its processes, whatever they share."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import roost

SMALL, FACTOR = 256, 4
"""Quadratic growth would multiply the cost by 16; linear growth multiplies it by 4."""


def processes_on_one_accelerator(count: int) -> tuple[Mapping[str, Any], str]:
    return {"actor": f"0:0-{count - 1}"}, "1x1"


def components_on_one_accelerator(count: int) -> tuple[Mapping[str, Any], str]:
    return {f"c{i}": "0" for i in range(count)}, "1x1"


def a_critic_per_accelerator(count: int) -> tuple[Mapping[str, Any], str]:
    return {f"c{i}": {"placement": str(i), "role": "critic"} for i in range(count)}, f"{count // 4}x4"


def a_rollout_per_two_accelerators(count: int) -> tuple[Mapping[str, Any], str]:
    engines = {f"c{i}": {"placement": f"{2 * i}-{2 * i + 1}:0", "role": "rollout"} for i in range(count)}
    return {"actor": "all", **engines}, f"{count // 2}x4"


def an_agent_per_node(count: int) -> tuple[Mapping[str, Any], str]:
    return {f"c{i}": {"node_group": "node", "placement": str(i)} for i in range(count)}, f"{count}x1"


SHAPES = (
    processes_on_one_accelerator,
    components_on_one_accelerator,
    a_critic_per_accelerator,
    a_rollout_per_two_accelerators,
    an_agent_per_node,
)
Shape = Callable[[int], tuple[Mapping[str, Any], str]]


def planning(shape: Shape, count: int) -> Callable[[], list[roost.Finding]]:
    placements, nodes = shape(count)
    topology = roost.Topology.parse(nodes)
    return lambda: roost.Plan.resolve({"cluster": {"component_placement": placements}}, topology).check()


def steps_of(run: Callable[[], object]) -> int:
    """Return the number of Python lines and calls that a function executes."""
    steps = 0

    def trace(*_: object) -> Any:
        nonlocal steps
        steps += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return steps


def peak_of(run: Callable[[], object]) -> int:
    """Return the most bytes that a function has allocated at a time."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_steps_grow_linearly(shape):
    planning(shape, SMALL)()  # imports and caches are not counted
    small, large = (steps_of(planning(shape, count)) for count in (SMALL, FACTOR * SMALL))
    assert large < 1.5 * FACTOR * small


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_memory_grows_linearly(shape):
    planning(shape, SMALL)()
    small, large = (peak_of(planning(shape, count)) for count in (4 * SMALL, 4 * FACTOR * SMALL))
    assert large < 1.5 * FACTOR * small


def test_who_is_on_a_crowded_accelerator():
    jobs = {"actor": "0:0-2,1:3", "b": "0-1", "c": "0:0-1"}
    plan = roost.Plan.resolve({"cluster": {"component_placement": jobs}}, roost.Topology.parse("1x3"))
    first, second, nobody = plan.occupancy.of_node(0)
    assert plan.occupancy.members(first) == {0: 3, 1: 1, 2: 2}
    assert plan.occupancy.members(second) == {0: 1, 1: 1}
    assert plan.occupancy.members(nobody) == {}
    assert [f.message for f in plan.check() if f.code == "N111"] == [
        "actor: several of its ranks share one GPU (node 0 GPU 0), which NCCL refuses"
    ]

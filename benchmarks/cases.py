"""What is measured: each case sets itself up for a number of accelerators, and is then run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import roost

PER_NODE = 8
AGENTS_PER_NODE = 4

Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        name: What the table calls it.
        prepare: Number of accelerators → the function to be timed; what it does is not timed.
        processes: Number of accelerators → processes placed, which are the floor's tuples.
        max_growth: The exponent expected at most; ``None``: nothing is expected.
        max_ratio: Expected at most so many times the floor; ``None``: nothing is expected.
        max_seconds: Expected at most, for the largest size of the default run.
        max_gib: The same for memory.
    """

    name: str
    prepare: Callable[[int], Run]
    processes: Callable[[int], int]
    max_growth: float | None = 1.1
    max_ratio: float | None = None
    max_seconds: float | None = None
    max_gib: float | None = None


def floor(count: int) -> Run:
    """A bare loop that builds an 11-tuple per process, of the numbers that a placement has."""

    def run() -> object:
        kind, size, isolate, label = "NVIDIA", PER_NODE, True, "cluster"
        visible, hardware = ("0",), (0,)
        rows = []
        for rank in range(count):
            node, local = divmod(rank, PER_NODE)
            rows.append((rank, node, node, local, kind, local, size, visible, isolate, hardware, label))
        return rows

    return run


def topology_of(accelerators: int) -> roost.Topology:
    return roost.Topology.parse(f"{accelerators // PER_NODE}x{PER_NODE}")


def one_range(accelerators: int) -> str:
    return f"0-{accelerators - 1}"


def one_segment_per_node(accelerators: int) -> str:
    """``0-7:0-7,8-15:8-15,…``: the longest text that people's scripts write."""
    ranges = (f"{first}-{first + PER_NODE - 1}" for first in range(0, accelerators, PER_NODE))
    return ",".join(f"{text}:{text}" for text in ranges)


def full_job(accelerators: int) -> Mapping[str, Any]:
    """A whole job: trainer, engines of 8, inference, reward, and agents on the nodes."""
    nodes = accelerators // PER_NODE
    everything = one_range(accelerators)
    return {
        "cluster": {
            "component_placement": {
                "actor": everything,
                "rollout": f"{everything}:0-{nodes - 1}",
                "inference": everything,
                "reward": everything,
                "agent": {"node_group": "node", "placement": f"0-{nodes - 1}:0-{nodes * AGENTS_PER_NODE - 1}"},
            }
        },
        "rollout": {"tensor_parallel_size": PER_NODE},
    }


def full_job_processes(accelerators: int) -> int:
    nodes = accelerators // PER_NODE
    return 3 * accelerators + nodes + AGENTS_PER_NODE * nodes


def _packed(accelerators: int) -> Run:
    topology = topology_of(accelerators)
    return lambda: roost.PackedPlacementStrategy(0, accelerators - 1).get_placement(topology)


def _strided(accelerators: int) -> Run:
    topology = topology_of(accelerators)
    return lambda: roost.PackedPlacementStrategy(0, accelerators - 1, 2, stride=4).get_placement(topology)


def _flexible(accelerators: int) -> Run:
    topology = topology_of(accelerators)
    lists = [[rank] for rank in range(accelerators)]
    return lambda: roost.FlexiblePlacementStrategy(lists).get_placement(topology)


def _node(accelerators: int) -> Run:
    topology = topology_of(accelerators)
    ranks = [rank // PER_NODE for rank in range(accelerators)]
    return lambda: roost.NodePlacementStrategy(ranks).get_placement(topology)


def _components(text: Callable[[int], str]) -> Callable[[int], Run]:
    def prepare(accelerators: int) -> Run:
        topology = topology_of(accelerators)
        config = {"cluster": {"component_placement": {"actor": text(accelerators)}}}
        return lambda: roost.ComponentPlacement(config, topology)

    return prepare


def _plan(accelerators: int) -> Run:
    topology, job = topology_of(accelerators), full_job(accelerators)

    def run() -> object:
        plan = roost.Plan.resolve(job, topology)
        return plan, plan.check()

    return run


def _plan_of(placements: Callable[[int], dict[str, str]], topology_text: Callable[[int], str]) -> Callable[[int], Run]:
    """A whole job of ``count`` processes, resolved and checked."""

    def prepare(count: int) -> Run:
        topology = roost.Topology.parse(topology_text(count))
        job = {"cluster": {"component_placement": placements(count)}}

        def run() -> object:
            plan = roost.Plan.resolve(job, topology)
            return plan, plan.check()

        return run

    return prepare


_processes_on_one = _plan_of(lambda count: {"actor": f"0:0-{count - 1}"}, lambda _: "1x1")
_components_on_one = _plan_of(lambda count: {f"c{i}": "0" for i in range(count)}, lambda _: "1x1")
_component_each = _plan_of(
    lambda count: {f"c{i}": str(i) for i in range(count)}, lambda count: f"{count // PER_NODE}x{PER_NODE}"
)

CASES = {
    "floor": Case("the floor itself", floor, lambda n: n, max_growth=None),
    "packed": Case("packed", _packed, lambda n: n, max_ratio=10.0),
    "strided": Case("packed, 2 each, stride 4", _strided, lambda n: n // 2, max_ratio=10.0),
    "flexible": Case("flexible", _flexible, lambda n: n, max_ratio=10.0),
    "node": Case("node", _node, lambda n: n, max_ratio=10.0),
    "one-range": Case("components: one range", _components(one_range), lambda n: n),
    "per-node": Case("components: a segment per node", _components(one_segment_per_node), lambda n: n),
    "plan": Case("whole job: Plan.resolve + check", _plan, full_job_processes, max_seconds=5.0, max_gib=1.0),
    "one-gpu": Case("plan + check: processes on one GPU", _processes_on_one, lambda n: n, max_gib=1.0),
    "one-gpu-components": Case(
        "plan + check: components on one GPU", _components_on_one, lambda n: n, 1.2, max_gib=1.0
    ),
    "component-each": Case("plan + check: a component per GPU", _component_each, lambda n: n, 1.2, max_gib=1.0),
}

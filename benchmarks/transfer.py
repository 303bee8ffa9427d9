"""A weight transfer of a large job: 1,024 trainer ranks to 1,024 ranks of engines."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases import PER_NODE
from benchmarks.measure import best_time_s
from roost import Sharding, TensorShards, TransferPlan, plan_transfer

NAME = "transfer plan tp8·pp8·dp16 → tp4·dp256, 1,000 tensors"
TENSORS = 1000
MAX_S = 2.0


@dataclass(frozen=True)
class Row:
    """What was measured: time of planning, and of asking for one rank; and what the plan holds."""

    name: str
    plan_s: float
    rank_s: float
    pieces: int
    routes: int
    moves: int

    @property
    def is_met(self) -> bool:
        return self.plan_s < MAX_S


def measure_transfer() -> Row:
    source, target = sides()
    plan = plan_transfer(source, target)
    return Row(
        NAME,
        best_time_s(lambda: plan_transfer(source, target)),
        best_time_s(lambda: plan.for_target(target.world_size - 1)),
        len(plan.parts),
        sum(len(routes) for routes in {id(part.routes): part.routes for part in plan.parts}.values()),
        _moves(plan),
    )


def sides() -> tuple[Sharding, Sharding]:
    """Both on 128 nodes of eight: a trainer in Megatron's order, engines of four GPUs."""
    everywhere = tuple((rank // PER_NODE, rank % PER_NODE) for rank in range(1024))
    source = Sharding(_tensors(8), tp=8, pp=8, dp=16, locations=everywhere)
    target = Sharding(_tensors(1), tp=4, dp=256, order="tp-pp-dp", locations=everywhere)
    return source, target


def _tensors(stages: int) -> tuple[TensorShards, ...]:
    """Of four tensors one is replicated, two are cut in rows and one in columns."""
    return tuple(
        TensorShards(f"layers.{i}", (8192, 8192), "bfloat16", (None, 0, 1, 0)[i % 4], (), i * stages // TENSORS)
        for i in range(TENSORS)
    )


def _moves(plan: TransferPlan) -> int:
    """How many parts go between two ranks, all told."""
    return sum(len(route) for part in plan.parts for route in part.routes)

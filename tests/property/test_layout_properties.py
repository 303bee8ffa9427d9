"""Layouts: for any numbers, either a refusal or shares that add up, in the stable order."""

from __future__ import annotations

from collections import Counter
from typing import Any

from generators import nodes, only_roost_errors
from hypothesis import event, given
from hypothesis import strategies as st

import roost
from roost import Node, Plan, Topology

SIZES = st.sampled_from([1, 1, 2, 2, 3, 4, 8])
SHARES = st.sampled_from([None, None, None, 0.1, 0.2, 0.5, 1.0])


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """The numbers of a job; most of them can be had on a few nodes."""
    layout: dict[str, Any] = {
        "actor_num_nodes": draw(st.integers(0, 3)),
        "actor_num_gpus_per_node": draw(st.sampled_from([1, 2, 4, 8])),
        "rollout_num_gpus": draw(st.sampled_from([0, 1, 2, 4, 6, 8, 16])),
        "rollout_num_gpus_per_engine": draw(SIZES),
        "mode": draw(st.sampled_from(["collocated", "disaggregated", "hybrid"])),
    }
    for switch in ("use_critic", "debug_train_only", "debug_rollout_only", "external_engines"):
        layout[switch] = draw(st.integers(0, 5)) == 0
    for share in ("num_gpus_per_actor", "num_gpus_per_critic", "num_gpus_per_rollout_engine"):
        layout[share] = draw(SHARES)
    if draw(st.integers(0, 3)) == 0:
        group = st.fixed_dictionaries({"num_gpus": SIZES, "num_gpus_per_engine": SIZES, "placeholder": st.booleans()})
        layout["rollout_groups"] = draw(st.lists(group, max_size=3))
        layout["rollout_num_gpus"] = 0
    return layout


def order_of(topology: Topology) -> list[tuple[int, int]]:
    """All accelerators in the stable order."""
    return [(node.rank, local) for node in topology.nodes for local in range(node.num_accelerators)]


def own(placement: roost.Placement) -> list[tuple[int, int]]:
    return [(placement.cluster_node_rank, local) for local in placement.accelerators]


@given(nodes(), layouts())
def test_a_layout_is_refused_or_adds_up(made: tuple[Node, ...], layout: dict[str, Any]) -> None:
    topology = Topology(made)
    found = only_roost_errors(lambda: Plan.resolve({"cluster": {"layout": layout}}, topology))
    if isinstance(found, roost.RoostError):
        event("refused: " + ", ".join(sorted(set(found.codes))))
        return
    event("resolved")
    order = order_of(topology)
    actors = layout["actor_num_nodes"] * layout["actor_num_gpus_per_node"]
    taken: Counter[tuple[int, int]] = Counter()
    engines: Counter[tuple[int, int]] = Counter()
    for component in found.components:
        places = [own(placement) for placement in component.placements]
        if component.role in ("actor", "critic"):
            assert places == [[at] for at in order[:actors]]
        for at in (at for process in places for at in process):
            taken[at] += round(1000 * (component.gpu_share or 0.0))
            engines[at] += component.role == "rollout"
    assert max(engines.values(), default=0) <= 1
    assert max(taken.values()) <= 1000
    assert not any(finding.is_problem for finding in found.check())
    assert Plan.from_json(found.to_json()) == found


@given(nodes(), layouts())
def test_every_engine_is_on_one_node_or_on_whole_ones(made: tuple[Node, ...], layout: dict[str, Any]) -> None:
    topology = Topology(made)
    found = only_roost_errors(lambda: Plan.resolve({"cluster": {"layout": layout}}, topology))
    if isinstance(found, roost.RoostError):
        return
    for component in found.components:
        if component.role != "rollout":
            continue
        for engine in component.engines:
            assert len(engine) == component.processes_per_engine
            assert len({placement.cluster_node_rank for placement in engine}) == len(engine)
            if len(engine) > 1:
                for placement in engine:
                    node = topology.nodes[placement.cluster_node_rank]
                    assert len(placement.accelerators) == node.num_accelerators


@given(layouts(), st.integers(1, 8))
def test_positions_are_those_of_the_table(layout: dict[str, Any], per_node: int) -> None:
    numbers = {key: value for key, value in layout.items() if key not in ("mode", "rollout_groups")}
    colocate = layout["mode"] != "disaggregated"
    found = only_roost_errors(lambda: roost.resolve_layout(**numbers, colocate=colocate, num_gpus_per_node=per_node))
    if isinstance(found, roost.RoostError):
        return
    assert max(found.actor.stop, found.rollout.stop, found.critic.stop) <= found.num_accelerators
    assert found.actor.start == found.critic.start == 0
    at = found.rollout.start
    for engine in found.engines:
        assert engine.positions.start == at
        at = engine.positions.stop
        first, last = engine.positions[0] // per_node, engine.positions[-1] // per_node
        assert last - first + 1 == engine.members
    assert at == found.rollout.stop

"""Strategies, over uneven machines and node groups in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import reference_model as reference
from generators import ABSURD, labels_of, only_roost_errors, topologies
from hypothesis import event, given
from hypothesis import strategies as st

import roost
from roost import Placement, Topology


def fields_of(placements: list[Placement]) -> list[dict[str, Any]]:
    """Placements as the reference model writes them."""
    rows = []
    for placement in placements:
        row = {name: getattr(placement, name) for name in Placement.__slots__}
        row["visible_accelerators"] = list(row["visible_accelerators"])
        row["local_hardware_ranks"] = list(row["local_hardware_ranks"])
        rows.append(row)
    return rows


def assert_consistent(placements: list[Placement], topology: Topology) -> None:
    """What must hold of any placement, whatever made it."""
    assert [p.rank for p in placements] == list(range(len(placements)))
    by_node: dict[int, list[Placement]] = {}
    for placement in placements:
        by_node.setdefault(placement.cluster_node_rank, []).append(placement)
    for node_rank, here in by_node.items():
        node = topology.nodes[node_rank]
        assert [p.local_rank for p in here] == list(range(len(here)))
        assert {p.local_world_size for p in here} == {len(here)}
        assert len({p.placement_node_rank for p in here}) == 1
        assert {p.accelerator_type for p in here} == {node.accelerator_type}
        for p in here:
            assert all(isinstance(name, str) for name in p.visible_accelerators)
            assert set(p.visible_accelerators) <= set(node.accelerator_ids)
            assert all(isinstance(local, int) for local in p.local_hardware_ranks)
            assert list(p.local_hardware_ranks) == sorted(set(p.local_hardware_ranks))
            assert set(p.accelerators) <= set(range(len(node.accelerator_ids)))
            assert node_rank in topology.group(p.node_group_label).node_ranks
    assert sorted({p.placement_node_rank for p in placements}) == list(range(len(by_node)))
    assert [p.node_id for p in placements] == [p.cluster_node_rank for p in placements]
    assert asdict(placements[0])["rank"] == 0


def compare(expected: Any, found: Any, topology: Topology) -> None:
    """The reference model's rows and Roost's placements, or a refusal by both."""
    try:
        rows = expected()
    except reference.RefusedError:
        rows = None
    result = only_roost_errors(found)
    event("refused" if rows is None else "placed")
    if rows is None:
        assert isinstance(result, roost.PlacementError)
        return
    if isinstance(result, roost.RoostError):
        raise result
    assert fields_of(result) == rows
    assert_consistent(result, topology)


@given(topologies(), st.data())
def test_packed(topology: Topology, data: st.DataObject) -> None:
    labels = data.draw(labels_of(topology))
    total = len(reference.resources_of(topology, labels))
    per_process, stride = data.draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 1)]))
    start = data.draw(st.integers(0, max(0, total - 1)))
    blocks = data.draw(st.integers(1, max(1, (total - start) // (per_process * stride))))
    end = start + blocks * per_process * stride - 1 + data.draw(st.sampled_from([0, 0, 0, 0, 1]))
    isolate = data.draw(st.booleans())
    compare(
        lambda: reference.packed(topology, labels, start, end, per_process, stride, isolate),
        lambda: roost.PackedPlacementStrategy(start, end, per_process, stride, labels or None).get_placement(
            topology, isolate_accelerator=isolate
        ),
        topology,
    )


@given(st.integers(1, 5), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2), (1, 8)]), st.data())
def test_packed_uses_every_accelerator_of_its_range_once(
    nodes: int, shape: tuple[int, int], data: st.DataObject
) -> None:
    per_process, stride = shape
    block = per_process * stride
    topology = Topology.parse(f"{nodes}x8")
    first = data.draw(st.integers(0, nodes * 8 // block - 1))
    last = data.draw(st.integers(first, nodes * 8 // block - 1))
    start, end = first * block, (last + 1) * block - 1
    placements = roost.PackedPlacementStrategy(start, end, per_process, stride).get_placement(topology)
    used = Counter(8 * p.cluster_node_rank + local for p in placements for local in p.accelerators)
    assert used == Counter(range(start, end + 1))
    assert len(placements) == (end - start + 1) // per_process
    assert all(len(p.accelerators) == per_process for p in placements)
    steps = {b - a for p in placements for a, b in zip(p.accelerators, p.accelerators[1:], strict=False)}
    assert steps <= {stride}
    assert_consistent(placements, topology)


@given(topologies(), st.data())
def test_flexible(topology: Topology, data: st.DataObject) -> None:
    labels = data.draw(labels_of(topology))
    resources = reference.resources_of(topology, labels)
    by_node: dict[Any, list[int]] = {}
    for rank, resource in enumerate(resources):
        by_node.setdefault((resource.node, resource.kind), []).append(rank)
    on_one_node = [st.lists(st.sampled_from(ranks), min_size=1, max_size=4, unique=True) for ranks in by_node.values()]
    anywhere = st.lists(st.integers(0, len(resources)), max_size=3)
    lists = data.draw(st.lists(st.one_of(on_one_node), max_size=8)) if on_one_node else []
    lists += data.draw(st.sampled_from([[], [], [], []]) | st.lists(anywhere, max_size=1))
    before = [list(ranks) for ranks in lists]
    isolate = data.draw(st.booleans())
    compare(
        lambda: reference.flexible(topology, labels, lists, isolate),
        lambda: roost.FlexiblePlacementStrategy(lists, labels or None).get_placement(topology, isolate),
        topology,
    )
    assert lists == before, "the caller's lists are left alone"


@given(topologies(), st.data())
def test_node(topology: Topology, data: st.DataObject) -> None:
    labels = data.draw(labels_of(topology))
    total = len(reference.resources_of(topology, labels, as_nodes=True))
    extra = data.draw(st.sampled_from([[], [], [], [], [], [total]]))
    ranks = data.draw(st.lists(st.integers(0, total - 1), max_size=12).map(lambda ranks: ranks + extra))
    before = list(ranks)
    isolate = data.draw(st.booleans())
    compare(
        lambda: reference.node(topology, labels, ranks, isolate),
        lambda: roost.NodePlacementStrategy(ranks, labels or None).get_placement(topology, isolate),
        topology,
    )
    assert ranks == before, "the caller's list is left alone"


NUMBERS = st.one_of(
    st.integers(-3, 40), st.integers(), st.booleans(), st.none(), st.floats(), st.text(max_size=3),
    ABSURD,
)  # fmt: skip


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_packed_takes_no_nonsense(start: Any, end: Any, per_process: Any, stride: Any) -> None:
    topology = Topology.parse("2x8+1x3")
    only_roost_errors(lambda: roost.PackedPlacementStrategy(start, end, per_process, stride).get_placement(topology))


@given(st.one_of(NUMBERS, st.lists(st.one_of(NUMBERS, st.lists(NUMBERS, max_size=3)), max_size=4)))
def test_flexible_and_node_take_no_nonsense(given: Any) -> None:
    topology = Topology.parse("2x8+1x3")
    only_roost_errors(lambda: roost.FlexiblePlacementStrategy(given).get_placement(topology))
    only_roost_errors(lambda: roost.NodePlacementStrategy(given).get_placement(topology))

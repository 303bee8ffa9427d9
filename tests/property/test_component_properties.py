"""``ComponentPlacement`` against the reference model, on made-up machines and texts."""

from __future__ import annotations

from typing import Any

import pytest
import reference_model as reference
from generators import SLIPS, labels_of, mutated, only_roost_errors, placement_texts, topologies
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_strategy_properties import assert_consistent, fields_of

import roost
from roost import NodeGroup, Topology


def groups_as_config(groups: tuple[NodeGroup, ...]) -> list[dict[str, Any]]:
    """Groups as a job file writes them."""
    entries = []
    for group in groups:
        entry: dict[str, Any] = {"label": group.label, "node_ranks": list(group.node_ranks)}
        if group.hardware_type:
            configs = [{"node_rank": rank, **item.fields} for rank, item in group.hardware]
            entry["hardware"] = {"type": group.hardware_type, "configs": configs}
        entries.append(entry)
    return entries


def place(text: Any, labels: list[str], topology: Topology, as_list: bool = True) -> roost.ComponentPlacement:
    """One component on bare machines; the groups come from the job."""
    component: Any = {"placement": text, "node_group": labels if as_list else ",".join(labels)} if labels else text
    cluster = {"component_placement": {"actor": component}, "node_groups": groups_as_config(topology.groups)}
    return roost.ComponentPlacement({"cluster": cluster}, Topology(topology.nodes))


@settings(max_examples=300)
@given(topologies(), st.data())
def test_components_go_where_the_specification_says(topology: Topology, data: st.DataObject) -> None:
    labels = data.draw(labels_of(topology), "labels")
    total = len(reference.resources_of(topology, labels))
    text = data.draw(mutated(placement_texts(total), SLIPS, most=1), "text")
    isolate = data.draw(st.booleans(), "isolate")
    as_list = data.draw(st.booleans(), "as_list")
    rows: list[dict] | None
    try:
        rows = reference.component(topology, labels, text, isolate)
    except reference.RefusedError:
        rows = None
    except reference.UnspecifiedError:
        event("unspecified")
        rows = []
    found = only_roost_errors(lambda: place(text, labels, topology, as_list))
    if rows is None:
        event("refused")
        assert isinstance(found, roost.PlacementError), text
        return
    if isinstance(found, roost.RoostError):
        assert not rows, str(found)
        return
    placements = found.get_strategy("actor").get_placement(topology, isolate)
    assert_consistent(placements, topology)
    assert found.get_world_size("actor") == len(placements)
    if rows:
        event("placed")
        assert fields_of(placements) == rows
        nodes = {(p.cluster_node_rank, local) for p in placements for local in p.local_hardware_ranks}
        ranks = found.get_hardware_ranks("actor")
        assert ranks == sorted(set(ranks))
        if nodes:
            on_hardware = [r for r in reference.resources_of(topology, labels) if r.kind != "node"]
            assert len(nodes) <= len(ranks) <= total >= len(on_hardware)


@given(topologies(), st.data())
def test_a_strategy_of_a_job_knows_its_groups_on_bare_machines(topology: Topology, data: st.DataObject) -> None:
    labels = data.draw(labels_of(topology))
    if not reference.resources_of(topology, labels):
        return
    strategy = place("all", labels, topology).get_strategy("actor") if _is_plain(topology, labels) else None
    if strategy is not None:
        assert strategy.get_placement(Topology(topology.nodes)) == strategy.get_placement(topology)


def _is_plain(topology: Topology, labels: list[str]) -> bool:
    return len({resource.kind for resource in reference.resources_of(topology, labels)}) == 1


@pytest.mark.parametrize(
    ("text", "processes"),
    [("0-1:0-2", [2, 1, 0]), ("0-1:0-200", [101, 100, 0]), ("0:0-3,1:4", [4, 1, 0]), ("0-1:0-2,2-9", [2, 1, 8])],
)
def test_bare_nodes_beside_accelerators_take_uneven_counts(text: str, processes: list[int]) -> None:
    """On nodes, processes are spread as evenly as possible; also where another group has accelerators."""
    topology = Topology(Topology.parse("2x0+1x8").nodes, (NodeGroup("cpu", (0, 1)), NodeGroup("gpu", (2,))))
    placed = place(text, ["cpu", "gpu"], topology)
    placements = placed.get_strategy("actor").get_placement(topology)
    assert placed.get_world_size("actor") == sum(processes)
    assert [sum(p.cluster_node_rank == rank for p in placements) for rank in range(3)] == processes


def test_a_segment_of_nodes_and_accelerators_is_judged_alike_however_many_nodes_it_has() -> None:
    """One bare node before the accelerators, or two: refused both times, or placed both times."""
    outcomes = []
    for bare in (1, 2, 3):
        nodes = Topology.parse(f"{bare}x0+1x8").nodes
        groups = (NodeGroup("cpu", tuple(range(bare))), NodeGroup("gpu", (bare,)))
        found = only_roost_errors(lambda n=nodes, g=groups, b=bare: place(f"0-{b + 7}", ["cpu", "gpu"], Topology(n, g)))
        outcomes.append(found.codes if isinstance(found, roost.RoostError) else ())
    assert len(set(outcomes)) == 1, outcomes


def test_an_anchor_shares_a_text_not_its_meaning(tmp_path: Any) -> None:
    """``all`` of a group and ``all`` of the cluster are different, also where one is an alias of the other."""
    groups = "node_groups: [{label: a800, node_ranks: 0}]"
    alias = "rollout: {node_group: a800, placement: &p all}, actor: *p"
    spelt = "rollout: {node_group: a800, placement: all}, actor: all"
    sizes = []
    for text in (alias, spelt):
        path = tmp_path / "job.yaml"
        path.write_text(f"cluster: {{component_placement: {{{text}}}, {groups}}}\n")
        placed = roost.ComponentPlacement(roost.load_config(path), Topology.parse("2x8"))
        sizes.append({name: placed.get_world_size(name) for name in placed.components})
    assert sizes[0] == sizes[1] == {"rollout": 8, "actor": 16}

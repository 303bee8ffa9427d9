"""Plans and topologies: the same for the same input, and the same after a round trip."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

from generators import jobs, only_roost_errors, shuffled, topologies
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_component_properties import groups_as_config
from test_strategy_properties import assert_consistent

import roost
from roost import Hardware, Node, NodeGroup, Plan, Topology


def resolve(job: dict[str, Any], topology: Topology) -> Plan | None:
    """The plan, or ``None`` where the job is refused."""
    found = only_roost_errors(lambda: Plan.resolve(job, topology))
    event("refused" if isinstance(found, roost.RoostError) else "resolved")
    return None if isinstance(found, roost.RoostError) else found


def codes(job: dict[str, Any], topology: Topology) -> list[str]:
    found = only_roost_errors(lambda: Plan.resolve(job, topology))
    return sorted(found.codes) if isinstance(found, roost.RoostError) else []


@given(topologies(), st.data())
def test_the_order_of_keys_does_not_matter(topology: Topology, data: st.DataObject) -> None:
    job = data.draw(jobs(topology))
    job["cluster"]["node_groups"] = groups_as_config(topology.groups)
    other = data.draw(shuffled(job))
    bare = Topology(topology.nodes)
    plan = resolve(job, bare)
    if plan is None:
        assert codes(other, bare) == codes(job, bare)
        return
    again = Plan.resolve(other, bare)
    assert again.to_json() == plan.to_json()
    assert again == plan
    assert [str(finding) for finding in again.check()] == [str(finding) for finding in plan.check()]


def test_the_order_of_a_robots_fields_does_not_matter() -> None:
    """Fields of other hardware are keys of a mapping too."""

    def job(fields: dict[str, Any]) -> dict[str, Any]:
        group = {"label": "arms", "node_ranks": 0, "hardware": {"type": "Arm", "configs": [fields]}}
        return {
            "cluster": {"component_placement": {"env": {"node_group": "arms", "placement": 0}}, "node_groups": [group]}
        }

    one = Plan.resolve(job({"node_rank": 0, "ip": "10.0.0.9", "camera": "c"}), Topology.parse("1x0"))
    two = Plan.resolve(job({"camera": "c", "ip": "10.0.0.9", "node_rank": 0}), Topology.parse("1x0"))
    assert one == two
    assert one.to_json() == two.to_json()


def test_the_order_of_components_with_one_role_does_not_matter() -> None:
    placements = {
        "a": {"placement": "0-3", "role": "actor"},
        "b": {"placement": "4-7", "role": "actor"},
        "rollout": "4-7",
    }
    plans = [
        Plan.resolve(
            {"cluster": {"component_placement": {name: placements[name] for name in order}}}, Topology.parse("1x8")
        )
        for order in (["a", "b", "rollout"], ["rollout", "b", "a"])
    ]
    assert plans[0].to_json() == plans[1].to_json()


@settings(max_examples=150)
@given(topologies(), st.data())
def test_plans_survive_json(topology: Topology, data: st.DataObject) -> None:
    plan = resolve(data.draw(jobs(topology)), topology)
    if plan is None:
        return
    text = plan.to_json()
    copy = Plan.from_json(text)
    assert copy == plan
    assert copy.to_json() == text
    assert [str(finding) for finding in copy.check()] == [str(finding) for finding in plan.check()]
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301


@given(topologies(), st.data())
def test_plans_add_up(topology: Topology, data: st.DataObject) -> None:
    """Every accelerator is idle, used once, or shared; environments say what placements say."""
    plan = resolve(data.draw(jobs(topology)), topology)
    if plan is None:
        return
    used: Counter[tuple[int, int]] = Counter()
    for component in plan.components:
        assert_consistent(list(component.placements), plan.topology)
        for p in component.placements:
            used.update((p.cluster_node_rank, local) for local in p.accelerators)
            environment = plan.environment(component.name, p.rank)
            assert environment["RANK"] == str(p.rank)
            assert environment["WORLD_SIZE"] == str(component.world_size)
            assert environment["LOCAL_RANK"] == "0"
            assert environment["NODE_LOCAL_RANK"] == str(p.local_rank)
            variable = p.accelerator_type.visible_devices_variable
            if variable:
                assert environment[variable].split(",") == list(p.visible_accelerators)
        assert len(component.transports) in (0, component.world_size)
    every = {(node.rank, local) for node in topology.nodes for local in range(node.num_accelerators)}
    assert set(plan.idle_accelerators) == every - set(used)
    assert plan.shared_accelerators == sorted(at for at, count in used.items() if count > 1)
    for at in every:
        assert len(plan.on_accelerator(*at)) == used[at]
    assert [c.name for c in plan.components] == sorted(c.name for c in plan.components)
    assert all(str(finding) and finding.render() for finding in plan.check())


@given(topologies())
def test_topologies_survive_json(topology: Topology) -> None:
    text = topology.to_json()
    copy = Topology.from_json(text)
    assert copy == topology
    assert copy.to_json() == text
    assert Topology.from_dict(topology.to_dict()) == topology
    assert pickle.loads(pickle.dumps(topology)) == topology  # noqa: S301


def test_two_robots_alike_survive_json() -> None:
    """A node with two devices that nobody told apart: their group counts both, before and after."""
    pads = (Hardware("Pad"), Hardware("Pad"))
    topology = Topology((Node(0, hardware=pads),), ()).with_groups(
        {"node_groups": [{"label": "pads", "node_ranks": 0, "hardware": {"type": "Pad"}}]}
    )
    assert topology.group("pads").hardware == ((0, pads[0]), (0, pads[1]))
    assert Topology.from_json(topology.to_json()) == topology


def test_equal_topologies_have_equal_json() -> None:
    one, two = (Topology((Node(0, cpus=cpus),), (NodeGroup("a", (0,)),)) for cpus in (8, 8.0))
    assert one == two
    assert one.to_json() == two.to_json()


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8), st.sampled_from(["", ":H200", ":AMD/MI300", ":4090"]))))
def test_short_texts_say_what_there_is(parts: list[tuple[int, int, str]]) -> None:
    if not parts:
        return
    topology = Topology.parse(" + ".join(f"{nodes}x{count}{model}" for nodes, count, model in parts))
    assert [node.num_accelerators for node in topology.nodes] == [c for n, c, _ in parts for _ in range(n)]
    assert topology.num_accelerators == sum(nodes * count for nodes, count, _ in parts)
    assert Topology.from_json(topology.to_json()) == topology

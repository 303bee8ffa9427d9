"""Differences of plans, and locks: nothing from nothing, mirrored, complete, and kept exactly."""

from __future__ import annotations

from generators import jobs, topologies
from hypothesis import given
from hypothesis import strategies as st
from test_plan_properties import resolve

from roost import LockFile, Placement, Plan, PlanDiff, Topology, diff_plans
from roost.report.diff import draw_diff

MIRRORED = {"+": "-", "-": "+", "~": "~"}


@st.composite
def plans(draw: st.DrawFn, topology: Topology) -> Plan | None:
    return resolve(draw(jobs(topology)), topology)


def swapped(details: dict) -> dict:
    return {what: (after, before) for what, (before, after) in details.items()}


def processes(plan: Plan) -> dict[tuple[str, int], Placement]:
    return {(component.name, p.rank): p for component in plan.components for p in component.placements}


def applied(diff: PlanDiff, plan: Plan) -> dict[tuple[str, int], Placement]:
    """The processes of a plan after a difference."""
    found = processes(plan)
    for change in diff.processes:
        key = (change.component, change.rank)
        assert found.get(key) == change.before
        if change.after is None:
            del found[key]
        else:
            found[key] = change.after
    return found


@given(topologies(), st.data())
def test_a_plan_does_not_differ_from_itself(topology: Topology, data: st.DataObject) -> None:
    plan = data.draw(plans(topology))
    if plan is None:
        return
    again = Plan.from_json(plan.to_json())
    assert diff_plans(plan, again) == PlanDiff()
    assert diff_plans(plan, again).is_empty


@given(topologies(), topologies(), st.data())
def test_a_difference_is_complete_and_mirrors(one: Topology, other: Topology, data: st.DataObject) -> None:
    before, after = data.draw(plans(one)), data.draw(plans(data.draw(st.sampled_from([one, other]))))
    if before is None or after is None:
        return
    there, back = diff_plans(before, after), diff_plans(after, before)
    assert applied(there, before) == processes(after)
    assert applied(back, after) == processes(before)

    assert there.is_empty == back.is_empty
    assert there.moved == back.moved
    assert [
        (MIRRORED[c.sign], c.component, c.rank, c.after, c.before, swapped(dict(c.details))) for c in there.processes
    ] == [(c.sign, c.component, c.rank, c.before, c.after, dict(c.details)) for c in back.processes]
    assert {name: swapped(dict(details)) for name, details in there.components.items()} == dict(back.components)
    assert there.now_cross == back.no_longer_cross
    assert there.no_longer_cross == back.now_cross
    assert bool(there.nodes) == bool(back.nodes)
    assert there.mode == (back.mode and back.mode[::-1])

    text = draw_diff(there, "a", "b").plain
    assert text.splitlines()[-1] == there.summary
    for sign in "+-~":
        assert (f"\n{sign} " in text) == bool(there.count(sign))


@given(topologies(), st.data())
def test_every_changed_process_is_in_exactly_one_row(topology: Topology, data: st.DataObject) -> None:
    from roost.report.stretches import _equal_nodes, _sequences

    before, after = data.draw(plans(topology)), data.draw(plans(topology))
    if before is None or after is None:
        return
    changes = diff_plans(before, after).processes
    by_node = _equal_nodes(changes)
    for stretches in (by_node, _sequences(by_node)):
        covered = [
            (stretch.first.component, stretch.first.sign, rank)
            for stretch in stretches
            for rank in range(stretch.first.rank, stretch.last.rank + 1)
        ]
        assert covered == [(change.component, change.sign, change.rank) for change in changes]


@given(topologies(), st.data())
def test_a_lock_comes_back_as_it_was(topology: Topology, data: st.DataObject) -> None:
    plan = data.draw(plans(topology))
    if plan is None:
        return
    texts = st.text(max_size=8)
    uuids = tuple(
        tuple(data.draw(st.sampled_from([(), tuple(f"GPU-{node.rank}-{i}" for i in node.accelerator_ids)])))
        for node in plan.topology.nodes
    )
    lock = LockFile(
        plan, data.draw(texts), data.draw(texts), tuple(data.draw(st.lists(texts))), uuids if any(uuids) else ()
    )
    text = lock.to_json()
    assert LockFile.from_json(text) == lock
    assert LockFile.from_json(text).to_json() == text
    assert lock.differences(lock.topology) == []
    assert lock.differences(topology) == []


@given(topologies(), topologies())
def test_machines_differ_in_both_directions(one: Topology, other: Topology) -> None:
    before, after = Plan(one, ()), Plan(other, ())
    there, back = diff_plans(before, after).nodes, diff_plans(after, before).nodes
    assert sorted((c.kind, c.planned, c.found) for c in there if c.kind == "order") == sorted(
        (c.kind, c.found, c.planned) for c in back if c.kind == "order"
    )
    assert sorted((c.what, c.planned, c.found) for c in there if c.kind in ("fact", "other")) == sorted(
        (c.what, c.found, c.planned) for c in back if c.kind in ("fact", "other")
    )
    count = {kind: sum(len(c.node_ranks) for c in there if c.kind == kind) for kind in ("gone", "further")}
    mirrored = {kind: sum(len(c.node_ranks) for c in back if c.kind == kind) for kind in ("gone", "further")}
    assert (count["gone"], count["further"]) == (mirrored["further"], mirrored["gone"])

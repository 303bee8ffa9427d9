"""The layout arithmetic of ``reference/layouts-and-engines.md``, as a table; and layouts in job files."""

from argparse import Namespace

import pytest

from roost import EngineShare, Layout, PlacementError, PlacementMode, Plan, RoostError, Topology, resolve_layout

A, R = 16, 8  # actor: 2 nodes of 8


@pytest.mark.parametrize(
    ("flags", "rollout_gpus", "reserve", "offset"),
    [
        ({"debug_train_only": True}, R, A, 0),
        ({"debug_train_only": True, "colocate": True}, R, A, 0),
        ({"debug_train_only": True, "external_engines": True}, R, A, 0),
        ({"external_engines": True, "debug_rollout_only": True}, R, A, 0),
        ({"external_engines": True}, R, A, A),
        ({"external_engines": True, "colocate": True}, R, A, A),
        ({"debug_rollout_only": True}, R, R, 0),
        ({"debug_rollout_only": True, "colocate": True}, R, R, 0),
        ({"colocate": True}, R, A, 0),
        ({"colocate": True}, 16, 16, 0),
        ({"colocate": True}, 24, 24, 0),
        ({}, R, A + R, A),
        ({}, 0, A, A),
        ({"async_training": True}, R, A + R, A),
    ],
)
def test_table(flags, rollout_gpus, reserve, offset):
    layout = resolve_layout(2, 8, rollout_gpus, **flags)
    assert isinstance(layout, Layout)
    assert (layout.num_accelerators, layout.rollout_offset) == (reserve, offset)


@pytest.mark.parametrize(
    ("flags", "rollout_gpus", "actor", "rollout"),
    [
        ({}, 8, range(16), range(16, 24)),
        ({"colocate": True}, 24, range(16), range(24)),  # the first A, not everything
        ({"colocate": True}, 8, range(16), range(8)),
        ({"colocate": True}, 16, range(16), range(16)),
        ({"external_engines": True}, 8, range(16), range(16, 16)),
        ({"debug_train_only": True}, 8, range(16), range(0)),
        ({"debug_rollout_only": True}, 8, range(0), range(8)),
    ],
)
def test_shares(flags, rollout_gpus, actor, rollout):
    layout = resolve_layout(2, 8, rollout_gpus, **flags)
    assert layout.actor == actor
    assert layout.rollout == rollout


@pytest.mark.parametrize(
    "flags",
    [
        {"debug_train_only": True, "debug_rollout_only": True},
        {"debug_train_only": True, "debug_rollout_only": True, "external_engines": True},
        {"colocate": True, "async_training": True},
    ],
)
def test_contradictions(flags):
    with pytest.raises(PlacementError):
        resolve_layout(2, 8, 8, **flags)


def test_all_contradictions_at_once():
    with pytest.raises(PlacementError) as caught:
        resolve_layout(-1, 8, 8, debug_train_only=True, debug_rollout_only=True, colocate=True, async_training=True)
    assert len(caught.value.findings) == 3


@pytest.mark.parametrize(
    "numbers", [(-1, 8, 8), (2, -8, 8), (2, 8, -1), (1.5, 8, 8), ("2", 8, 8), (None, 8, 8), (True, 8, 8)]
)
def test_numbers_that_are_none(numbers):
    with pytest.raises(PlacementError):
        resolve_layout(*numbers)


# Shares ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "shares"),
    [
        ({"colocate": True}, {"actor": 0.8, "rollout": 0.2}),
        ({"colocate": True, "use_critic": True}, {"actor": 0.4, "critic": 0.4, "rollout": 0.2}),
        ({}, {"actor": 1.0, "rollout": 1.0}),
        ({"use_critic": True}, {"actor": 0.5, "critic": 0.5, "rollout": 1.0}),
        ({"external_engines": True}, {"actor": 1.0}),
        ({"debug_rollout_only": True, "use_critic": True}, {"rollout": 1.0}),
        ({"debug_train_only": True, "colocate": True}, {"actor": 0.8}),
        ({"num_gpus_per_actor": 0.5, "num_gpus_per_rollout_engine": 0.25}, {"actor": 0.5, "rollout": 0.25}),
        (
            {"colocate": True, "use_critic": True, "num_gpus_per_actor": 0.5, "num_gpus_per_critic": 0.3},
            {"actor": 0.5, "critic": 0.3, "rollout": 0.2},
        ),
        ({"colocate": True, "num_gpus_per_actor": 0.7, "num_gpus_per_rollout_engine": 0.3}, None),
    ],
)
def test_parts_of_an_accelerator(flags, shares):
    layout = resolve_layout(1, 8, 8, **flags)
    assert layout.shares == (shares or {"actor": 0.7, "rollout": 0.3})


def test_a_critic_has_the_actors_accelerators():
    layout = resolve_layout(1, 8, 4, use_critic=True)
    assert layout.critic == layout.actor == range(8)
    assert resolve_layout(1, 8, 4).critic == range(0)


@pytest.mark.parametrize(
    ("flags", "at"),
    [
        ({"colocate": True, "num_gpus_per_actor": 0.9}, "actor 0.9 + rollout 0.2"),
        ({"colocate": True, "use_critic": True, "num_gpus_per_critic": 0.8}, "actor 0.4 + critic 0.8 + rollout 0.2"),
        ({"use_critic": True, "num_gpus_per_actor": 0.6}, "actor 0.6 + critic 0.5"),
    ],
)
def test_more_than_a_whole_accelerator_is_refused(flags, at):
    with pytest.raises(PlacementError) as caught:
        resolve_layout(1, 8, 8, **flags)
    assert caught.value.codes == ("P408",)
    assert at in str(caught.value)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, "half", True, float("nan")])
def test_shares_that_are_none(share):
    with pytest.raises(PlacementError, match="num_gpus_per_actor is a number above 0"):
        resolve_layout(1, 8, 8, num_gpus_per_actor=share)


# Engines ---------------------------------------------------------------------------------------


def test_engines_one_after_another():
    layout = resolve_layout(1, 8, 8, rollout_num_gpus_per_engine=4, num_gpus_per_node=8)
    assert layout.engines == (EngineShare(0, range(8, 12)), EngineShare(0, range(12, 16)))


def test_an_engine_of_several_nodes_has_a_member_on_each():
    layout = resolve_layout(1, 8, 32, rollout_num_gpus_per_engine=16, num_gpus_per_node=8)
    assert layout.engines == (EngineShare(0, range(8, 24), 2), EngineShare(0, range(24, 40), 2))


def test_nodes_of_different_sizes():
    layout = resolve_layout(1, 4, 8, rollout_num_gpus_per_engine=4, num_gpus_per_node=[4, 0, 8])
    assert [engine.positions for engine in layout.engines] == [range(4, 8), range(8, 12)]


def test_without_a_node_size_nothing_is_said_of_nodes():
    layout = resolve_layout(1, 6, 8, rollout_num_gpus_per_engine=4)
    assert [engine.members for engine in layout.engines] == [1, 1]


def test_groups_of_engines():
    groups = [
        {"num_gpus": 8, "num_gpus_per_engine": 8},
        {"num_gpus": 2, "placeholder": True},
        Namespace(num_gpus=4),
    ]
    layout = resolve_layout(1, 2, rollout_groups=groups, colocate=True, rollout_num_gpus_per_engine=2)
    assert layout.num_accelerators == 14
    assert layout.rollout == range(14)
    assert layout.engines == (
        EngineShare(0, range(8)),
        EngineShare(1, range(8, 9), placeholder=True),
        EngineShare(1, range(9, 10), placeholder=True),
        EngineShare(2, range(10, 12)),
        EngineShare(2, range(12, 14)),
    )


@pytest.mark.parametrize(
    ("numbers", "more", "code", "help"),
    [
        ((1, 8, 10), {"rollout_num_gpus_per_engine": 4}, "P404", "rollout_num_gpus: 8"),
        ((1, 8, 24), {"rollout_num_gpus_per_engine": 12}, "P405", "rollout_num_gpus_per_engine: 8"),
        ((1, 6, 8), {"rollout_num_gpus_per_engine": 4}, "P406", "[{num_gpus: 2, placeholder: true}, {num_gpus: 8, "),
        ((1, 8, 24), {"rollout_num_gpus_per_engine": 3}, "P406", "rollout_num_gpus_per_engine: 2"),
        ((1, 4, 16), {"rollout_num_gpus_per_engine": 16}, "P406", "begin at GPU 8, and keep 4 GPUs before it free"),
        ((1, 8, 2), {"rollout_num_gpus_per_engine": 4}, "P407", "rollout_num_gpus_per_engine: 2"),
        ((1, 8, 9), {"rollout_groups": [{"num_gpus": 8}]}, "P409", "rollout_num_gpus: 8"),
        ((1, 8, 8), {"rollout_groups": [{"gpus": 8}]}, "P403", "known keys: num_gpus"),
        ((1, 8, 8), {"rollout_groups": 3}, "P403", "a list of groups"),
        ((1, 8, 8), {"rollout_groups": [{"num_gpus": -1}]}, "P403", "rollout_groups.0.num_gpus"),
        ((1, 8, 8), {"rollout_num_gpus_per_engine": 0}, "P403", "from 1 up"),
        ((2**24, 8, 0), {}, "P410", "16,777,216"),
        ((2**30, 8, 0), {}, "P403", "to 16,777,216"),
    ],
)
def test_what_cannot_be(numbers, more, code, help):  # noqa: A002
    with pytest.raises(PlacementError) as caught:
        resolve_layout(*numbers, **{"num_gpus_per_node": 8, **more})
    assert code in caught.value.codes
    assert help in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "engine"),
    [([4, 8], 12), ([4, 4, 8], 8), ([8, 4], 12)],
)
def test_engines_on_unlike_nodes_are_refused(sizes, engine):
    total = sum(sizes)
    with pytest.raises(PlacementError) as caught:
        resolve_layout(0, 0, total, rollout_num_gpus_per_engine=engine, num_gpus_per_node=sizes)
    assert caught.value.codes == ("P405",)


def test_a_pasted_fix_is_right():
    groups = [{"num_gpus": 2, "placeholder": True}, {"num_gpus": 8, "num_gpus_per_engine": 4}]
    layout = resolve_layout(1, 6, 8, rollout_groups=groups, num_gpus_per_node=8)
    assert [engine.positions for engine in layout.engines if not engine.placeholder] == [range(8, 12), range(12, 16)]


def test_every_problem_of_the_engines_at_once():
    groups = [{"num_gpus": 3, "num_gpus_per_engine": 2}, {"num_gpus": 4, "num_gpus_per_engine": 8}]
    with pytest.raises(PlacementError) as caught:
        resolve_layout(1, 8, rollout_groups=groups, colocate=True, async_training=True, num_gpus_per_actor=0.9)
    assert caught.value.codes == ("P402", "P404", "P407", "P408")


# Job files -------------------------------------------------------------------------------------


def plan_of(layout, cluster="2x8", **more):
    return Plan.resolve({"cluster": {"layout": layout, **more}}, Topology.parse(cluster))


def test_a_layout_becomes_texts_that_a_person_could_have_written():
    layout = {"mode": "collocated", "actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "use_critic": True}
    plan = plan_of({**layout, "rollout_num_gpus_per_engine": 2})
    written = {component.name: (component.role, component.rule, component.gpu_share) for component in plan.components}
    assert written == {
        "actor": ("actor", "0-15", 0.4),
        "critic": ("critic", "0-15", 0.4),
        "rollout": ("rollout", "0-15:0-7", 0.2),
    }
    assert plan.mode is PlacementMode.COLLOCATED
    assert plan.check() == []
    again = {name: {"placement": rule, "gpu_share": share} for name, (_, rule, share) in written.items()}
    spelled_out = Plan.resolve({"cluster": {"component_placement": again}}, Topology.parse("2x8"))
    assert [c.placements for c in spelled_out.components] == [c.placements for c in plan.components]


@pytest.mark.parametrize(
    ("mode", "rollout_gpus", "rule", "used"),
    [
        ("collocated", None, "0-7", 8),
        ("collocated", 4, "0-3", 8),
        ("hybrid", 16, "0-15", 16),
        ("hybrid", None, "0-7", 8),
        ("disaggregated", 4, "8-11", 12),
    ],
)
def test_modes(mode, rollout_gpus, rule, used):
    plan = plan_of({"mode": mode, "actor_num_gpus_per_node": 8, "rollout_num_gpus": rollout_gpus})
    assert plan.mode.value == mode
    assert plan.component("rollout").rule == rule
    assert plan.topology.num_accelerators - len(plan.idle_accelerators) == used


def test_colocate_says_the_mode_too():
    numbers = {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 12}
    assert plan_of({**numbers, "colocate": True}).mode is PlacementMode.HYBRID
    assert plan_of({**numbers, "colocate": True, "rollout_num_gpus": 8}).mode is PlacementMode.COLLOCATED
    assert plan_of({**numbers, "rollout_num_gpus": 8}).mode is PlacementMode.DISAGGREGATED


def test_an_engine_of_two_nodes_is_two_processes():
    plan = plan_of({"actor_num_gpus_per_node": 8, "rollout_num_gpus": 32, "rollout_num_gpus_per_engine": 16}, "5x8")
    rollout = plan.component("rollout")
    assert (rollout.rule, rollout.processes_per_engine, rollout.world_size) == ("8-39:0-3", 2, 4)
    assert [[p.cluster_node_rank for p in engine] for engine in rollout.engines] == [[1, 2], [3, 4]]
    assert all(len(p.accelerators) == 8 for p in rollout.placements)
    assert Plan.from_json(plan.to_json()) == plan


def test_groups_become_components_and_a_placeholder_gets_no_weights():
    groups = [{"num_gpus": 4, "num_gpus_per_engine": 2}, {"num_gpus": 2, "placeholder": True}, {"num_gpus": 2}]
    plan = plan_of({"actor_num_gpus_per_node": 8, "rollout_groups": groups})
    found = {c.name: (c.rule, c.role, c.placeholder, bool(c.transports)) for c in plan.components}
    assert found == {
        "actor": ("0-7", "actor", False, False),
        "rollout": ("8-11:0-1", "rollout", False, True),
        "rollout-1": ("12-13", "rollout", True, False),
        "rollout-2": ("14-15", "rollout", False, True),
    }
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("switch", "names"),
    [
        ("debug_train_only", ["actor"]),
        ("debug_rollout_only", ["rollout"]),
        ("external_engines", ["actor"]),
    ],
)
def test_a_switch_leaves_a_role_out_and_a_note_says_so(switch, names):
    plan = plan_of({"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, switch: True})
    assert [component.name for component in plan.components] == names
    assert next(note.message for note in plan.notes if note.code == "N115").startswith(f"{switch}: ")


def test_other_components_stand_beside_a_layout():
    plan = plan_of({"actor_num_gpus_per_node": 8, "rollout_num_gpus": 4}, component_placement={"reward": "12-15"})
    assert [(c.name, c.rule) for c in plan.components] == [("actor", "0-7"), ("reward", "12-15"), ("rollout", "8-11")]


def test_the_trainers_nodes_are_not_what_they_seem():
    notes = plan_of({"actor_num_nodes": 2, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 8}).notes
    assert [note.message for note in notes] == ["actor: 2 nodes x 4 GPUs are the first 8 GPUs, and these are on 1 node"]


@pytest.mark.parametrize(
    ("layout", "more", "codes"),
    [
        ({"actor_num_gpus_per_node": 8}, {"component_placement": {"actor": "0"}}, ["P112"]),
        ({"debug_rollout_only": True, "rollout_num_gpus": 2}, {"component_placement": {"actor": "0"}}, ["P112"]),
        ({"actor_num_gpus_per_node": 8}, {"placement_mode": "hybrid"}, ["C204"]),
        ({"actor_num_gpus_per_node": 8, "mode": "collocated", "colocate": False}, {}, ["C204"]),
        ({"actor_num_gpus_per_node": 8, "mode": "together"}, {}, ["C203"]),
        ({"rollout_num_gpus": 8}, {}, ["C202"]),
        ({"actor_num_gpus_per_node": 8, "rollout_groups": [{"num_gpu": 8}]}, {}, ["C201", "C202"]),
        ({"actor_num_gpus_per_node": 8, "use_critics": True}, {}, ["C201"]),
        ({"actor_num_gpus_per_node": 8, "num_gpus_per_actor": 2}, {}, ["C203"]),
        ({"actor_num_gpus_per_node": 8, "rollout_num_gpus": 16}, {}, ["P410"]),
        ({"actor_num_gpus_per_node": 8, "num_gpus_per_node": 4}, {}, ["P413"]),
        ({"actor_num_gpus_per_node": 4, "mode": "collocated", "rollout_num_gpus": 8}, {}, ["P412"]),
        ({"debug_rollout_only": True}, {}, ["P411"]),
        ({"actor_num_gpus_per_node": 8, "external_engines": True, "debug_rollout_only": True}, {}, ["P411"]),
        (3, {}, ["C203", "C206"]),
    ],
)
def test_layouts_that_cannot_be(layout, more, codes):
    with pytest.raises(RoostError) as caught:
        plan_of(layout, **more)
    assert sorted(caught.value.codes) == codes


def test_machines_without_accelerators_have_no_layout():
    with pytest.raises(PlacementError, match="counts GPUs, and there are none"):
        plan_of({"actor_num_gpus_per_node": 1}, "2x0")


def test_keys_of_engines_in_the_placement_language():
    entry = {"placement": "0-15:0-3", "processes_per_engine": 2, "placeholder": True, "cpus": 1000, "memory_gib": 1000}
    plan = Plan.resolve({"cluster": {"component_placement": {"rollout": entry}}}, Topology.parse("2x8"))
    rollout = plan.component("rollout")
    assert (rollout.processes_per_engine, rollout.placeholder, len(rollout.engines)) == (2, True, 2)
    assert not any(finding.is_problem for finding in plan.check())  # nothing is started that could need them


def test_engines_that_lack_members_are_a_finding():
    entry = {"placement": "0-7:0-3", "processes_per_engine": 3}
    plan = Plan.resolve({"cluster": {"component_placement": {"rollout": entry}}}, Topology.parse("1x8"))
    problem = next(finding for finding in plan.check() if finding.is_problem)
    assert problem.code == "K104"
    assert problem.place.path == "cluster.component_placement.rollout.processes_per_engine"
    assert problem.fixes[0].paste == "processes_per_engine: 2"


@pytest.mark.parametrize(("key", "value"), [("processes_per_engine", 0), ("placeholder", "yes"), ("placeholder", 1)])
def test_keys_of_engines_that_are_wrong(key, value):
    entry = {"placement": "0-7", key: value}
    with pytest.raises(RoostError) as caught:
        Plan.resolve({"cluster": {"component_placement": {"rollout": entry}}}, Topology.parse("1x8"))
    assert caught.value.codes == ("C203",)


def test_plans_of_earlier_versions_are_read():
    plan = plan_of({"actor_num_gpus_per_node": 8})
    text = plan.to_json()
    assert "processes_per_engine" not in text
    assert Plan.from_json(text) == plan

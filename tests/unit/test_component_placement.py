"""``ComponentPlacement``: names, node groups, robots, and every form of a configuration."""

import pickle
from textwrap import dedent

import pytest
from omegaconf import OmegaConf

from roost import (
    ComponentPlacement,
    ConfigError,
    HybridComponentPlacement,
    PlacementError,
    PlacementMode,
    RoostError,
    Topology,
    TopologyError,
    load_config,
)

ONE = Topology.parse("1x8")
TWO = Topology.parse("2x8")


def where(placed, name):
    """(node, local ranks…) of each process."""
    placements = placed.get_strategy(name).get_placement(placed.topology)
    return [(p.cluster_node_rank, *p.local_hardware_ranks) for p in placements]


# The seeds' examples ----------------------------------------------------------------------


def test_actor_and_inference_share_one_rule(write):
    """The short form of 001… and 003…, under ``component_placement``."""
    path = write("""\
        cluster:
          num_nodes: 1
          component_placement:
            actor,inference: 0-7
    """)
    placed = ComponentPlacement(load_config(path), ONE)
    assert placed.components == ["actor", "inference"]
    for name in placed.components:
        assert placed.get_world_size(name) == 8
        assert placed.get_hardware_ranks(name) == list(range(8))
        assert where(placed, name) == [(0, i) for i in range(8)]


def test_the_slip_of_that_example_is_explained(job):
    with pytest.raises(RoostError) as caught:
        ComponentPlacement({"cluster": {"num_nodes": 1, "actor,inference": "0-7"}}, ONE)
    assert 'component_placement: {"actor,inference": 0-7}' in str(caught.value)


HETEROGENEOUS = """\
    cluster:
      num_nodes: 4
      node_groups:
        - {label: a800, node_ranks: 0-1}
        - {label: 4090, node_ranks: 2-3}
        - label: robot
          node_ranks: 2-3
          hardware:
            type: UnitRobot
            configs:
              - {node_rank: 2, robot_ip: 10.0.0.1}
              - {node_rank: 2, robot_ip: 10.0.0.2}
              - {node_rank: 3, robot_ip: 10.0.0.3}
              - {node_rank: 3, robot_ip: 10.0.0.4}
      component_placement:
        actor:
          node_group: a800
          placement: 0-8
        rollout:
          node_group: 4090
          placement: 0-8
        env:
          node_group: robot
          placement: 0-3:0-7
        agent:
          node_group: node
          placement: 0-1:0-200,2-3:201-511
    """


def test_the_heterogeneous_example_completed(write, robot):
    """001… and 003…: with the groups, and four nodes instead of two."""
    placed = ComponentPlacement(load_config(write(HETEROGENEOUS)), Topology.parse("2x8:A800+2x8:4090"))
    assert placed.components == ["actor", "rollout", "env", "agent"]
    assert where(placed, "actor") == [(0, i) for i in range(8)] + [(1, 0)]
    assert where(placed, "rollout") == [(2, i) for i in range(8)] + [(3, 0)]
    assert where(placed, "env") == [(2, 0), (2, 0), (2, 1), (2, 1), (3, 0), (3, 0), (3, 1), (3, 1)]
    agent = placed.get_strategy("agent").get_placement(placed.topology)
    assert [p.cluster_node_rank for p in agent] == [0] * 101 + [1] * 100 + [2] * 156 + [3] * 155
    assert [p.local_world_size for p in agent[::200]] == [101, 100, 155]
    assert {p.node_group_label for p in agent} == {"node"}
    assert len(placed.notes) == 2


def test_robot_processes_see_every_accelerator_and_own_none(write, robot):
    placed = ComponentPlacement(load_config(write(HETEROGENEOUS)), Topology.parse("4x8"))
    for placement in placed.get_strategy("env").get_placement(placed.topology):
        assert placement.local_accelerator_rank == -1
        assert placement.visible_accelerators == tuple("01234567")
        assert placement.node_group_label == "robot"


def test_the_heterogeneous_example_as_the_seeds_have_it_is_refused(job):
    placements = {
        "actor": {"node_group": "a800", "placement": "0-8"},
        "agent": {"node_group": "node", "placement": "0-1:0-200,2-3:201-511"},
    }
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(job(placements, {"num_nodes": 2}), TWO)
    assert "a800" in str(caught.value)
    assert "2 nodes" in str(caught.value)


def test_the_code_example_of_the_seeds(write):
    path = write("""\
        cluster:
          num_nodes: 1
          component_placement:
            test_worker:  # a component
              node_group: a800
              placement: 0-3
          node_groups:
            - label: a800
              node_ranks: 0
    """)
    placed = ComponentPlacement(load_config(path), TWO)
    placements = placed.get_strategy("test_worker").get_placement(TWO)  # the cluster knows nothing of the group
    assert [(p.cluster_node_rank, p.local_hardware_ranks) for p in placements] == [(0, (i,)) for i in range(4)]
    assert {p.node_group_label for p in placements} == {"a800"}


# Names ------------------------------------------------------------------------------------


def test_names_of_one_rule_may_have_spaces_around_them(job):
    assert ComponentPlacement(job({" actor , rollout ": "0-3"}), ONE).components == ["actor", "rollout"]


@pytest.mark.parametrize(
    "placements",
    [
        {"actor,actor": "0-3"},
        {"actor": "0-3", "rollout,actor": "4-7"},
        {"actor,": "0-3"},
        {",": "0-3"},
        {"": "0-3"},
        {"a b": "0-3"},
        {"actor/0": "0-3"},
        {"0actor": "0-3"},
        {"актор": "0-3"},
        {"null": "0-3"},
        {None: "0-3"},
        {True: "0-3"},
        {4090: "0-3"},
    ],
)
def test_names_that_are_refused(job, placements):
    with pytest.raises(PlacementError):
        ComponentPlacement(job(placements), ONE)


def test_every_name_of_a_shared_rule_gets_its_own_processes(job):
    placed = ComponentPlacement(job({"actor,rollout,reward": "0-3:0-7"}), ONE)
    assert [placed.get_world_size(name) for name in placed.components] == [8, 8, 8]


@pytest.mark.parametrize("method", ["get_strategy", "get_world_size", "get_hardware_ranks"])
def test_unknown_component(job, method):
    placed = ComponentPlacement(job({"actor": "0-3", "rollout": "4-7"}), ONE)
    with pytest.raises(PlacementError, match="rollout"):
        getattr(placed, method)("rolout")


# Node groups ------------------------------------------------------------------------------

GROUPS = {"node_groups": [{"label": "a", "node_ranks": 0}, {"label": "b", "node_ranks": 1}]}


@pytest.mark.parametrize("group", ["b", ["b"], "b ", " b"])
def test_one_group(job, group):
    placed = ComponentPlacement(job({"actor": {"node_group": group, "placement": "0-1"}}, GROUPS), TWO)
    assert where(placed, "actor") == [(1, 0), (1, 1)]
    assert placed.get_hardware_ranks("actor") == [0, 1]


@pytest.mark.parametrize("group", ["a,b", "a, b", ["a", "b"]])
def test_several_groups(job, group):
    placed = ComponentPlacement(job({"actor": {"node_group": group, "placement": "6-9"}}, GROUPS), TWO)
    assert where(placed, "actor") == [(0, 6), (0, 7), (1, 0), (1, 1)]


@pytest.mark.parametrize("group", ["b,a", ["b", "a"], "b ,a"])
def test_several_groups_out_of_node_order(job, group):
    placed = ComponentPlacement(job({"actor": {"node_group": group, "placement": "6-9"}}, GROUPS), TWO)
    assert where(placed, "actor") == [(1, 6), (1, 7), (0, 0), (0, 1)]
    placements = placed.get_strategy("actor").get_placement(placed.topology)
    assert [p.rank for p in placements] == [0, 1, 2, 3]
    assert [(p.local_rank, p.local_world_size) for p in placements] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [p.node_group_label for p in placements] == ["b", "b", "a", "a"]


def test_several_groups_in_a_file(write):
    path = write("""\
        cluster:
          node_groups: [{label: a, node_ranks: 0}, {label: b, node_ranks: 1}]
          component_placement:
            actor:
              node_group:
                - b
                - a
              placement: all
            rollout: {node_group: "a,b", placement: all}
    """)
    placed = ComponentPlacement(load_config(path), TWO)
    assert [node for node, _ in where(placed, "actor")] == [1] * 8 + [0] * 8
    assert [node for node, _ in where(placed, "rollout")] == [0] * 8 + [1] * 8


def test_an_unquoted_number_is_a_label(write):
    path = write("""\
        cluster:
          node_groups: [{label: 4090, node_ranks: 1}]
          component_placement: {rollout: {node_group: 4090, placement: all}}
    """)
    placed = ComponentPlacement(load_config(path), TWO)
    assert [node for node, _ in where(placed, "rollout")] == [1] * 8


def test_the_reserved_group_node_counts_nodes(job):
    placed = ComponentPlacement(job({"agent": {"node_group": "node", "placement": "all"}}), TWO)
    assert placed.get_hardware_ranks("agent") == [0, 1]
    placements = placed.get_strategy("agent").get_placement(TWO)
    assert [p.cluster_node_rank for p in placements] == [0, 1]
    assert {p.local_accelerator_rank for p in placements} == {-1}
    assert {p.node_group_label for p in placements} == {"node"}


def test_the_reserved_group_cluster_is_the_default(job):
    plain = ComponentPlacement(job({"actor": "all"}), TWO)
    named = ComponentPlacement(job({"actor": {"node_group": "cluster", "placement": "all"}}), TWO)
    bare = ComponentPlacement(job({"actor": {"placement": "all"}}), TWO)
    for placed in (named, bare):
        assert placed.get_strategy("actor").get_placement(TWO) == plain.get_strategy("actor").get_placement(TWO)


def test_a_group_without_any_hardware_counts_nodes(job):
    topology = Topology.parse("1x8+2x0")
    groups = {"node_groups": [{"label": "cpu", "node_ranks": "1-2"}]}
    placed = ComponentPlacement(job({"env": {"node_group": "cpu", "placement": "0-1:0-3"}}, groups), topology)
    placements = placed.get_strategy("env").get_placement(placed.topology)
    assert [p.cluster_node_rank for p in placements] == [1, 1, 2, 2]
    assert [p.placement_node_rank for p in placements] == [0, 0, 1, 1]


def test_a_cluster_without_accelerators_counts_nodes(job):
    placed = ComponentPlacement(job({"env": "0-2"}), Topology.parse("3x0"))
    assert [node for node, *_ in where(placed, "env")] == [0, 1, 2]


def test_nodes_without_accelerators_are_passed_over_where_others_have_some(job):
    placed = ComponentPlacement(job({"actor": "all"}), Topology.parse("1x2+1x0+1x1"))
    assert where(placed, "actor") == [(0, 0), (0, 1), (2, 0)]


@pytest.mark.parametrize("group", ["c", "A", "a,c", ["a", "c"], "b a"])
def test_unknown_groups(job, group):
    with pytest.raises(PlacementError, match="no node group"):
        ComponentPlacement(job({"actor": {"node_group": group, "placement": "0"}}, GROUPS), TWO)


@pytest.mark.parametrize("group", [None, "", ",", [], ["a", ""], [["a"]], {"a": 1}, True, ["a", "a"], "a,a", [None]])
def test_groups_that_are_none(job, group):
    with pytest.raises(ConfigError):
        ComponentPlacement(job({"actor": {"node_group": group, "placement": "0"}}, GROUPS), TWO)


def test_an_unknown_label_is_told_its_neighbour(job):
    groups = {"node_groups": [{"label": "a800", "node_ranks": 0}]}
    with pytest.raises(PlacementError, match="node_group: a800"):
        ComponentPlacement(job({"actor": {"node_group": "A800", "placement": "0"}}, groups), TWO)


def test_a_group_without_nodes_is_refused_and_its_component_not_lost(job):
    groups = {"node_groups": [{"label": "a", "node_ranks": []}]}
    with pytest.raises(RoostError):
        ComponentPlacement(job({"actor": {"node_group": "a", "placement": "0"}, "env": "0"}, groups), TWO)


def test_two_groups_of_unequal_size_that_share_a_placement_by_alias(write):
    """The text is one, its meaning is not: ``all`` is counted in each component's own group."""
    path = write("""\
        cluster:
          node_groups: [{label: big, node_ranks: 0}, {label: small, node_ranks: 1}]
          component_placement:
            actor: {node_group: big, placement: &everything all}
            rollout: {node_group: small, placement: *everything}
    """)
    placed = ComponentPlacement(load_config(path), Topology.parse("1x8+1x4"))
    assert placed.get_world_size("actor") == 8
    assert placed.get_world_size("rollout") == 4


def test_a_shared_placement_by_alias_is_checked_in_each_group(write):
    path = write("""\
        cluster:
          node_groups: [{label: big, node_ranks: 0}, {label: small, node_ranks: 1}]
          component_placement:
            actor: {node_group: big, placement: &eight 0-7}
            rollout: {node_group: small, placement: *eight}
    """)
    with pytest.raises(PlacementError):
        ComponentPlacement(load_config(path), Topology.parse("1x8+1x4"))


# Groups with and without hardware, counted together -------------------------------------------

BOTH = {"node_groups": [{"label": "gpu", "node_ranks": 0}, {"label": "cpu", "node_ranks": "1-2"}]}


def test_groups_with_and_without_hardware_in_segments_of_their_own(job):
    placements = {"actor": {"node_group": "gpu,cpu", "placement": "0-7,8-9:8-11"}}
    placed = ComponentPlacement(job(placements, BOTH), Topology.parse("1x8+2x0"))
    assert where(placed, "actor") == [(0, i) for i in range(8)] + [(1,), (1,), (2,), (2,)]


@pytest.mark.parametrize(
    ("groups", "text"),
    [("gpu,cpu", "0-7,8-9:8-12"), ("cpu,gpu", "0-1:0-2,2-9"), ("cpu,gpu", "0-9:0-12"), ("cpu,gpu", "0-9:0-19")],
)
def test_no_process_is_lost_between_nodes_and_hardware(job, groups, text):
    """Refused or placed, but never fewer processes than the job counts."""
    config = job({"actor": {"node_group": groups, "placement": text}}, BOTH)
    try:
        placed = ComponentPlacement(config, Topology.parse("1x8+2x0"))
    except PlacementError:
        return
    assert len(where(placed, "actor")) == placed.get_world_size("actor")


def test_uneven_processes_on_the_nodes_of_mixed_groups_are_spread(job):
    """On nodes processes are spread as evenly as possible, whatever else the groups hold."""
    config = job({"actor": {"node_group": "gpu,cpu", "placement": "0-7,8-9:8-12"}}, BOTH)
    placed = ComponentPlacement(config, Topology.parse("1x8+2x0"))
    assert [node for node, *_ in where(placed, "actor")] == [0] * 8 + [1] * 3 + [2] * 2


def test_one_segment_over_hardware_and_nodes_is_judged_alike_for_any_number_of_nodes(job):
    def judged(topology, gpu, cpu):
        groups = {"node_groups": [{"label": "gpu", "node_ranks": gpu}, {"label": "cpu", "node_ranks": cpu}]}
        try:
            ComponentPlacement(job({"actor": {"node_group": "gpu,cpu", "placement": "all"}}, groups), topology)
        except PlacementError:
            return "refused"
        return "placed"

    one = judged(Topology.parse("1x8+1x0"), "0", "1")
    assert judged(Topology.parse("2x8+1x0"), "0-1", "2") == one
    assert judged(Topology.parse("1x8+2x0"), "0", "1-2") == one


# num_nodes --------------------------------------------------------------------------------


def test_num_nodes_limits_what_is_counted(job):
    placed = ComponentPlacement(job({"actor": "all"}, {"num_nodes": 2}), Topology.parse("4x8"))
    assert placed.get_world_size("actor") == 16
    with pytest.raises(PlacementError):
        ComponentPlacement(job({"actor": "0-16"}, {"num_nodes": 2}), Topology.parse("4x8"))


def test_more_nodes_than_there_are(job):
    with pytest.raises(ConfigError, match="wants 3 nodes, and the cluster has 2"):
        ComponentPlacement(job({"actor": "all"}, {"num_nodes": 3}), TWO)


@pytest.mark.parametrize("number", [-1, 1.5, "2", "two", True, [2], {"a": 1}, float("nan")])
def test_num_nodes_is_a_whole_number(job, number):
    with pytest.raises(ConfigError, match="num_nodes"):
        ComponentPlacement(job({"actor": "0"}, {"num_nodes": number}), TWO)


# The cluster section ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "suggestion"),
    [
        ({"num_node": 1}, "num_nodes"),
        ({"component_placements": {}}, "component_placement"),
        ({"node_group": []}, "node_groups"),
        ({"autoscheduler": True}, "auto_scheduler"),
        ({"nonsense_quite_other": 1}, "known keys"),
    ],
)
def test_unknown_keys_of_the_cluster_section_are_refused(job, cluster, suggestion):
    with pytest.raises(RoostError, match="unknown key") as caught:
        ComponentPlacement(job({"actor": "0"}, cluster), TWO)
    assert suggestion in str(caught.value)


@pytest.mark.parametrize("key", ["node_groups", "placemnt", "gpu_shares", "Role"])
def test_unknown_keys_of_a_component_are_refused(job, key):
    with pytest.raises(RoostError, match="unknown key"):
        ComponentPlacement(job({"actor": {"placement": "0", key: "a"}}), TWO)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cluster": None},
        {"cluster": 3},
        {"cluster": "0-7"},
        {"cluster": ["a"]},
        {"cluster": {}},
        {"cluster": {"num_nodes": 1}},
        {"cluster": {"component_placement": None}},
        {"cluster": {"component_placement": {}}},
        {"cluster": {"component_placement": "0-7"}},
        {"cluster": {"component_placement": [{"actor": "0"}]}},
        {"cluster": {"component_placement": {"actor": {}}}},
        {"cluster": {"component_placement": {"actor": {"node_group": "node"}}}},
        {"component_placement": {"actor": "0-7"}},
    ],
)
def test_jobs_that_place_nothing(config):
    with pytest.raises(ConfigError):
        ComponentPlacement(config, TWO)


@pytest.mark.parametrize("placement", [None, True, 1.5, [0, 1], {"a": 1}])
def test_the_placement_of_the_long_form_is_a_text(job, placement):
    with pytest.raises(PlacementError):
        ComponentPlacement(job({"actor": {"placement": placement}}), TWO)


@pytest.mark.parametrize("config", [None, 7, "job.yaml", ["a"], b"x"])
def test_what_is_no_configuration(config):
    with pytest.raises(ConfigError):
        ComponentPlacement(config, TWO)


@pytest.mark.parametrize("cluster", [None, "2x8", 16])
def test_what_is_no_cluster(job, cluster):
    with pytest.raises(TopologyError):
        ComponentPlacement(job({"actor": "0"}), cluster)


def test_all_problems_come_at_once_and_placement_faults_make_it_a_placement_error(job):
    cluster = {"num_node": 1, "node_groups": [{"label": "node", "node_ranks": 0}]}
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(job({"actor": "0-99", "env": {"node_group": "x", "placement": "0"}}, cluster), TWO)
    assert len(caught.value.findings) == 4
    assert sum(code.startswith("P") for code in caught.value.codes) == 2


def test_a_configuration_that_contains_itself():
    config = {"cluster": {"component_placement": {"actor": "0"}}}
    config["again"] = config
    with pytest.raises(ConfigError):
        ComponentPlacement(config, TWO)


# DictConfig and Config --------------------------------------------------------------------

TEXT = """\
    gpus: 0-3
    cluster:
      num_nodes: 2
      node_groups:
        - {label: a, node_ranks: [0, 1]}
      component_placement:
        actor: ${gpus}
        rollout,env: {node_group: [a], placement: 4-7}
    """


def test_a_dictconfig_is_a_configuration():
    placed = ComponentPlacement(OmegaConf.create(dedent(TEXT)), TWO)
    assert placed.components == ["actor", "rollout", "env"]
    assert where(placed, "actor") == [(0, i) for i in range(4)]
    assert where(placed, "rollout") == [(0, i) for i in range(4, 8)]


def test_an_interpolation_in_a_file_needs_omegaconf(write):
    with pytest.raises(PlacementError, match="OmegaConf"):
        ComponentPlacement(load_config(write(TEXT)), TWO)


@pytest.mark.parametrize("value", ["${nowhere}", "${oc.env:ROOST_NO_SUCH_VARIABLE}", "???"])
def test_a_value_that_cannot_be_resolved_is_named(job, value):
    with pytest.raises(ConfigError, match=r"cluster.component_placement.actor could not be resolved"):
        ComponentPlacement(OmegaConf.create(job({"actor": value})), TWO)


def test_a_value_that_nobody_reads_need_not_resolve(job):
    config = OmegaConf.create(job({"actor": "0"}, model={"path": "${nowhere}", "key": "???"}))
    assert ComponentPlacement(config, TWO).components == ["actor"]


@pytest.mark.parametrize(
    ("scalar", "number", "guess"), [("3:0", 180, "3:0"), ("1:30", 90, "1:30"), ("20:59", 1259, "20:59")]
)
def test_the_base_60_trap_is_explained_where_only_the_number_is_left(scalar, number, guess):
    config = OmegaConf.create(f"cluster:\n  component_placement:\n    rollout: {scalar}\n")
    assert config.cluster.component_placement.rollout == number  # that is the trap
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(config, TWO)
    shown = str(caught.value)
    assert str(number) in shown
    assert f'rollout: "{guess}"' in shown
    assert "quote" in shown


def test_the_base_60_trap_is_explained_in_the_long_form(job):
    with pytest.raises(PlacementError, match='"3:0"'):
        ComponentPlacement(job({"rollout": {"placement": 180}}), TWO)


def test_a_quoted_scalar_survives_omegaconf():
    config = OmegaConf.create('cluster: {component_placement: {rollout: "3:0"}}')
    assert where(ComponentPlacement(config, TWO), "rollout") == [(0, 3)]


def test_a_file_is_not_suspected_of_base_60(write):
    path = write("cluster: {component_placement: {rollout: 180}}")
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(load_config(path), TWO)
    assert "quote" not in str(caught.value)


def test_config_reads_like_a_mapping_and_by_attribute(write):
    config = load_config(write(TEXT))
    assert config["cluster"]["num_nodes"] == config.cluster.num_nodes == 2
    assert config.cluster.node_groups[0].node_ranks == [0, 1]
    assert set(config) == {"gpus", "cluster"}
    assert len(config) == 2
    assert config.to_dict()["cluster"]["component_placement"]["actor"] == "${gpus}"
    with pytest.raises(AttributeError):
        _ = config.nothing
    with pytest.raises(KeyError):
        _ = config["nothing"]


def test_config_pickles(write):
    config = load_config(write("cluster: {component_placement: {actor: 0-3}}"))
    again = pickle.loads(pickle.dumps(config))  # noqa: S301
    assert again.to_dict() == config.to_dict()
    assert ComponentPlacement(again, ONE).get_world_size("actor") == 4


def test_the_same_job_in_three_forms(write, robot):
    topology = Topology.parse("2x8:A800+2x8:4090")
    config = load_config(write(HETEROGENEOUS))
    forms = [config, config.to_dict(), OmegaConf.create(config.to_dict())]
    results = [
        {name: where(placed, name) for name in placed.components}
        for placed in (ComponentPlacement(form, topology) for form in forms)
    ]
    assert results[0] == results[1] == results[2]


# Modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "placements", [{"actor,rollout": "0-7"}, {"actor": "0-3", "rollout": "4-7"}, {"actor": "0-5", "rollout": "2-7"}]
)
def test_hybrid_is_hybrid(job, placements):
    placed = HybridComponentPlacement(job(placements), ONE)
    assert placed.placement_mode is PlacementMode.HYBRID
    assert isinstance(placed, ComponentPlacement)


def test_modes_there_are():
    assert {mode.name for mode in PlacementMode} == {"COLLOCATED", "DISAGGREGATED", "HYBRID", "AUTO"}


def test_the_mode_does_not_depend_on_the_order_of_keys(job):
    placements = {
        "actor": "0-3",
        "here": {"placement": "0-3", "role": "rollout"},
        "there": {"placement": "4-7", "role": "rollout"},
    }
    forward = ComponentPlacement(job(placements), ONE)
    backward = ComponentPlacement(job(dict(reversed(placements.items()))), ONE)
    assert forward.placement_mode is backward.placement_mode

"""``cluster.node_groups``: labels, nodes, environments and hardware; every rule of the specification."""

from dataclasses import asdict, dataclass, field, replace
from textwrap import dedent

import pytest
import yaml

from roost import ComponentPlacement, ConfigError, PlacementError, Plan, RoostError, Topology, register_hardware
from roost.topology import Hardware

FOUR = Topology.parse("4x8")


def groups(text, topology=FOUR):
    return topology.with_groups({"node_groups": yaml.safe_load(dedent(text))})


# Labels and nodes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node_ranks", "expected"),
    [
        (0, (0,)),
        ("0", (0,)),
        ("0-3", (0, 1, 2, 3)),
        ("0-1,3", (0, 1, 3)),
        ("3, 0-1", (0, 1, 3)),
        ([0, 1], (0, 1)),  # a list was refused
        ([2, 0], (0, 2)),
        (["0-1", 3], (0, 1, 3)),
        ([3], (3,)),
        (range(2), (0, 1)),
        ("all", (0, 1, 2, 3)),
        (" All ", (0, 1, 2, 3)),
        ("ALL", (0, 1, 2, 3)),
    ],
)
def test_node_ranks(node_ranks, expected):
    topology = FOUR.with_groups({"node_groups": [{"label": "a", "node_ranks": node_ranks}]})
    assert topology.group("a").node_ranks == expected


@pytest.mark.parametrize(
    "node_ranks",
    [
        None, "", "x", "all,0", ["all"], "-1", -1, 4, "0-4", "2-9", [0, 4], "3-0", [0, 0], "0,0", "0-2,1", 1.5, True, {"a": 1}, [[0]],
        [None], [], "0-999999999999", "9" * 5000, float("nan"),
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_node_ranks_that_are_refused(node_ranks):
    with pytest.raises(ConfigError):
        FOUR.with_groups({"node_groups": [{"label": "a", "node_ranks": node_ranks}]})


@pytest.mark.parametrize("label", ["a800", "A800", "with space", "rack/1", "4090", 4090, "ü"])
def test_labels(label):
    topology = FOUR.with_groups({"node_groups": [{"label": label, "node_ranks": 0}]})
    assert topology.has_group(str(label))


@pytest.mark.parametrize("label", ["node", "cluster", "", " ", None, True, "a,b", ["a"], {"a": 1}])
def test_labels_that_are_refused(label):
    with pytest.raises(ConfigError):
        FOUR.with_groups({"node_groups": [{"label": label, "node_ranks": 0}]})


def test_null_is_not_the_label_none():
    with pytest.raises(ConfigError) as caught:
        FOUR.with_groups({"node_groups": [{"label": None, "node_ranks": 0}]})
    assert "None" not in str(caught.value)


@pytest.mark.parametrize("second", ["a", " a"])
def test_labels_are_unique(second):
    with pytest.raises(ConfigError, match="twice"):
        groups(f"[{{label: a, node_ranks: 0}}, {{label: '{second}', node_ranks: 1}}]")


def test_a_number_and_its_text_are_one_label():
    with pytest.raises(ConfigError, match="twice"):
        groups("[{label: 4090, node_ranks: 0}, {label: '4090', node_ranks: 1}]")


def test_labels_are_case_sensitive():
    topology = groups("[{label: a, node_ranks: 0}, {label: A, node_ranks: 1}]")
    assert topology.group("a").node_ranks == (0,)
    assert topology.group("A").node_ranks == (1,)


def test_groups_may_overlap():
    topology = groups("[{label: a, node_ranks: 0-2}, {label: b, node_ranks: 1-3}]")
    assert topology.group("b").node_ranks == (1, 2, 3)


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ("{node_ranks: 0}", "label"),
        ("{label: a}", "node_ranks"),
        ("{label: a, node_rank: 0}", "node_ranks"),
        ("{label: a, node_ranks: 0, envs: []}", "unknown key"),
        ("3", "mapping"),
        ("[a]", "mapping"),
        ("null", "mapping"),
    ],
)
def test_entries_that_are_refused(entry, word):
    with pytest.raises(ConfigError, match=word):
        groups(f"[{entry}]")


def test_node_ranks_are_inside_num_nodes(job):
    cluster = {"num_nodes": 2, "node_groups": [{"label": "a", "node_ranks": "0-2"}]}
    with pytest.raises(RoostError, match="node rank 2 is outside"):
        ComponentPlacement(job({"actor": "0"}, cluster), FOUR)


def test_all_faults_of_all_groups_at_once():
    with pytest.raises(ConfigError) as caught:
        groups("[{label: node, node_ranks: 9}, {label: a, node_ranks: x}, {lable: b, node_ranks: 0}]")
    assert len(caught.value.findings) == 5


# env_configs ------------------------------------------------------------------------------

ENVIRONMENTS = """\
    - label: a
      node_ranks: 0-3
      env_configs:
        - node_ranks: 0-1
          env_vars: [{NCCL_DEBUG: INFO}, {OMP_NUM_THREADS: 8}, {FLAG: true}, {EMPTY: ""}]
          python_interpreter_path: /opt/venv/bin/python
        - node_ranks: [3]
          env_vars: [{NCCL_DEBUG: WARN}]
    - label: b
      node_ranks: 0
      env_configs: [{node_ranks: 0, env_vars: [{NCCL_DEBUG: TRACE}]}]
    """


def test_environments_by_node():
    group = groups(ENVIRONMENTS).group("a")
    assert group.environment(0).variables["NCCL_DEBUG"] == "INFO"
    assert group.environment(1).variables["OMP_NUM_THREADS"] == "8"
    assert group.environment(1).variables["EMPTY"] == ""
    assert group.environment(1).interpreter == "/opt/venv/bin/python"
    assert group.environment(2).variables == {}
    assert group.environment(2).interpreter == ""
    assert group.environment(3).variables == {"NCCL_DEBUG": "WARN"}
    assert group.environment(3).interpreter == ""


def test_a_worker_gets_the_environment_of_its_own_group(job):
    cluster = {"node_groups": yaml.safe_load(dedent(ENVIRONMENTS))}
    placements = {
        "actor": {"node_group": "a", "placement": "0"},
        "rollout": {"node_group": "b", "placement": "0"},
        "env": "0",
    }
    plan = Plan.resolve(job(placements, cluster), FOUR)
    assert plan.environment("actor", 0)["NCCL_DEBUG"] == "INFO"
    assert plan.environment("rollout", 0)["NCCL_DEBUG"] == "TRACE"
    assert "NCCL_DEBUG" not in plan.environment("env", 0)
    assert plan.process("actor", 0).interpreter == "/opt/venv/bin/python"
    assert plan.process("rollout", 0).interpreter == ""


@pytest.mark.parametrize(
    ("env_configs", "word"),
    [
        ("[{node_ranks: 2, env_vars: []}]", "outside"),
        ("[{node_ranks: 0-2, env_vars: []}]", "outside"),
        ("[{node_ranks: 0-999999999999, env_vars: []}]", "outside"),
        ("[{node_ranks: 0-1}, {node_ranks: 1}]", "two env_configs"),
        ("[{env_vars: [{A: 1}]}]", "node_ranks"),
        ("[{node_ranks: 0, vars: [{A: 1}]}]", "unknown key"),
        ("[{node_ranks: 0, env_vars: [{A: 1, B: 2}]}]", "2 names"),
        ("[{node_ranks: 0, env_vars: [{}]}]", "0 names"),
        ("[{node_ranks: 0, env_vars: [A]}]", "env_vars"),
        ("[{node_ranks: 0, env_vars: A=1}]", "env_vars"),
        ("[{node_ranks: 0, env_vars: [{A: 1}, {A: 2}]}]", "twice"),
        ("[{node_ranks: 0, env_vars: [{A: null}]}]", "value"),
        ("[{node_ranks: 0, env_vars: [{A: [1]}]}]", "value"),
        ("[{node_ranks: 0, env_vars: [{'A=B': 1}]}]", "name of a variable"),
        ("[{node_ranks: 0, env_vars: [{'': 1}]}]", "name of a variable"),
        ("[{node_ranks: 0, env_vars: [{1A: 1}]}]", "name of a variable"),
        ('[{node_ranks: 0, env_vars: [{A: "x\\0y"}]}]', "NUL"),
        ("[{node_ranks: 0, env_vars: [{RANK: 1}]}]", "RANK"),
        ("[{node_ranks: 0, env_vars: [{CUDA_VISIBLE_DEVICES: 0}]}]", "CUDA_VISIBLE_DEVICES"),
        ("[{node_ranks: 0, python_interpreter_path: [a]}]", "python_interpreter_path"),
        ("[{node_ranks: 0, python_interpreter_path: ''}]", "python_interpreter_path"),
        ("[3]", "mapping"),
        ("3", "list"),
    ],
)
def test_environments_that_are_refused(env_configs, word):
    with pytest.raises(ConfigError, match=word):
        groups(f"[{{label: a, node_ranks: 0-1, env_configs: {env_configs}}}]")


def test_nodes_of_different_env_configs_may_have_the_same_variable():
    topology = groups("""\
        - label: a
          node_ranks: 0-1
          env_configs: [{node_ranks: 0, env_vars: [{A: 1}]}, {node_ranks: 1, env_vars: [{A: 2}]}]
    """)
    assert [topology.group("a").environment(rank).variables["A"] for rank in (0, 1)] == ["1", "2"]


# hardware ---------------------------------------------------------------------------------


def test_hardware_is_counted_node_by_node(job, robot):
    cluster = {
        "node_groups": [
            {
                "label": "robots",
                "node_ranks": "1-2",
                "hardware": {
                    "type": robot,
                    "configs": [
                        {"node_rank": 2, "robot_ip": "c"},
                        {"node_rank": 1, "robot_ip": "a"},
                        {"node_rank": 1, "robot_ip": "b", "camera": "left", "speed": 2},
                    ],
                },
            }
        ]
    }
    placed = ComponentPlacement(job({"env": {"node_group": "robots", "placement": "all"}}, cluster), FOUR)
    placements = placed.get_strategy("env").get_placement(placed.topology)
    assert [(p.cluster_node_rank, p.local_hardware_ranks) for p in placements] == [(1, (0,)), (1, (1,)), (2, (0,))]
    assert [item.fields["robot_ip"] for _, item in placed.topology.group("robots").hardware] == ["a", "b", "c"]


def test_all_nodes_of_an_environment_are_those_of_its_group():
    topology = groups("[{label: a, node_ranks: 1-2, env_configs: [{node_ranks: ALL, env_vars: [{A: 1}]}]}]")
    (environment,) = topology.group("a").environments
    assert environment.node_ranks == (1, 2)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("BAD", ["the text 'BAD'", "- BAD: value"]),
        ("A=1", ["the text 'A=1'", "- A: value"]),
        ("7", ["env_vars is 7, not a name"]),
        ("null", ["nothing"]),
        ("[A, 1]", ["a list"]),
    ],
)
def test_a_variable_without_a_value_is_named(entry, words):
    with pytest.raises(ConfigError) as caught:
        groups(f"[{{label: a, node_ranks: 0, env_configs: [{{node_ranks: 0, env_vars: [{entry}]}}]}}]")
    assert [finding.code for finding in caught.value.findings] == ["C307"]
    assert "0 names" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("label", [0, 4090, ["cluster"], {"a": 1}, True])
def test_a_group_is_asked_for_by_a_text(label):
    with pytest.raises(PlacementError, match="there is no node group"):
        FOUR.group(label)


def test_no_label_stands_for_all_nodes():
    assert FOUR.group(None) is FOUR.group("cluster")


@dataclass(frozen=True)
class Mount:
    side: str


def robots(label, *configs, nodes="0-1"):
    return {"label": label, "node_ranks": nodes, "hardware": {"type": "UnitRobot", "configs": list(configs)}}


def test_a_robot_belongs_to_one_group(robot):
    one, other = {"node_rank": 0, "robot_ip": "a"}, {"node_rank": 0, "robot_ip": "b"}
    with pytest.raises(ConfigError, match="the same UnitRobot on node 0 is in the node groups 'left' and 'right'"):
        FOUR.with_groups({"node_groups": [robots("left", one, other), robots("right", dict(one))]})
    left = FOUR.with_groups({"node_groups": [robots("left", one)]})
    with pytest.raises(ConfigError, match="'left' and 'right'"):
        left.with_groups({"node_groups": [robots("right", one)]})
    assert left.with_groups({"node_groups": [robots("right", other)]}).has_group("right")
    assert left.with_groups({"node_groups": [robots("left", other), robots("right", one)]}).has_group("right")
    assert left.with_groups({"node_groups": [robots("right", {**one, "node_rank": 1})]}).has_group("right")


@pytest.mark.parametrize("more", [{"camera": ""}, {"speed": 1}, {"speed": 1.0}, {"camera": "", "speed": 1}])
def test_a_robot_is_the_same_with_defaults_written_out(robot, more):
    short = {"node_rank": 0, "robot_ip": "a"}
    with pytest.raises(ConfigError, match="the same UnitRobot on node 0 is in the node groups 'left' and 'right'"):
        FOUR.with_groups({"node_groups": [robots("left", short), robots("right", {**short, **more})]})
    with pytest.raises(ConfigError, match="this UnitRobot on node 0 is listed twice"):
        FOUR.with_groups({"node_groups": [robots("left", {**short, **more}, short)]})


@pytest.mark.parametrize("more", [{"camera": "front"}, {"speed": 2}, {"robot_ip": "b"}])
def test_robots_of_which_a_field_differs_are_two(robot, more):
    short = {"node_rank": 0, "robot_ip": "a"}
    topology = FOUR.with_groups({"node_groups": [robots("left", short), robots("right", {**short, **more})]})
    assert topology.has_group("right")
    assert FOUR.with_groups({"node_groups": [robots("left", short, {**short, **more})]}).has_group("left")


def test_a_robot_that_a_node_found_is_the_same_as_in_a_job():
    @register_hardware("FoundRobot")
    @dataclass
    class FoundRobot:
        robot_ip: str
        mount: Mount = field(default_factory=lambda: Mount("left"))
        joints: list[int] = field(default_factory=list)
        home: Mount = Mount("right")
        model: str = field(init=False, default="m1")

        def __post_init__(self):
            self.model = f"model of {self.robot_ip}"

    carried = Hardware("FoundRobot", asdict(FoundRobot("a")))
    topology = Topology((replace(FOUR.nodes[0], hardware=(carried,)),))
    hardware = {"type": "FoundRobot"}
    mount = {"side": "left"}  # a job must give it: only the class's own function knows the default
    left = {"label": "left", "node_ranks": 0, "hardware": hardware}
    for more in ({}, {"joints": []}, {"home": {"side": "right"}}):
        configs = [{"node_rank": 0, "robot_ip": "a", "mount": mount, **more}]
        right = {"label": "right", "node_ranks": 0, "hardware": {**hardware, "configs": configs}}
        with pytest.raises(ConfigError, match="the same FoundRobot on node 0"):
            topology.with_groups({"node_groups": [left, right]})


def test_robots_that_a_node_carries_belong_to_one_group(robot):
    carried = {"nodes": [{"hardware": [{"type": "UnitRobot", "robot_ip": "a"}]}, {}]}
    hardware = {"type": "UnitRobot"}
    two = [{"label": label, "node_ranks": "all", "hardware": hardware} for label in ("left", "right")]
    assert Topology.from_dict(carried).with_groups({"node_groups": two[:1]}).has_group("left")
    with pytest.raises(ConfigError, match="the same UnitRobot on node 0"):
        Topology.from_dict(carried).with_groups({"node_groups": two})


def test_a_process_with_two_robots_of_two_nodes_is_refused(job, robot):
    configs = [{"node_rank": 1, "robot_ip": "a"}, {"node_rank": 2, "robot_ip": "b"}]
    cluster = {"node_groups": [{"label": "r", "node_ranks": "1-2", "hardware": {"type": robot, "configs": configs}}]}
    with pytest.raises(RoostError, match="span nodes"):
        ComponentPlacement(job({"env": {"node_group": "r", "placement": "0-1:0"}}, cluster), FOUR)
    with pytest.raises(RoostError, match=f"{robot}s"):
        ComponentPlacement(job({"env": {"node_group": "r", "placement": "0-2"}}, cluster), FOUR)


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        ("{type: NeverRegistered, configs: []}", ["NeverRegistered", "register_hardware"]),
        ("{type: UnitRobott}", ["UnitRobot"]),
        ("{configs: []}", ["type"]),
        ("{type: null}", []),
        ("{type: UnitRobot, config: []}", ["configs"]),
        ("{type: UnitRobot, configs: [{robot_ip: a}]}", ["node_rank"]),
        ("{type: UnitRobot, configs: [{node_rank: 0}]}", ["robot_ip"]),
        ("{type: UnitRobot, configs: [{node_rank: 0, robot_ip: a, robot_port: 1}]}", ["robot_port"]),
        ("{type: UnitRobot, configs: [{node_rank: 0, robot_ip: a, camra: left}]}", ["camra", "camera"]),
        ("{type: UnitRobot, configs: [{node_rank: 0, robot_ip: 7}]}", ["robot_ip", "str"]),
        ("{type: UnitRobot, configs: [{node_rank: 0, robot_ip: null}]}", ["robot_ip"]),
        ("{type: UnitRobot, configs: [{node_rank: 0, robot_ip: a, speed: fast}]}", ["speed", "float"]),
        ("{type: UnitRobot, configs: [{node_rank: 2, robot_ip: a}]}", ["node 2"]),
        ("{type: UnitRobot, configs: [{node_rank: 9, robot_ip: a}]}", ["node 9"]),
        ("{type: UnitRobot, configs: [{node_rank: -1, robot_ip: a}]}", ["node_rank"]),
        ("{type: UnitRobot, configs: [{node_rank: x, robot_ip: a}]}", ["node_rank"]),
        ("{type: UnitRobot, configs: [{node_rank: 0, robot_ip: a}, {node_rank: 0, robot_ip: a}]}", ["twice"]),
        ("{type: UnitRobot, configs: [3]}", ["mapping"]),
        ("{type: UnitRobot, configs: 3}", ["list"]),
        ("[UnitRobot]", ["mapping"]),
        ("UnitRobot", ["mapping"]),
    ],
)
def test_hardware_that_is_refused(robot, hardware, words):
    with pytest.raises(ConfigError) as caught:
        groups(f"[{{label: a, node_ranks: 0-1, hardware: {hardware}}}]")
    for word in words:
        assert word in str(caught.value)


def test_unknown_fields_are_reported_in_the_order_of_the_file(robot):
    unknown = [f"field_{letter}" for letter in "zyxwvutsrq"]
    config = {"node_rank": 0, "robot_ip": "a", **dict.fromkeys(unknown, 1)}
    with pytest.raises(ConfigError) as caught:
        FOUR.with_groups(
            {"node_groups": [{"label": "a", "node_ranks": 0, "hardware": {"type": robot, "configs": [config]}}]}
        )
    messages = [str(finding) for finding in caught.value.findings]
    assert len(messages) == len(unknown)
    assert all(name in message for name, message in zip(unknown, messages, strict=True))


def test_a_group_whose_hardware_is_empty_has_nothing_to_place_on(job, robot):
    cluster = {"node_groups": [{"label": "r", "node_ranks": 0, "hardware": {"type": robot, "configs": []}}]}
    with pytest.raises(RoostError, match="nothing to place on"):
        ComponentPlacement(job({"env": {"node_group": "r", "placement": "all"}}, cluster), FOUR)

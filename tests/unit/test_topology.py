"""What there is: short texts, cluster files, JSON, and groups added by a job."""

import dataclasses
import json
import pickle

import pytest
from omegaconf import OmegaConf

from roost import (
    AcceleratorType,
    ConfigError,
    Hardware,
    Node,
    NodeGroup,
    PlacementError,
    RoostError,
    Topology,
    TopologyError,
)

# Short texts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts", "models"),
    [
        ("2x8", [8, 8], ["", ""]),
        ("1x8", [8], [""]),
        ("2x8:H200", [8, 8], ["H200", "H200"]),
        ("1x8:A800+1x4:4090+2x0", [8, 4, 0, 0], ["A800", "4090", "", ""]),
        ("1x0", [0], [""]),
        (" 1 x 2 + 1x1 ", [2, 1], ["", ""]),
        ("1X2", [2], [""]),
    ],
)
def test_parse(text, counts, models):
    topology = Topology.parse(text)
    assert [node.num_accelerators for node in topology.nodes] == counts
    assert [node.accelerator_model for node in topology.nodes] == models
    assert [node.rank for node in topology.nodes] == list(range(len(counts)))
    assert topology.num_nodes == len(counts)
    assert topology.num_accelerators == sum(counts)
    for node in topology.nodes:
        assert node.accelerator_ids == tuple(str(i) for i in range(node.num_accelerators))
        expected = AcceleratorType.NVIDIA if node.num_accelerators else AcceleratorType.NO_ACCEL
        assert node.accelerator_type is expected


@pytest.mark.parametrize(
    ("text", "vendor", "model"),
    [
        ("1x8:AMD/MI300X", AcceleratorType.AMD, "MI300X"),
        ("1x8:Ascend/910B", AcceleratorType.ASCEND, "910B"),
        ("1x8:ascend", AcceleratorType.ASCEND, ""),
        ("1x8:NVIDIA/H200", AcceleratorType.NVIDIA, "H200"),
        ("1x8:H200", AcceleratorType.NVIDIA, "H200"),
    ],
)
def test_parse_vendor(text, vendor, model):
    (node,) = Topology.parse(text).nodes
    assert node.accelerator_type is vendor
    assert node.accelerator_model == model


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "8", "x8", "2x", "2x8x8", "2*8", "-1x8", "2x-8", "0x8", "2.0x8", "2x8+", "+2x8", "2x8++2x8", "2x8:", "2x8,2x8",
        "twoxeight", "٢x8", "99999999x8", "1048577x1", "1x4097", "1x99999", "cluster.yaml", None, 16, ["2x8"],
    ],
)  # fmt: skip
def test_texts_that_are_no_topology(text):
    with pytest.raises(TopologyError) as caught:
        Topology.parse(text)
    assert "2x8" in str(caught.value)


def test_every_bad_part_is_reported():
    with pytest.raises(TopologyError) as caught:
        Topology.parse("2y8+2x8+zzz")
    assert len(caught.value.findings) == 2


# Cluster files ----------------------------------------------------------------------------

FULL = """\
    nodes:
      - name: head
        address: 10.0.0.1
        cpus: 64
        memory_gib: 512
      - count: 2
        name: train
        address: [10.0.0.2, 10.0.0.3]
        cpus: 192
        memory_gib: 2048
        group: a800
        accelerators: {count: 8, model: A800, vendor: NVIDIA, memory_gib: 80}
        labels: {rack: r1, nvlink_domain: 7, anything: else}
      - count: 3
        accelerators: {count: 4, model: 910B, vendor: ascend}
      - accelerators: {ids: [GPU-aa, MIG-bb/1]}
        hardware:
          - {type: UnitRobot, robot_ip: 10.1.0.1, camera: left}
          - {type: NeverRegisteredCamera, device: /dev/video0}
      - accelerators: 2
    node_groups:
      - {label: npu, node_ranks: 3-5}
      - {label: robots, node_ranks: 6, hardware: {type: UnitRobot}}
    """


@pytest.fixture
def full(write, robot):
    return Topology.load(write(FULL, "cluster.yaml"))


def test_load_full_form(full):
    assert full.num_nodes == 8
    assert full.num_accelerators == 16 + 12 + 2 + 2
    head, train, second = full.nodes[:3]
    assert (head.name, head.address, head.cpus, head.memory_gib) == ("head", "10.0.0.1", 64, 512)
    assert head.accelerator_ids == ()
    assert head.accelerator_type is AcceleratorType.NO_ACCEL
    assert (train.name, train.address) == ("train-0", "10.0.0.2")
    assert (second.name, second.address) == ("train-1", "10.0.0.3")
    assert (train.accelerator_model, train.accelerator_memory_gib) == ("A800", 80)
    assert train.labels == {"rack": "r1", "nvlink_domain": "7", "anything": "else"}
    assert {node.accelerator_type for node in full.nodes[3:6]} == {AcceleratorType.ASCEND}
    special = full.nodes[6]
    assert special.accelerator_ids == ("GPU-aa", "MIG-bb/1")
    assert special.hardware == (
        Hardware("UnitRobot", {"robot_ip": "10.1.0.1", "camera": "left"}),
        Hardware("NeverRegisteredCamera", {"device": "/dev/video0"}),
    )
    assert full.nodes[7].accelerator_ids == ("0", "1")
    assert full.nodes[7].accelerator_type is AcceleratorType.NVIDIA


def test_load_groups(full):
    assert full.group("a800").node_ranks == (1, 2)
    assert full.group("npu").node_ranks == (3, 4, 5)
    robots = full.group("robots")
    assert robots.hardware_type == "UnitRobot"  # the machines themselves say what they carry
    assert [(rank, item.fields["robot_ip"]) for rank, item in robots.hardware] == [(6, "10.1.0.1")]
    assert full.group("cluster").node_ranks == full.group("node").node_ranks == tuple(range(8))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("other: 1", "nodes"),
        ("nodes: []", "at least one node"),
        ("nodes: 3", "list"),
        ("nodes: [3]", "mapping"),
        ("nodes: [{cout: 2}]", "count"),
        ("nodes: [{count: 0}]", "count"),
        ("nodes: [{count: -1}]", "count"),
        ("nodes: [{count: two}]", "count"),
        ("nodes: [{count: 99999999}]", "at most"),
        ("nodes: [{count: 2, name: [a]}]", "one per node"),
        ("nodes: [{count: 2, address: 10.0.0.1}]", "address"),
        ("nodes: [{name: a}, {name: a}]", "same name"),
        ("nodes: [{address: 10.0.0.1}, {address: 10.0.0.1}]", "same address"),
        ("nodes: [{name: null, cpus: -1}]", "cpus"),
        ("nodes: [{cpus: .nan}]", "cpus"),
        ("nodes: [{memory_gib: lots}]", "memory_gib"),
        ("nodes: [{accelerators: {count: -1}}]", "count"),
        ("nodes: [{accelerators: {count: 5000}}]", "at most"),
        ("nodes: [{accelerators: eight}]", "mapping"),
        ("nodes: [{accelerators: true}]", "count"),
        ("nodes: [{accelerators: {number: 8}}]", "unknown key"),
        ("nodes: [{accelerators: {count: 8, vendor: NVIDEA}}]", "NVIDIA"),
        ("nodes: [{accelerators: {count: 8, vendor: NO_ACCEL}}]", "vendor"),
        ("nodes: [{accelerators: {count: 8, memory_gib: 0}}]", "memory_gib"),
        ("nodes: [{accelerators: {count: 3, ids: [a, b]}}]", "ids"),
        ("nodes: [{accelerators: {ids: [a, a]}}]", "unique"),
        ("nodes: [{labels: [rack]}]", "labels"),
        ("nodes: [{hardware: [{name: x}]}]", "type"),
        ("nodes: [{hardware: [{type: UnitRobot}]}]", "robot_ip"),
        ("nodes: [{hardware: [3]}]", "mapping"),
        ("nodes: [{group: node}]", "reserved"),
        ("nodes: [{group: 'a,b'}]", "comma"),
        ("nodes: [{}]\nnode_groups: [{label: a, node_ranks: 1}]", "outside"),
        ("nodes: [{}, {}]\nnode_groups: [{label: a, node_ranks: 0}, {label: a, node_ranks: 1}]", "twice"),
        ("nodes: [{group: a}, {}]\nnode_groups: [{label: a, node_ranks: 1}]", "'a'"),
        ("nodes: [{}]\nnode_groups: [{label: a, node_ranks: 0, hardware: {type: NeverRegistered}}]", "not registered"),
    ],
)
def test_cluster_files_that_are_refused(write, robot, text, word):
    with pytest.raises(TopologyError, match=word) as caught:
        Topology.load(write(text, "cluster.yaml"))
    assert all(code.startswith("T") for code in caught.value.codes)
    assert "cluster.yaml" in str(caught.value)


def test_all_problems_of_a_cluster_file_at_once(write):
    with pytest.raises(TopologyError) as caught:
        Topology.load(write("nodes: [{cpus: -1, accelerators: {vendor: Nobody, count: 1}}, {nam: a}]", "cluster.yaml"))
    assert len(caught.value.findings) == 3


def test_one_entry_may_stand_without_a_list(write):
    assert Topology.load(write("nodes: {count: 2, accelerators: 8}", "c.yaml")) == Topology.parse("2x8")


def test_a_cluster_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError):
        Topology.load(tmp_path / "nothing.yaml")


# The value --------------------------------------------------------------------------------


def test_topologies_are_frozen_values(full):
    with pytest.raises(dataclasses.FrozenInstanceError):
        full.nodes = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        full.nodes[0].name = "x"
    with pytest.raises(dataclasses.FrozenInstanceError):
        full.group("a800").label = "x"
    assert Topology.parse("2x8") == Topology.parse("1x8+1x8")
    assert Topology.parse("2x8") != Topology.parse("2x8:H200")
    hash(full)


@pytest.mark.parametrize("text", ["1x0", "2x8", "8x8:A800+8x8:4090+2x0", "1x4:Ascend/910B+3x2:AMD"])
def test_json_round_trip_of_short_texts(text):
    topology = Topology.parse(text)
    assert Topology.from_json(topology.to_json()) == topology
    assert Topology.from_json(topology.to_json()).to_json() == topology.to_json()


def test_json_round_trip_of_everything(full):
    groups = {
        "node_groups": [
            {
                "label": "r",
                "node_ranks": [1, 2],
                "hardware": {"type": "UnitRobot", "configs": [{"node_rank": 2, "robot_ip": "x", "speed": 2}]},
                "env_configs": [
                    {"node_ranks": 1, "env_vars": [{"A": 1}, {"B": ""}], "python_interpreter_path": "/opt/py"}
                ],
            }
        ]
    }
    topology = full.with_groups(groups)
    again = Topology.from_json(topology.to_json())
    assert again == topology
    assert again.to_json() == topology.to_json()
    assert again.group("r").environment(1).variables == {"A": "1", "B": ""}
    assert again.group("r").environment(1).interpreter == "/opt/py"


def test_json_writes_like_nodes_once():
    text = Topology.parse("5000x8:H200").to_json()
    assert len(text) < 1000
    assert json.loads(text)["nodes"][0]["count"] == 5000


def test_topologies_pickle(full):
    again = pickle.loads(pickle.dumps(full))  # noqa: S301
    assert again == full
    assert again.nodes[1].accelerator_type is AcceleratorType.NVIDIA


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"2x8"', "{}", '{"nodes": []}', '{"nodes": [{"rank": 0}]}', "[" * 100_000]
)
def test_texts_that_are_no_topology_in_json(text):
    with pytest.raises(RoostError):
        Topology.from_json(text)


def test_nodes_count_from_0():
    with pytest.raises(TopologyError):
        Topology(())
    with pytest.raises(TopologyError):
        Topology((Node(1),))
    with pytest.raises(TopologyError):
        Topology((Node(0), Node(2)))
    assert Topology((Node(0), Node(1)), (NodeGroup("a", (1,)),)).group("a").node_ranks == (1,)


def test_of_takes_what_carries_a_topology():
    topology = Topology.parse("1x1")

    class Cluster:
        pass

    cluster = Cluster()
    cluster.topology = topology
    assert Topology.of(cluster) is topology
    assert Topology.of(topology) is topology
    with pytest.raises(TopologyError):
        Topology.of(Cluster())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1x1", "1 node x 1 GPU"),
        ("2x8:H200", "2 nodes x 8 GPUs (H200)"),
        ("1x8+2x0", "1 node x 8 GPUs + 2 nodes without GPUs"),
        ("4x8:Ascend/910B", "4 nodes x 8 NPUs (Ascend 910B)"),
    ],
)
def test_describe(text, words):
    assert Topology.parse(text).describe() == words


# with_groups ------------------------------------------------------------------------------

GROUPS = {"node_groups": [{"label": "b", "node_ranks": "1-2"}]}


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: {"cluster": c, "other": 1}, OmegaConf.create])
def test_with_groups_takes_the_section_or_the_whole_job(wrap):
    topology = Topology.parse("3x8")
    more = topology.with_groups(wrap(GROUPS))
    assert more.group("b").node_ranks == (1, 2)
    assert topology.groups == ()  # the old one is as it was
    assert more.nodes == topology.nodes


@pytest.mark.parametrize("config", [{}, {"node_groups": []}, {"node_groups": None}, {"cluster": {}}])
def test_with_no_groups_it_is_the_same(config):
    assert Topology.parse("3x8").with_groups(config) == Topology.parse("3x8")


@pytest.mark.parametrize("config", [None, "a", 3, [1], {"node_groups": 3}, {"node_groups": ["a"]}])
def test_with_groups_refuses(config):
    with pytest.raises(ConfigError):
        Topology.parse("3x8").with_groups(config)


def test_with_groups_keeps_the_clusters_own():
    topology = Topology.parse("3x8").with_groups(GROUPS).with_groups({"node_groups": [{"label": "c", "node_ranks": 0}]})
    assert set(topology.labels) == {"b", "c", "node", "cluster"}


def test_a_job_does_not_move_a_group_of_the_cluster():
    topology = Topology.parse("3x8").with_groups(GROUPS)
    assert topology.with_groups(GROUPS) == topology
    with pytest.raises(ConfigError, match="'b'"):
        topology.with_groups({"node_groups": [{"label": "b", "node_ranks": 0}]})


def test_a_label_that_there_is_not():
    with pytest.raises(PlacementError, match="no node group 'B'"):
        Topology.parse("3x8").with_groups(GROUPS).group("B")

"""Packed, flexible and node strategies, by the tables of the specification."""

import dataclasses
import pickle

import pytest

from roost import (
    AcceleratorType,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Placement,
    PlacementError,
    PlacementStrategy,
    Topology,
    TopologyError,
)

ONE = Topology.parse("1x8")
TWO = Topology.parse("2x8")
MIXED = Topology.parse("1x8:A800+1x8:4090").with_groups(
    {"node_groups": [{"label": "a800", "node_ranks": 0}, {"label": "4090", "node_ranks": 1}]}
)


def hardware(placements):
    return [list(p.local_hardware_ranks) for p in placements]


def nodes(placements):
    return [p.cluster_node_rank for p in placements]


# Packed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "per_process", "stride", "expected"),
    [
        (0, 3, 1, 1, [[0], [1], [2], [3]]),
        (0, 3, 2, 1, [[0, 1], [2, 3]]),
        (0, 3, 2, 2, [[0, 2], [1, 3]]),
        (0, 7, 2, 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (0, 7, 2, 4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (0, 5, 3, 2, [[0, 2, 4], [1, 3, 5]]),
        (4, 7, 2, 2, [[4, 6], [5, 7]]),
        (0, 7, 8, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (0, 3, 1, 4, [[0], [1], [2], [3]]),
        (5, 5, 1, 1, [[5]]),
    ],
)
def test_packed_blocks(start, end, per_process, stride, expected):
    placements = PackedPlacementStrategy(start, end, per_process, stride).get_placement(ONE)
    assert hardware(placements) == expected
    assert [p.rank for p in placements] == list(range(len(expected)))
    assert [p.visible_accelerators for p in placements] == [tuple(map(str, own)) for own in expected]
    assert [p.local_accelerator_rank for p in placements] == [own[0] for own in expected]


def test_packed_goes_on_to_the_next_node():
    placements = PackedPlacementStrategy(6, 9).get_placement(TWO)
    assert [(p.cluster_node_rank, p.local_hardware_ranks) for p in placements] == [
        (0, (6,)),
        (0, (7,)),
        (1, (0,)),
        (1, (1,)),
    ]
    assert [(p.placement_node_rank, p.local_rank, p.local_world_size) for p in placements] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
    ]


def test_packed_on_the_second_node_only_counts_placement_nodes_from_0():
    placements = PackedPlacementStrategy(8, 15, 4).get_placement(TWO)
    assert [(p.cluster_node_rank, p.placement_node_rank, p.local_rank) for p in placements] == [(1, 0, 0), (1, 0, 1)]


def test_packed_passes_over_nodes_without_accelerators():
    uneven = Topology.parse("1x2+2x0+1x4")
    assert nodes(PackedPlacementStrategy(0, 5, 2).get_placement(uneven)) == [0, 3, 3]


@pytest.mark.parametrize(
    ("topology", "start", "end", "per_process", "stride", "process", "node", "count"),
    [
        ("2x8", 7, 8, 2, 1, 0, 0, 8),  # the reference put "GPU 8" on an 8-GPU node
        ("2x5", 0, 9, 2, 1, 2, 0, 5),  # and gave GPUs 4 and 5 of a 5-GPU node
        ("2x8", 4, 11, 8, 1, 0, 0, 8),
        ("2x8", 6, 9, 2, 2, 0, 0, 8),
        ("2x6", 0, 11, 2, 2, 2, 0, 6),
        ("1x4+1x3+1x5", 0, 11, 2, 1, 3, 1, 3),
        ("4x1", 0, 3, 2, 1, 0, 0, 1),
    ],
)
def test_packed_never_spans_nodes(topology, start, end, per_process, stride, process, node, count):
    strategy = PackedPlacementStrategy(start, end, per_process, stride)
    with pytest.raises(PlacementError) as caught:
        strategy.get_placement(Topology.parse(topology))
    message = str(caught.value.findings[0])
    assert f"process {process} " in message
    assert f"node {node} has {count}" in message


def test_packed_names_the_ranges_that_would_fit():
    with pytest.raises(PlacementError) as caught:
        PackedPlacementStrategy(0, 9, 2).get_placement(Topology.parse("2x5"))
    assert "0-3, 5-8" in caught.value.findings[0].fixes[0].paste
    for start, end in [(0, 3), (5, 8)]:
        assert len(PackedPlacementStrategy(start, end, 2).get_placement(Topology.parse("2x5"))) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 2, 2),  # 3 resources, 2 per process
        (0, 3, 2, 4),
        (0, 5, 2, 2),
        (3, 0),
        (-1, 3),
        (0, -1),
        (0, 3, 0),  # was a ZeroDivisionError
        (0, 3, -2),
        (0, 3, 1, 0),
        (0, 3, 1, -1),  # was taken
        (0.0, 3),
        (0, "3"),
        (None, 3),
        (True, 3),
        (0, 2**40),
        (0, 2**24),
    ],
)
def test_packed_refuses_in_its_constructor_what_needs_no_topology(arguments):
    with pytest.raises(PlacementError):
        PackedPlacementStrategy(*arguments)


def test_packed_reports_all_bad_numbers_at_once():
    with pytest.raises(PlacementError) as caught:
        PackedPlacementStrategy(-1, 3, 0, -1)
    assert len(caught.value.findings) == 3


@pytest.mark.parametrize(("start", "end"), [(0, 8), (8, 8), (0, 2**24 - 1)])
def test_packed_refuses_ranks_that_there_are_not(start, end):
    with pytest.raises(PlacementError, match="the last one is 7"):
        PackedPlacementStrategy(start, end).get_placement(ONE)


# Flexible ---------------------------------------------------------------------------------


def test_flexible_example_of_the_reference():
    placements = FlexiblePlacementStrategy([[0, 1], [2], [3]]).get_placement(ONE)
    assert hardware(placements) == [[0, 1], [2], [3]]
    assert [len(p.visible_accelerators) for p in placements] == [2, 1, 1]


def test_flexible_sorts_inside_and_across_without_touching_the_callers_lists():
    lists = [[9, 8], [3], [1, 0]]
    placements = FlexiblePlacementStrategy(lists).get_placement(TWO)
    assert lists == [[9, 8], [3], [1, 0]]
    assert [(p.cluster_node_rank, p.local_hardware_ranks) for p in placements] == [(0, (0, 1)), (0, (3,)), (1, (0, 1))]
    assert [p.rank for p in placements] == [0, 1, 2]


def test_flexible_processes_may_share():
    placements = FlexiblePlacementStrategy([[0], [0], [1], [1]]).get_placement(ONE)
    assert hardware(placements) == [[0], [0], [1], [1]]
    assert [p.local_rank for p in placements] == [0, 1, 2, 3]
    assert {p.local_world_size for p in placements} == {4}


@pytest.mark.parametrize(
    "lists",
    [
        [],
        [[]],  # was a bare IndexError
        [[0], []],
        [[0, 0]],
        [[0], [2, 1, 2]],
        [[-1]],
        [["0"]],
        [[0.0]],
        [[True]],
        [[None]],
        [0, 1],
        [None],
        ["01"],
        "01",
        None,
        7,
        {0: [1]},
    ],
)
def test_flexible_refuses_in_its_constructor(lists):
    with pytest.raises(PlacementError):
        FlexiblePlacementStrategy(lists)


@pytest.mark.parametrize(
    ("topology", "lists", "words"),
    [
        (TWO, [[7, 8]], ["process 0", "node 0", "node 1"]),
        (TWO, [[0], [1, 9]], ["process 1", "node 0", "node 1"]),
        (TWO, [[16]], ["16"]),
        (ONE, [[0], [2**50]], []),
        (Topology.parse("2x0"), [[0, 1]], ["node 0", "node 1"]),
    ],
)
def test_flexible_refuses_against_the_topology(topology, lists, words):
    with pytest.raises(PlacementError) as caught:
        FlexiblePlacementStrategy(lists).get_placement(topology)
    for word in words:
        assert word in str(caught.value)


# Node -------------------------------------------------------------------------------------


def test_node_strategy_sorts_and_reserves_nothing():
    placements = NodePlacementStrategy([1, 0, 1, 0]).get_placement(TWO)
    assert nodes(placements) == [0, 0, 1, 1]
    assert [p.rank for p in placements] == [0, 1, 2, 3]
    assert [p.local_rank for p in placements] == [0, 1, 0, 1]
    assert [p.placement_node_rank for p in placements] == [0, 0, 1, 1]
    for placement in placements:
        assert placement.local_accelerator_rank == -1
        assert list(placement.local_hardware_ranks) in ([], [placement.cluster_node_rank])
        assert placement.visible_accelerators == tuple("01234567")


def test_node_strategy_on_one_node_as_in_the_reference():
    assert [p.rank for p in NodePlacementStrategy([0] * 4).get_placement(ONE)] == [0, 1, 2, 3]


def test_node_strategy_leaves_the_callers_list_alone():
    ranks = [1, 0]
    NodePlacementStrategy(ranks)
    assert ranks == [1, 0]


def test_node_strategy_counts_nodes_inside_its_groups():
    placements = NodePlacementStrategy([0, 0], "4090").get_placement(MIXED)
    assert nodes(placements) == [1, 1]
    assert {p.node_group_label for p in placements} == {"4090"}
    assert [p.placement_node_rank for p in placements] == [0, 0]


def test_node_strategy_on_nodes_without_accelerators():
    (placement,) = NodePlacementStrategy([1]).get_placement(Topology.parse("1x8+1x0"))
    assert placement.visible_accelerators == ()
    assert placement.accelerator_type is AcceleratorType.NO_ACCEL


@pytest.mark.parametrize("ranks", [[], [-1], ["0"], [None], [True], [0.5], None, 3, "01"])
def test_node_strategy_refuses_in_its_constructor(ranks):
    with pytest.raises(PlacementError):
        NodePlacementStrategy(ranks)


def test_node_strategy_refuses_nodes_that_there_are_not():
    with pytest.raises(PlacementError):
        NodePlacementStrategy([0, 2]).get_placement(TWO)


# All of them ------------------------------------------------------------------------------

STRATEGIES = [PackedPlacementStrategy(0, 3), FlexiblePlacementStrategy([[0], [1]]), NodePlacementStrategy([0, 0])]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_isolation_off_shows_every_accelerator_of_the_node(strategy):
    for placement in strategy.get_placement(ONE, isolate_accelerator=False):
        assert placement.visible_accelerators == tuple("01234567")
        assert placement.isolate_accelerator is False


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_older_keyword_isolate_gpu(strategy):
    assert strategy.get_placement(ONE, isolate_gpu=False) == strategy.get_placement(ONE, isolate_accelerator=False)
    assert strategy.get_placement(ONE, isolate_gpu=True) == strategy.get_placement(ONE)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_both_names_of_one_keyword_are_refused(strategy):
    with pytest.raises(PlacementError):
        strategy.get_placement(ONE, isolate_gpu=True, isolate_accelerator=True)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_anything_that_carries_a_topology_will_do(strategy):
    class Cluster:
        topology = TWO

    assert strategy.get_placement(Cluster()) == strategy.get_placement(TWO)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("cluster", [None, 8, "2x8", {"topology": 1}])
def test_what_carries_none_is_refused(strategy, cluster):
    with pytest.raises(TopologyError):
        strategy.get_placement(cluster)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_ids_are_texts_and_ranks_are_ints(strategy):
    for placement in strategy.get_placement(TWO):
        assert all(type(i) is str for i in placement.visible_accelerators)
        assert all(type(i) is int for i in placement.local_hardware_ranks)
        assert placement.node_group_label == "cluster"


def test_older_constructor_names():
    old = PackedPlacementStrategy(start_gpu_id=0, end_gpu_id=3, num_gpus_per_process=2, stride=2)
    assert hardware(old.get_placement(ONE)) == [[0, 2], [1, 3]]
    with pytest.raises(PlacementError):
        PackedPlacementStrategy(start_gpu_id=0, start_hardware_rank=0, end_gpu_id=3)


def test_ids_of_the_driver_are_what_is_visible():
    topology = dataclasses.replace(
        ONE, nodes=(dataclasses.replace(ONE.nodes[0], accelerator_ids=("GPU-a", "GPU-b", "MIG-c/1")),)
    )
    placements = PackedPlacementStrategy(0, 2).get_placement(topology)
    assert [p.visible_accelerators for p in placements] == [("GPU-a",), ("GPU-b",), ("MIG-c/1",)]
    assert hardware(placements) == [[0], [1], [2]]


@pytest.mark.parametrize("label", ["b", ["b"]])
def test_one_group(label):
    topology = TWO.with_groups({"node_groups": [{"label": "b", "node_ranks": 1}]})
    for strategy in (
        PackedPlacementStrategy(0, 1, node_group=label),
        FlexiblePlacementStrategy([[0], [1]], node_group_label=label),
        NodePlacementStrategy([0, 0], node_group_label=label),
    ):
        placements = strategy.get_placement(topology)
        assert nodes(placements) == [1, 1]
        assert {p.node_group_label for p in placements} == {"b"}


def test_several_groups_count_on_from_one_to_the_next():
    placements = PackedPlacementStrategy(0, 15, node_group=["a800", "4090"]).get_placement(MIXED)
    assert [(p.node_group_label, p.cluster_node_rank) for p in placements] == [("a800", 0)] * 8 + [("4090", 1)] * 8
    assert hardware(placements) == [[i] for i in range(8)] * 2


@pytest.mark.parametrize("labels", [["4090", "a800"], "4090,a800", "4090, a800"])
def test_groups_out_of_node_order_keep_their_own_order(labels):
    for strategy in (
        PackedPlacementStrategy(6, 9, node_group=labels),
        FlexiblePlacementStrategy([[9], [8], [7], [6]], node_group_label=labels),
    ):
        placements = strategy.get_placement(MIXED)
        assert [(p.cluster_node_rank, p.local_hardware_ranks) for p in placements] == [
            (1, (6,)),
            (1, (7,)),
            (0, (0,)),
            (0, (1,)),
        ]
        assert [(p.local_rank, p.local_world_size) for p in placements] == [(0, 2), (1, 2), (0, 2), (1, 2)]
        assert [p.placement_node_rank for p in placements] == [0, 0, 1, 1]


@pytest.mark.parametrize("label", ["b", "A800", "a800 4090", ["a800", "x"]])
def test_unknown_labels_are_refused(label):
    with pytest.raises(PlacementError, match="no node group"):
        PackedPlacementStrategy(0, 1, node_group=label).get_placement(MIXED)


def test_an_unknown_label_is_told_its_neighbour():
    with pytest.raises(PlacementError, match="a800"):
        PackedPlacementStrategy(0, 1, node_group="a80").get_placement(MIXED)


@pytest.mark.parametrize("label", ["", ",", ["a", "a"], [None], {"a": 1}, 1.5, True])
def test_labels_that_are_none_are_refused(label):
    with pytest.raises(PlacementError):
        PackedPlacementStrategy(0, 1, node_group=label)


def test_groups_that_count_a_node_twice_are_refused():
    with pytest.raises(PlacementError):
        PackedPlacementStrategy(0, 1, node_group=["cluster", "a800"]).get_placement(MIXED)


def test_a_process_mixes_no_hardware_types(robot):
    topology = ONE.with_groups(
        {
            "node_groups": [
                {"label": "gpus", "node_ranks": 0},
                {
                    "label": "robots",
                    "node_ranks": 0,
                    "hardware": {"type": robot, "configs": [{"node_rank": 0, "robot_ip": "10.0.0.1"}]},
                },
            ]
        }
    )
    both = ["gpus", "robots"]
    with pytest.raises(PlacementError, match=robot):
        FlexiblePlacementStrategy([[7, 8]], both).get_placement(topology)
    with pytest.raises(PlacementError):
        PackedPlacementStrategy(7, 8, 2, node_group=both).get_placement(topology)
    placements = FlexiblePlacementStrategy([[7], [8]], both).get_placement(topology)
    assert [(p.node_group_label, p.local_rank, p.local_world_size) for p in placements] == [
        ("gpus", 0, 2),
        ("robots", 1, 2),
    ]
    assert placements[1].local_accelerator_rank == -1
    assert placements[1].visible_accelerators == tuple("01234567")


def test_a_strategy_of_ones_own():
    class Reversed(PlacementStrategy):
        def get_placement(self, cluster, isolate_accelerator=True):
            return PackedPlacementStrategy(0, 1).get_placement(cluster, isolate_accelerator)[::-1]

    assert [p.rank for p in Reversed().get_placement(ONE)] == [1, 0]
    with pytest.raises(TypeError):
        PlacementStrategy()


# Placement --------------------------------------------------------------------------------

FIELDS = {
    "rank": 3,
    "cluster_node_rank": 2,
    "placement_node_rank": 1,
    "local_accelerator_rank": 4,
    "accelerator_type": AcceleratorType.NVIDIA,
    "local_rank": 0,
    "local_world_size": 2,
    "visible_accelerators": ["4", "5"],
    "isolate_accelerator": True,
    "local_hardware_ranks": [4, 5],
    "node_group_label": "a800",
}


def test_placement_has_exactly_these_eleven_fields():
    assert {field.name for field in dataclasses.fields(Placement)} == set(FIELDS)
    placement = Placement(**FIELDS)
    assert {name: getattr(placement, name) for name in FIELDS} == FIELDS


def test_placement_is_frozen():
    placement = Placement(**FIELDS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        placement.rank = 4
    (made,) = PackedPlacementStrategy(0, 0).get_placement(ONE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.rank = 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("node_id", "cluster_node_rank"),
        ("node_rank", "placement_node_rank"),
        ("local_gpu_id", "local_accelerator_rank"),
        ("cuda_visible_devices", "visible_accelerators"),
        ("isolate_gpu", "isolate_accelerator"),
    ],
)
def test_older_names_can_be_read(old, new):
    assert getattr(Placement(**FIELDS), old) == FIELDS[new]


def test_placements_of_strategies_are_ordinary_values():
    (made,) = PackedPlacementStrategy(0, 0).get_placement(ONE)
    same = Placement(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})
    assert made == same
    assert hash(made) == hash(same)
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301
    assert dataclasses.replace(made, rank=5).rank == 5
    assert type(made) is Placement

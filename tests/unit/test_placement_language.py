"""``resource_ranks[:process_ranks]``: what each text means, and what is refused."""

import pytest

from roost import ComponentPlacement, PlacementError, Topology, load_config

ONE = Topology.parse("1x8")
FOUR = Topology.parse("4x8")


def place(job, text, topology=ONE):
    placed = ComponentPlacement(job({"actor": text}), topology)
    return placed, placed.get_strategy("actor").get_placement(topology)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", [[0]]),
        ("3", [[3]]),
        ("0-3", [[0], [1], [2], [3]]),
        ("0-3:0-3", [[0], [1], [2], [3]]),
        ("0-3:0-7", [[0], [0], [1], [1], [2], [2], [3], [3]]),
        ("0-3:0-1", [[0, 1], [2, 3]]),
        ("0-3:0", [[0, 1, 2, 3]]),
        ("2:0-2", [[2], [2], [2]]),
        ("0-3,5-7", [[0], [1], [2], [3], [5], [6], [7]]),
        ("0-3,4-7", [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ("1,3,5", [[1], [3], [5]]),
        ("0-3:0-3,5-7:4-6", [[0], [1], [2], [3], [5], [6], [7]]),
        ("0-1:0-3,3-5", [[0], [0], [1], [1], [3], [4], [5]]),
        ("0-3:0,4:1-2", [[0, 1, 2, 3], [4], [4]]),
        ("all", [[i] for i in range(8)]),
        ("all:0-3", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("all:0-15", [[i // 2] for i in range(16)]),
        (" 0 - 3 : 0 - 1 ", [[0, 1], [2, 3]]),
        ("0-1 , 4-5", [[0], [1], [4], [5]]),
        ("\t0-1\t:\t0-1", [[0], [1]]),
        (0, [[0]]),
        (7, [[7]]),
    ],
)
def test_meaning(job, text, expected):
    placed, placements = place(job, text)
    assert [list(p.local_hardware_ranks) for p in placements] == expected
    assert [p.rank for p in placements] == list(range(len(expected)))
    assert placed.get_world_size("actor") == len(expected)
    assert placed.get_hardware_ranks("actor") == sorted({rank for own in expected for rank in own})


def test_the_mixed_example_of_the_seeds(job):
    placed, placements = place(job, "0-1:0-3,3-5,7-10:7-14", Topology.parse("2x8"))
    where = [(p.cluster_node_rank, *p.local_hardware_ranks) for p in placements]
    assert where[:4] == [(0, 0), (0, 0), (0, 1), (0, 1)]
    assert where[4:7] == [(0, 3), (0, 4), (0, 5)]
    assert where[7:] == [(0, 7), (0, 7), (1, 0), (1, 0), (1, 1), (1, 1), (1, 2), (1, 2)]
    assert placed.get_world_size("actor") == 15
    assert placed.get_hardware_ranks("actor") == [0, 1, 3, 4, 5, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # not the grammar
        ("", ["missing"]),
        (" ", []),
        (",", []),
        ("0-3,", []),
        (",0-3", []),
        ("0-3,,5", []),
        (":", []),
        ("0-3:", []),
        (":0-3", []),
        ("0:0:0", []),
        ("a", ["'a'"]),
        ("0-3;4-7", []),
        ("0..3", []),
        ("0_7", ["0_7"]),
        ("0-3 4", []),
        ("٣", []),
        ("０", []),
        ("ALL", []),
        ("al", []),
        ("[0, 1]", []),
        ("${oc.env:X}", ["OmegaConf"]),
        # negative
        ("-1", ["negative"]),
        ("-3-5", ["negative"]),
        ("0-3:-1", ["negative"]),
        (-1, ["negative"]),
        # backwards
        ("7-0", ["backwards", "actor: 0-7"]),
        ("0-3:3-0", ["backwards", "actor: 0-3:0-3"]),
        # 'all' is for resources
        ("0-3:all", ["'all'"]),
        ("all:all", ["'all'"]),
        # out of range
        ("0-8", ["8 GPUs", "the last one is 7"]),
        ("8", ["the last one is 7"]),
        ("0-7,8-15", ["the last one is 7"]),
        # one count must divide the other
        ("0-3:0-2", ["3 processes", "4 GPUs"]),
        ("0-3:0-4", ["5 processes", "4 GPUs"]),
        ("0-4:0-1", ["2 processes", "5 GPUs"]),
        ("0-1:0-200", ["201 processes"]),
        # resource ranks ascend and do not repeat
        ("4-7,0-3", ["ascend"]),
        ("0-3,3-5", ["do not repeat"]),
        ("0,0", ["do not repeat"]),
        ("all,0", ["do not repeat"]),
        ("0-3:0-3,0-3:4-7", ["do not repeat"]),
        # process ranks are contiguous from 0
        ("0-3:4-7", ["start at 4", "0-3:0-3"]),
        ("0-3:1-4", ["start at 0"]),
        ("0-3:0-3,4-7:5-8", ["process 4 is missing"]),
        ("0-3:0-3,4-7:3-6", ["process 3 is placed twice"]),
        ("0-1:2-3,2-3:0-1", []),
        ("0-3,5-7:0-6", ["0-3:0-3,5-7:4-6"]),
        ("0,2,4:0-2", ["0:0,2:1,4:2"]),
        # typing errors
        ("0-999999999999", ["typing error"]),
        ("0-9999999999999999999", []),
        ("0:0-999999999999", ["typing error"]),
        (f"0:0-{2**24}", ["typing error"]),
        ("0-999999999999:0", ["the last one is 7"]),
        ("9" * 10_000, []),
        # not a text at all
        (None, ["null"]),
        (True, ["not true"]),
        (1.5, ["1.5"]),
        (float("nan"), ["nan"]),
        (float("inf"), ["inf"]),
        ([0, 1], ["a list", '"0,1"']),
        ([], ["a list"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_refusals(job, text, words):
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(job({"actor": text}), ONE)
    shown = str(caught.value)
    for word in words:
        assert word in shown
    assert all(finding.code.startswith("P") for finding in caught.value.findings)


def test_the_limit_of_processes_is_2_to_the_24(job):
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(job({"actor": f"0:0-{2**24 - 1},1:{2**24}"}), ONE)
    assert caught.value.codes == ("P103",)
    with pytest.raises(PlacementError) as caught:  # as many as allowed: only the ranks are at fault
        ComponentPlacement(job({"actor": f"0-{2**24 - 1}"}), ONE)
    assert caught.value.codes == ("P105",)


@pytest.mark.parametrize("text", ["0-3:0-3,5-7:4-6", "0:0,2:1,4:2", "0-7", "0-3:0-3", "0-3:0-1"])
def test_what_a_help_line_offers_is_accepted(job, text):
    ComponentPlacement(job({"actor": text}), ONE)


def test_several_faults_of_one_text_are_all_reported(job):
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(job({"actor": "x,7-0,-1"}), ONE)
    assert len(caught.value.findings) == 3


def test_faults_of_several_components_are_all_reported(job):
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(job({"actor": "0-3:0-2", "rollout": "0-8", "env": "0-3:4-7"}), ONE)
    assert set(caught.value.codes) == {"P104", "P105", "P107"}


def test_a_text_full_of_nonsense_gets_a_bounded_answer(job):
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(job({"actor": "x," * 100_000}), ONE)
    assert len(caught.value.findings) <= 100
    assert len(str(caught.value)) < 100_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4-11:0", ["process 0", "node 0", "node 1"]),
        ("6-9:0", ["process 0"]),
        ("0-11:0-1", ["process 1"]),
        ("0-7:0,8-15:1-2,20-27:3", ["process 3", "node 2", "node 3"]),
        ("7-8:0", ["process 0"]),
    ],
)
def test_a_process_spans_no_nodes(job, text, words):
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(job({"actor": text}), FOUR)
    for word in words:
        assert word in str(caught.value)


def test_a_segment_may_span_nodes_where_no_process_does(job):
    _, placements = place(job, "4-11:0-1", FOUR)
    assert [(p.cluster_node_rank, p.local_hardware_ranks) for p in placements] == [(0, (4, 5, 6, 7)), (1, (0, 1, 2, 3))]


# On nodes ---------------------------------------------------------------------------------

NODES = Topology.parse("4x0")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("0-3", [1, 1, 1, 1]),
        ("all", [1, 1, 1, 1]),
        ("0-1:0-3", [2, 2, 0, 0]),
        ("0-1:0-2", [2, 1, 0, 0]),
        ("0-3:0-8", [3, 2, 2, 2]),
        ("0-3:0-10", [3, 3, 3, 2]),
        ("0-1:0-200,2-3:201-511", [101, 100, 156, 155]),
        ("1:0-4,3", [0, 5, 0, 1]),
    ],
)
def test_processes_spread_over_nodes_as_evenly_as_possible(job, text, counts):
    _, placements = place(job, text, NODES)
    assert [sum(p.cluster_node_rank == node for p in placements) for node in range(4)] == counts
    assert [p.cluster_node_rank for p in placements] == sorted(p.cluster_node_rank for p in placements)


@pytest.mark.parametrize("text", ["0-1:0", "0-3:0-1", "0-3:0-2", "all:0", "0,1-3:1"])
def test_a_process_lives_on_one_node(job, text):
    with pytest.raises(PlacementError, match="nodes"):
        ComponentPlacement(job({"agent": text}), NODES)


def test_uneven_nodes_leave_a_note_and_even_ones_none(job):
    uneven = ComponentPlacement(job({"agent": "0-1:0-200,2-3:201-511"}), NODES)
    assert len(uneven.notes) == 2
    assert "201" in str(uneven.notes[0])
    assert not any(note.is_problem for note in uneven.notes)
    assert ComponentPlacement(job({"agent": "0-1:0-3"}), NODES).notes == []


# As files have it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scalar", "hardware"),
    [
        ("3:0", [[3]]),
        ("'3:0'", [[3]]),
        ('"3:0"', [[3]]),
        ("1:0-29", [[1]] * 30),
        ("0", [[0]]),
        ("010", [[10]]),
        ("0-3, 5", [[0], [1], [2], [3], [5]]),
        ("0-1,\n      4-5", [[0], [1], [4], [5]]),
        (">-\n      0-1,\n      4-5", [[0], [1], [4], [5]]),
        (">\n      0-1,\n      4-5\n", [[0], [1], [4], [5]]),
        ("|\n      0-1,\n      4-5\n", [[0], [1], [4], [5]]),
    ],
)
def test_scalars_of_a_file_are_read_as_they_are_written(write, scalar, hardware):
    path = write(f"cluster:\n  component_placement:\n    actor: {scalar}\n")
    placed = ComponentPlacement(load_config(path), Topology.parse("1x16"))
    placements = placed.get_strategy("actor").get_placement(placed.topology)
    assert [list(p.local_hardware_ranks) for p in placements] == hardware


@pytest.mark.parametrize("scalar", ["1:30", "0_7", "0x3", "1e3", "null", "~", "", "yes", ".nan", "2024-01-01", "1.0"])
def test_scalars_of_a_file_that_are_no_placement(write, scalar):
    path = write(f"cluster:\n  component_placement:\n    actor: {scalar}\n")
    with pytest.raises(PlacementError):
        ComponentPlacement(load_config(path), Topology.parse("2x64"))


@pytest.mark.parametrize(
    ("scalar", "column", "marked"),
    [
        ("0-3:0-2", 16, "0-2"),
        ("'0-3:0-2'", 17, "0-2"),
        ('"0-3:0-2"', 17, "0-2"),
        ("0-3, 9-12", 17, "9-12"),
        ("'0-3:  4-7'", 19, "4-7"),
    ],
)
def test_the_culprit_is_marked_in_its_line(write, scalar, column, marked):
    path = write(f"cluster:\n  component_placement:\n    actor: {scalar}\n")
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(load_config(path), ONE)
    (finding,) = caught.value.findings
    assert (finding.place.file, finding.place.line, finding.place.column) == (str(path), 3, column)
    mark = next(mark for mark in finding.marks if mark.primary)
    assert finding.place.source[mark.column - 1 : mark.column - 1 + mark.length] == marked
    assert f"{path}:3:{column}" in str(caught.value)

"""The rank grammar: parse, format, refuse."""

import pytest

from roost.errors import RankError
from roost.ranks import format_ranks, parse_range, parse_ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [0]),
        ("3", [3]),
        ("007", [7]),
        ("0-3", [0, 1, 2, 3]),
        ("5-5", [5]),
        (" 0-3 ", [0, 1, 2, 3]),
        ("0 - 3", [0, 1, 2, 3]),
        ("\t2\t-\t4", [2, 3, 4]),
    ],
)
def test_one_rank_or_one_range(text, ranks):
    assert list(parse_range(text)) == ranks


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("0-3,5-7", [range(4), range(5, 8)]),
        ("1, 3 ,9-10", [range(1, 2), range(3, 4), range(9, 11)]),
        ("8-9,0", [range(8, 10), range(1)]),
    ],
)
def test_lists_are_kept_as_written(text, ranges):
    assert list(parse_ranks(text)) == ranges


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "-", "-1", "-3-5", "0--3", "0-", "0-3-5", "a", "0x3", "1.5", "1e3", "0_7", "+3", "3:0", "all", "0..3",
        "0 3", "٣", "０-３", "²", "0–3", "0−3", "0\u00a0-3;",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(RankError):
        parse_range(text)


def test_a_backward_range_suggests_the_forward_one():
    with pytest.raises(RankError, match="backwards") as caught:
        parse_range("7-0")
    assert caught.value.suggestion == "0-7"


@pytest.mark.parametrize("text", ["0-9999999999999", "0-" + "9" * 5000, "9" * 100_000, "0" * 5000])
def test_absurd_numbers_are_refused_before_they_are_computed(text):
    with pytest.raises(RankError) as caught:
        parse_range(text)
    assert len(str(caught.value)) < 200


def test_a_range_of_a_million_million_costs_nothing():
    assert len(parse_range("0-999999999999")) == 10**12


@pytest.mark.parametrize(
    ("text", "offset", "length"),
    [("0-3,x", 4, 1), ("0-3,,5", 4, 1), ("0, -2", 3, 2), ("1,9-4", 2, 3)],
)
def test_an_error_points_at_its_item(text, offset, length):
    with pytest.raises(RankError) as caught:
        parse_ranks(text)
    assert (caught.value.offset, caught.value.length) == (offset, length)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1, 2, 5], "0-2,5"),
        ([4, 6, 8], "4,6,8"),
        ([0, 1, 7, 8, 9], "0-1,7-9"),
        (range(8), "0-7"),
    ],
)
def test_format_is_the_shortest_text(ranks, text):
    assert format_ranks(ranks) == text


@pytest.mark.parametrize("text", ["0", "0-7", "0-2,5", "1,3,5-6,9"])
def test_format_inverts_parse(text):
    assert format_ranks(rank for run in parse_ranks(text) for rank in run) == text

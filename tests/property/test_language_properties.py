"""The rank grammar and the placement language: parse and format undo each other."""

from __future__ import annotations

from itertools import chain, pairwise
from string import whitespace

import pytest
from generators import SLIPS, mutated, near_texts
from hypothesis import given
from hypothesis import strategies as st

from roost import Topology
from roost.errors import RankError
from roost.placement.language import Segment, format_segments, parse_placement
from roost.placement.resources import Resources
from roost.ranks import format_ranks, parse_ranks
from roost.source import Tree

RESOURCES = Resources(Topology.parse("1x4000"))


@given(st.sets(st.integers(0, 300)))
def test_ranks_survive_being_written_and_read(ranks: set[int]) -> None:
    text = format_ranks(sorted(ranks))
    if not ranks:
        assert text == ""
        return
    assert list(chain.from_iterable(parse_ranks(text))) == sorted(ranks)
    assert format_ranks(chain.from_iterable(parse_ranks(text))) == text


@given(st.sets(st.integers(0, 300), min_size=1))
def test_the_text_of_ranks_is_the_shortest(ranks: set[int]) -> None:
    ranges = parse_ranks(format_ranks(sorted(ranks)))
    assert all(after[0] > before[-1] + 1 for before, after in pairwise(ranges))


@given(mutated(st.sets(st.integers(0, 99), min_size=1).map(sorted).map(format_ranks), SLIPS))
def test_what_is_not_ranks_is_refused_where_it_stands(text: str) -> None:
    error = None
    try:
        ranges = parse_ranks(text)
    except RankError as raised:
        error = raised
    if error is None:
        assert set(text) <= set("0123456789-,") | set(whitespace)
        assert all(len(run) for run in ranges)
        return
    assert 0 <= error.offset <= len(text)
    assert error.offset + error.length <= max(1, len(text)) + 1
    assert str(error)
    if error.suggestion:
        assert parse_ranks(error.suggestion)


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    """Segments that keep all rules: resources ascend, processes go on, one count divides the other."""
    made = []
    resource = process = 0
    for _ in range(draw(st.integers(1, 8))):
        resource += draw(st.integers(0, 3))
        per_process, processes = draw(st.sampled_from([(1, 1), (2, 1), (3, 2), (1, 5), (8, 4), (1, 8)]))
        shared = draw(st.booleans())
        count = processes if shared else per_process * processes
        number = processes * per_process if shared else processes
        explicit = count != number or draw(st.booleans())
        made.append(Segment(range(resource, resource + count), range(process, process + number), explicit))
        resource += count
        process += number
    return made


def _parsed(text: str) -> list[Segment]:
    findings: list = []
    segments = parse_placement(Tree(text), "actor", RESOURCES, findings)
    assert not findings, findings[0].render()
    return segments


def _bare(segments: list[Segment]) -> list[tuple[range, range, bool]]:
    return [(segment.resources, segment.processes, segment.explicit) for segment in segments]


@given(segment_lists())
def test_segments_survive_being_written_and_read(segments: list[Segment]) -> None:
    text = format_segments(segments)
    assert _bare(_parsed(text)) == _bare(segments)
    assert format_segments(_parsed(text)) == text


@given(segment_lists(), st.data())
def test_spaces_do_not_matter(segments: list[Segment], data: st.DataObject) -> None:
    text = format_segments(segments)
    spaced = "".join(
        f"{data.draw(st.sampled_from(['', ' ', '  ']))}{c}{data.draw(st.sampled_from(['', ' ', '	']))}"
        if c in "-:,"
        else c
        for c in text
    )
    assert _bare(_parsed(f" {spaced} ")) == _bare(segments)


@given(segment_lists())
def test_segments_know_where_they_stand(segments: list[Segment]) -> None:
    text = format_segments(segments)
    for segment, part in zip(_parsed(text), text.split(","), strict=True):
        left, _, right = part.partition(":")
        assert text[segment.offset : segment.offset + segment.resource_length] == left
        if segment.explicit:
            assert text[segment.process_offset : segment.process_offset + segment.process_length] == right


@given(near_texts(total=40))
def test_what_is_read_can_be_written_and_read_again(text: str) -> None:
    findings: list = []
    segments = parse_placement(Tree(text), "actor", RESOURCES, findings)
    if findings:
        assert all(finding.place is not None and finding.marks for finding in findings)
        return
    again = _parsed(format_segments(segments))
    assert _bare(again) == _bare(segments)
    shares = [share for segment in segments for share in segment.resources_of_processes(on_nodes=False)]
    assert len(shares) == segments[-1].processes[-1] + 1


@pytest.mark.parametrize("text", ["0-3,5", "0-1:0-3,3-5,7-10:7-14", "0-7:0-1", "0:0-7,1-2"])
def test_canonical_texts_stay_as_they_are(text: str) -> None:
    assert format_segments(_parsed(text)) == text

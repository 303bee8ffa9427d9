"""The tree of errors, their text, and their way through a pickle."""

import pickle
import re
from pathlib import Path

import pytest

import roost
from roost import (
    ComponentPlacement,
    ConfigError,
    Finding,
    PlacementError,
    RoostError,
    Topology,
    TopologyError,
    errors,
    load_config,
)
from roost.errors import Fix, Mark, Place, did_you_mean, raise_problems

EVERY = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
FULL = Finding(
    "P104",
    "actor: a message",
    Place("cluster.x", "job.yaml", 3, 12, "    actor: 0-3:0-2"),
    (Mark(16, 3, "3 processes"), Mark(12, 3, "4 GPUs", primary=False)),
    ("cluster: 2 nodes x 8 GPUs",),
    "one count must divide the other",
    (Fix("one process per GPU", "actor: 0-3:0-3"), Fix("or nothing")),
)


def test_one_base():
    assert {ConfigError, TopologyError, PlacementError, RoostError} <= set(EVERY)
    for kind in EVERY:
        assert issubclass(kind, RoostError)


def test_what_older_code_catches():
    assert issubclass(PlacementError, ValueError)
    assert issubclass(PlacementError, AssertionError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(TopologyError, ValueError)
    assert not issubclass(ConfigError, AssertionError)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_pickles(kind, protocol):
    error = kind([FULL, Finding("C101", "more")])
    again = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301
    assert type(again) is kind
    assert again.findings == error.findings
    assert str(again) == str(error)


def test_a_real_error_pickles(write):
    path = write("cluster: {num_node: 1, component_placement: {actor: 0-3:0-2, 'b c': 9}}")
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(load_config(path), Topology.parse("1x8"))
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert str(again) == str(caught.value)
    assert again.codes == caught.value.codes


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_a_plain_text_is_one_finding(kind):
    error = kind("something is wrong")
    assert "something is wrong" in str(error)
    assert len(error.findings) == 1


def test_the_shape_of_the_architecture(write, monkeypatch):
    """The example of architecture.md, word for word."""
    path = write("cluster:\n  component_placement:\n    actor: 0-3:0-2\n")
    monkeypatch.chdir(path.parent)
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(load_config("job.yaml"), Topology.parse("2x8"))
    assert (
        str(caught.value)
        == """\
error[P104]: actor: 3 processes cannot be spread evenly over 4 GPUs
  --> job.yaml:3:16  (cluster.component_placement.actor)
   |
 3 |     actor: 0-3:0-2
   |            ~~~ ^^^ 3 processes (0, 1, 2)
   |            4 GPUs (node 0: 0, 1, 2, 3)
   = cluster: 2 nodes x 8 GPUs
   = rule: one count must divide the other
help: one process per GPU     actor: 0-3:0-3
help: two GPUs per process    actor: 0-3:0-1"""
    )


def test_a_note_is_called_a_note():
    note = Finding("N101", "it is so", severity="note")
    assert note.render() == "note[N101]: it is so"
    assert not note.is_problem


def test_a_finding_without_a_file_shows_the_value():
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement({"cluster": {"component_placement": {"actor": "0-3:0-2"}}}, Topology.parse("1x8"))
    shown = str(caught.value)
    assert "--> cluster.component_placement.actor" in shown
    assert "| 0-3:0-2\n" in shown


def test_many_findings_are_counted():
    error = ConfigError([Finding("C201", f"number {i}") for i in range(500)])
    assert len(error.findings) == 500
    assert "number 0" in str(error)
    assert "number 499" not in str(error)
    assert "480" in str(error)


@pytest.mark.parametrize(
    ("mark", "source"),
    [
        (Mark(1, 1), ""),
        (Mark(5, 100), "abc"),
        (Mark(500, 3), "x" * 1000),
        (Mark(1, 1000), "x" * 1000),
        (Mark(2, 3), "a\tb\x1b[31mc"),
        (Mark(99_999, 1), "short"),
        (Mark(3, 2), "日本語のテキスト"),
    ],
)
def test_rendering_never_fails_and_stays_narrow(mark, source):
    text = Finding("C101", "m", Place("p", "f", 7, mark.column, source), (mark,)).render()
    assert max(map(len, text.splitlines())) < 200
    assert "\x1b" not in text


def test_carets_stand_under_the_culprit_in_a_long_line():
    source = "a" * 300 + "CULPRIT" + "b" * 300
    lines = Finding("C101", "m", Place("", "f", 1, 301, source), (Mark(301, 7),)).render().splitlines()
    shown, carets = lines[-2], lines[-1]
    assert shown[carets.index("^") : carets.rindex("^") + 1] == "CULPRIT"


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (["P101"], PlacementError),
        (["C101"], ConfigError),
        (["T101"], TopologyError),
        (["C101", "P101", "T101"], PlacementError),
        (["C101", "T101"], ConfigError),
    ],
)
def test_collected_faults_choose_their_error(codes, kind):
    with pytest.raises(kind) as caught:
        raise_problems([Finding("N101", "a note", severity="note"), *(Finding(code, code) for code in codes)])
    assert type(caught.value) is kind
    assert list(caught.value.codes) == codes  # notes are left out


def test_notes_alone_raise_nothing():
    raise_problems([])
    raise_problems([Finding("N101", "a note", severity="note")])


@pytest.mark.parametrize(
    ("word", "known", "near"),
    [
        ("rolout", ["actor", "rollout"], "rollout"),
        ("A800", ["a800", "4090"], "a800"),
        ("zzz", ["actor", "rollout"], None),
        ("", ["actor"], None),
        ("x" * 10_000, ["x"], None),
    ],
)
def test_did_you_mean(word, known, near):
    assert did_you_mean(word, known) == near


def sources():
    """The text of every module of the pure rooms, by name."""
    root = Path(roost.__file__).parent
    rooms = ["source", "hardware", "topology", "config", "placement", "plan"]
    files = [root / "errors.py", root / "ranks.py", *(file for room in rooms for file in (root / room).rglob("*.py"))]
    return {str(file.relative_to(root)): file.read_text() for file in files}


def test_codes_have_one_form():
    """A letter and three digits; the letter says which error it makes."""
    codes = re.findall(r"Finding\(\s*\"([^\"]*)\"", "\n".join(sources().values()))
    assert len(codes) > 30
    assert [code for code in codes if not re.fullmatch(r"[CKNPRST][0-9]{3}", code)] == []


def test_no_user_error_is_an_assert():
    assert [name for name, text in sources().items() if re.search(r"^\s*assert ", text, re.MULTILINE)] == []

"""What a job file, a path or a worker says reaches the terminal as text: it commands nothing there."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.text import Text

import roost
from roost.cli import output
from roost.cli.output import spelled_out
from roost.errors import Finding, Fix, Place, WorkerError, printable
from roost.report.columns import align

ESCAPES = {
    "ANSI": "\x1b[2J\x1b[31m",
    "OSC with a bell": "\x1b]0;title\x07",
    "C1": "\x9b31m\x9d0;title\x9c",
    "carriage return": "good\rbad",
    "backspace": "a\x08b",
    "right to left": "\u202egnp.exe",
    "half a pair": "\udc80",
}
ORDINARY = "日本語 Ünïcödé 👩‍👩‍👧 עברית ✓ a\u00a0b\ttab\nnewline"


def is_clean(text: str) -> bool:
    return not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c == "\u202e" for c in text)


@pytest.mark.parametrize("evil", ESCAPES.values(), ids=ESCAPES)
def test_control_characters_are_spelled_out(evil: str) -> None:
    found = printable(f"before{evil}after")
    assert is_clean(found)
    assert found.encode("utf-8")
    assert found.encode().decode("unicode_escape", "surrogatepass").startswith("before")


def test_the_spelling_is_that_of_python() -> None:
    assert printable("\x1b]0;x\x07\x9b\u202e\udc80\r") == r"\x1b]0;x\x07\x9b\u202e\udc80\r"


def test_ordinary_text_stays_as_it_is() -> None:
    assert printable(ORDINARY) == ORDINARY


@pytest.mark.parametrize("evil", ESCAPES.values(), ids=ESCAPES)
def test_errors_are_clean_whatever_they_quote(evil: str) -> None:
    place = Place(f"path{evil}", f"file{evil}", 1, 1, f"source{evil}")
    fixes = (Fix(f"do{evil}", f"paste{evil}"), Fix(f"do{evil}"))
    finding = Finding("C101", f"message{evil}", place, (), (f"context{evil}",), f"rule{evil}", fixes)
    error = WorkerError([finding], "group", 0, 0, f"trace{evil}")
    assert is_clean(str(error))
    assert str(error).encode()
    assert pickle.loads(pickle.dumps(error)).findings == (finding,)  # noqa: S301  (what is kept is what was said)


def test_styled_text_keeps_its_styles_around_what_is_spelled_out() -> None:
    text = Text.assemble(("red\x1b[2J", "red"), " and ", ("blue", "blue"))
    found = spelled_out(text)
    assert found.plain == r"red\x1b[2J and blue"
    assert {found.plain[span.start : span.end] for span in found.spans if "red" in str(span.style)} >= {"red", "[2J"}
    assert [found.plain[span.start : span.end] for span in found.spans if "blue" in str(span.style)] == ["blue"]
    clean = Text("clean")
    assert spelled_out(clean) is clean


def test_a_long_styled_text_takes_no_longer_than_it_must() -> None:
    text = Text()
    for _ in range(5_000):
        text.append("\x1bx", style="red")
    began = time.process_time()
    assert spelled_out(text).plain == r"\x1bx" * 5_000
    assert time.process_time() - began < 30


def test_columns_line_up_after_spelling_out() -> None:
    lines = align([["head", "second"], ["a\x1bb", "x"], ["plain", "y"]]).plain.splitlines()
    assert lines[1].index("x", 8) == lines[2].index("y")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_views_are_clean_on_a_terminal_and_in_a_pipe(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    output.print_view(Text("name\x1b]0;title\x07", style="bold"))
    output.print_view("name\x9b2J")
    output.print_notes([Finding("N101", "a note\x1b[2J", fixes=(Fix("do\x07"),), severity="note")])
    assert "\x1b]" not in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()
    assert "\x9b" not in stream.getvalue()
    assert r"\x1b" in stream.getvalue()


# The commands ------------------------------------------------------------------------------

LABEL = r"a\e[2J\e]0;owned\x07\x9b31m"
GOOD_JOB = f"""
cluster:
  num_nodes: 1
  node_groups:
    - {{label: "{LABEL}", node_ranks: 0}}
  component_placement:
    actor: {{node_group: "{LABEL}", placement: 0-3}}
    rollout: 4-7
"""
BAD_JOB = GOOD_JOB.replace("actor:", r'"actor\e[31m":').replace("rollout: 4-7", r'rollout: "4-\e]0;x\x9b"')


def run(*arguments: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "roost", *arguments],
        cwd=cwd, env={**os.environ, **env}, capture_output=True, check=False,
    )  # fmt: skip
    text = done.stdout.decode() + done.stderr.decode()
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("command", "job"),
    [(["plan"], GOOD_JOB), (["explain"], GOOD_JOB), (["validate"], BAD_JOB)],
    ids=lambda value: value[0],
)
@pytest.mark.parametrize("colour", ["NO_COLOR", "FORCE_COLOR"])
def test_commands_print_nothing_that_a_terminal_obeys(
    command: list[str], job: str, colour: str, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(job)
    process = ["actor[0]"] if command == ["explain"] else []
    text = run(*command, "job.yaml", *process, "--cluster", "1x8", cwd=tmp_path, **{colour: "1"})
    assert r"\x1b" in text
    for found in ("\x1b[2J", "\x1b]", "\x07", "\x9b"):
        assert found not in text
    if colour == "NO_COLOR":
        assert is_clean(text)


def test_json_says_the_same_and_commands_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD_JOB)
    text = run("plan", "job.yaml", "--cluster", "1x8", "--json", cwd=tmp_path)
    assert is_clean(text)
    plan = roost.Plan.resolve(roost.load_config(tmp_path / "job.yaml"), roost.Topology.parse("1x8"))
    assert roost.Plan.from_json(text) == plan
    assert "\x9b" in plan.to_json()


@pytest.mark.parametrize("name", ["no\x1b[2Jfile.yaml", "no\x9b2Jfile.yaml"])
def test_paths_and_arguments_are_quoted_without_commands(name: str, tmp_path: Path) -> None:
    assert is_clean(run("plan", name, "--cluster", "1x8", cwd=tmp_path, NO_COLOR="1"))
    assert is_clean(run("plan", name, f"--unknown{name}", cwd=tmp_path, NO_COLOR="1"))

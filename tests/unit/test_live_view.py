"""Jobs that run, drawn from made-up states; and traces of made-up calls."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from roost.cli.files import write_file
from roost.cli.inputs import UsageError
from roost.errors import RoostError
from roost.plan.states import (
    AcceleratorStatus,
    Call,
    CallError,
    GroupStatus,
    JobStatus,
    NodeStatus,
    RankStatus,
    RankTimeline,
)
from roost.report.live import draw_jobs
from roost.report.live_page import draw_status_page
from roost.report.live_parts import doing, duration, one_line, usage_text
from roost.report.trace import trace_events
from roost.worker.calls import KEPT, CallRecord, describe_error

OWNER = {"user": "ada", "host": "box", "pid": 7, "since": "2026-01-01 10:00:00", "namespace": "mine"}


def rank(number: int, state: str = "ready", node: int = 0, gpus: tuple[int, ...] = (), **facts: Any) -> RankStatus:
    return RankStatus(number, node, "10.0.0.1", 1000 + number, gpus, state=state, **facts)


def job(*groups: GroupStatus, nodes: int = 1, gpus: int = 4, usage: AcceleratorStatus | None = None) -> JobStatus:
    there = tuple(
        NodeStatus(n, f"10.0.0.{n}", f"node-{n}", "", (usage or AcceleratorStatus(),) * gpus) for n in range(nodes)
    )
    return JobStatus(OWNER, f"{nodes} nodes x {gpus} GPUs", groups, there)


def many(count: int, per_node: int = 8) -> JobStatus:
    ranks = [rank(n, "busy", n // per_node, (n % per_node,), call="step", since_s=n / 10) for n in range(count)]
    ranks[5] = rank(5, "dead", 0, (5,), reason="killed")
    return job(GroupStatus("actor", tuple(ranks)), nodes=-(-count // per_node), gpus=per_node)


# The terminal ------------------------------------------------------------------------------


def test_the_map_shows_who_is_where_and_how_they_are() -> None:
    actor = GroupStatus("actor", (rank(0, "busy", gpus=(0, 1), call="step", since_s=3.2), rank(1, "dead", gpus=(2,))))
    env = GroupStatus("env", (rank(0, "starting", gpus=(2,), since_s=1.0), rank(1), rank(2, "silent")))
    text = draw_jobs([job(actor, env)]).plain
    assert "mine: 1 nodes x 4 GPUs, ada on box" in text
    assert "5 ranks: 1 dead, 1 silent, 1 starting, 1 busy, 1 ready" in text
    assert re.search(r"^0 +node-0 +A\* +A\* +A!E\+ +· +E2\?$", text, re.MULTILINE), text
    assert "busy in step for 3.2 s" in text
    assert re.search(r"^actor\[0\] +0 +0-1 +1000 +busy", text, re.MULTILINE), text


def test_no_job_and_no_group_are_said() -> None:
    assert draw_jobs([]).plain == "no Roost job runs on this Ray"
    assert "no groups" in draw_jobs([job()]).plain


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 40), (20, 8), (200, 60)])
@pytest.mark.parametrize("count", [2, 64, 65, 2048])
def test_a_frame_fits_its_screen(width: int, height: int, count: int) -> None:
    for jobs in ([many(max(count, 6))], [many(max(count, 6)), many(8)]):
        lines = draw_jobs(jobs, width, height).plain.split("\n")
        assert len(lines) <= height + len(jobs)
        assert max(map(len, lines)) <= width


def test_many_ranks_are_counted_and_those_that_need_a_look_listed() -> None:
    text = draw_jobs([many(2048)]).plain
    assert "2,048 ranks: 1 dead, 2,047 busy" in text
    listed = re.findall(r"^actor\[(\d+)\]", text, re.MULTILINE)
    assert listed[:3] == ["5", "2047", "2046"]  # the dead one, then those that are busy longest
    assert len(listed) == 16
    assert "… 2,032 more ranks" in text
    assert text.count("\n") < 60  # nodes that look the same are folded
    assert re.search(r"^1-255 +node-1 … +A\*", text, re.MULTILINE), text


def test_up_to_64_ranks_are_all_listed_in_order() -> None:
    listed = re.findall(r"^actor\[(\d+)\]", draw_jobs([many(64)]).plain, re.MULTILINE)
    assert listed == [str(n) for n in range(64)]


def test_usage_is_shown_where_it_is_known() -> None:
    group = GroupStatus("actor", (rank(0, gpus=(0,)),))
    text = draw_jobs([job(group, usage=AcceleratorStatus(80.0, 60.0, 0.97))]).plain
    assert re.search(r"memory +75% +75% +75% +75%", text)
    assert re.search(r"busy +97% +97%", text)
    assert "memory" not in draw_jobs([job(group)]).plain
    assert usage_text(AcceleratorStatus(80.0, 60.0, 0.97)) == "60.0 of 80.0 GiB, 97 % busy"
    assert usage_text(AcceleratorStatus(80.0)) == "not known"


def test_a_node_with_more_accelerators_than_columns_is_drawn_in_runs() -> None:
    ranks = tuple(rank(n, "busy" if n < 3 else "ready", gpus=(n,), call="step") for n in range(20))
    text = draw_jobs([job(GroupStatus("actor", ranks), gpus=24)]).plain
    assert "0-2 A*  3-19 A  20-23 ·" in text


def test_errors_are_one_line_each_and_the_newest_first() -> None:
    ranks = tuple(
        rank(n, errors=1, last_error=CallError("step", f"ValueError: {'x' * 500}{n}", 0.0, 10.0 - n)) for n in range(8)
    )
    text = draw_jobs([job(GroupStatus("actor", ranks))], width=100).plain
    found = re.findall(r"^  actor\[(\d)\], (.*) ago in step: ValueError: x+…$", text, re.MULTILINE)
    assert found == [("7", "3.0 s"), ("6", "4.0 s"), ("5", "5.0 s"), ("4", "6.0 s"), ("3", "7.0 s")]
    assert "… and of 3 more ranks" in text


EVIL = "a[red]\x1b[2J\n<script>alert(1)</script>\u202e\"'&\t"


def evil_job() -> JobStatus:
    error = CallError(EVIL, f"ValueError: {EVIL}", 0.0, 1.0)
    bad = rank(0, "dead", gpus=(0,), call=EVIL, reason=EVIL, note=EVIL, last_error=error)
    busy = rank(1, "busy", gpus=(1,), call=EVIL, note=EVIL)
    found = job(GroupStatus(EVIL, (bad, busy), EVIL), GroupStatus("b", (rank(0),)))
    nodes = tuple(NodeStatus(node.rank, EVIL, EVIL, EVIL, node.accelerators) for node in found.nodes)
    return JobStatus({**OWNER, "user": EVIL, "namespace": EVIL}, EVIL, found.groups, nodes)


def test_what_others_wrote_is_text_to_the_terminal() -> None:
    for width in (None, 90):
        text = draw_jobs([evil_job()], width)
        assert all(c.isprintable() or c == "\n" for c in text.plain)
        assert "a[red]" in text.plain
        assert not any("red" in str(span.style) and text.plain[span.start : span.end] == "" for span in text.spans)
    assert one_line("a\x1b[31mb\nc\u202e") == r"a\x1b[31mb c\u202e"


# Words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (0.44, "0.4 s"), (9.96, "10 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (273600, "3 d 4 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_a_rank_is_doing() -> None:
    assert doing(rank(0, "busy", call="step", since_s=2, running=3)) == "busy in step and 2 more for 2.0 s"
    assert doing(rank(0, "silent", call="step", since_s=61)) == "silent for 1 min 1 s, was in step"
    assert doing(rank(0, "dead", reason="killed")) == "dead: killed"
    assert doing(rank(0, "starting")) == "starting"
    assert doing(rank(0)) == "ready"


# The page ----------------------------------------------------------------------------------


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_and_what_others_wrote_is_text() -> None:
    for jobs in ([], [evil_job()], [many(70), evil_job()]):
        text = draw_status_page(jobs, refresh_s=5)
        page = Page(text)
        assert page.open == []
        assert page.links == []
        assert "script" not in page.tags
        assert "http" not in text.replace("http-equiv", "")
    assert "&lt;script&gt;" in draw_status_page([evil_job()])
    assert 'content="5"' in draw_status_page([], refresh_s=5)
    assert "refresh" not in draw_status_page([])
    assert "default-src 'none'" in draw_status_page([])


def test_the_page_lists_every_rank_and_stays_small() -> None:
    text = draw_status_page([many(8192)])
    assert text.count("actor[") >= 8192
    assert len(text) < 10_000_000


# Traces ------------------------------------------------------------------------------------


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Whether Perfetto can read it; returns the calls."""
    events = json.loads(json.dumps(trace))["traceEvents"]
    calls = [event for event in events if event["ph"] == "X"]
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    ends: dict[tuple[int, int], int] = {}
    for call in calls:
        assert call["name"]
        assert call["ts"] >= 0
        assert call["dur"] >= 0
        place = (call["pid"], call["tid"])
        assert place in threads
        assert call["pid"] in processes
        assert call["ts"] >= ends.get(place, 0), "calls of one thread overlap"
        ends[place] = call["ts"] + call["dur"]
        assert {"rank", "node", "ok"} <= set(call["args"])
    assert [call["ts"] for call in calls] == sorted(call["ts"] for call in calls)
    return calls


def test_a_trace_has_a_process_per_group_and_a_thread_per_rank() -> None:
    timelines = [
        RankTimeline(
            "j", "b", 1, 0, "10.0.0.1", (Call("step", 100.5, 0.25), Call("step", 100.75, 0.1, "ValueError: x"))
        ),
        RankTimeline("j", "b", 0, 1, "10.0.0.2", (Call("step", 100.0, 1.0, None),)),
        RankTimeline("j", "a", 0, 0, "10.0.0.1", ()),
    ]
    trace = trace_events(timelines)
    calls = check_trace(trace)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {(1, 1): "a[0] node 0", (2, 1): "b[0] node 1", (2, 2): "b[1] node 0"}
    assert [(c["name"], c["ts"], c["dur"], c["tid"]) for c in calls] == [
        ("step", 0, 1_000_000, 1), ("step", 500_000, 250_000, 2), ("step", 750_000, 100_000, 2),
    ]  # fmt: skip
    assert [call["args"]["ok"] for call in calls] == [None, True, False]
    assert calls[2]["args"]["error"] == "ValueError: x"
    assert calls[0]["args"]["running"] is True
    assert trace["otherData"]["begins_at_unix_s"] == 100.0


def test_calls_that_run_at_once_get_threads_of_their_own() -> None:
    calls = tuple(Call("generate", 10.0 + n * 0.1, 1.0) for n in range(25))
    trace = trace_events([RankTimeline("j", "engines", 0, 0, "", calls)])
    assert len(check_trace(trace)) == 25
    assert len({event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"}) == 10
    assert check_trace(trace_events([])) == []


# What a worker remembers --------------------------------------------------------------------


def test_a_worker_remembers_its_last_calls_and_its_last_error() -> None:
    record = CallRecord()
    first = record.begin("slow")
    record.end(record.begin("quick"))
    record.end(record.begin("bad"), ValueError("line one\nline two"))
    assert (record.started, record.failed) == (3, 1)
    name, since_s, running = record.longest()
    assert (name, running) == ("slow", 1)
    assert since_s >= 0
    error = record.last_error()
    assert error is not None
    assert (error["call"], error["error"]) == ("bad", "ValueError: line one")
    calls = record.timeline(60)["calls"]
    assert [(call[0], call[3]) for call in calls] == [
        ("slow", None), ("quick", ""), ("bad", "ValueError: line one"),
    ]  # fmt: skip
    record.end(first)
    assert record.longest() == ("", 0.0, 0)
    assert [call[0] for call in record.timeline(0.0)["calls"]] == []


def test_the_constructor_is_in_the_timeline_and_no_call_that_counts() -> None:
    record = CallRecord()
    record.end(record.begin("__init__"))
    assert record.started == 0
    assert [call[0] for call in record.timeline(60)["calls"]] == ["__init__"]


def test_what_is_remembered_is_bounded_and_says_so() -> None:
    record = CallRecord()
    for _ in range(KEPT):
        record.end(record.begin("step"))
    assert record.timeline(60)["lost"] is False
    record.end(record.begin("step"))
    timeline = record.timeline(60)
    assert len(timeline["calls"]) == KEPT
    assert timeline["lost"] is True
    assert record.started == KEPT + 1


def test_durations_of_the_last_calls_are_remembered() -> None:
    record = CallRecord()
    running = record.begin("slow", "first")
    assert record.duration_of("first") is None
    record.end(running)
    duration = record.duration_of("first")
    assert duration is not None
    assert duration >= 0.0
    for number in range(KEPT):
        record.end(record.begin("step", str(number)))
    assert record.duration_of("first") is None
    assert record.duration_of(str(KEPT - 1)) is not None


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_errors_are_described_in_one_line() -> None:
    assert describe_error(ValueError("\n  a \n b")) == "ValueError: a"
    assert describe_error(KeyError()) == "KeyError"
    assert describe_error(UnspeakableError()) == "UnspeakableError"
    assert len(describe_error(ValueError("x" * 10_000))) < 400


# Files -------------------------------------------------------------------------------------


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    write_file(str(target), "one")
    write_file(str(target), "two")
    assert target.read_text() == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(UsageError, match="cannot be written") as caught:
        write_file(str(tmp_path / "no" / "page.html"), "one")
    assert isinstance(caught.value, RoostError)
    assert caught.value.codes == ("U120",)


# The docs ----------------------------------------------------------------------------------


def demo_job() -> JobStatus:
    """The job of the frame and the picture in docs/operate/watch.md."""
    error = CallError("train_step", "ValueError: loss is nan", 0.0, 31.0)
    why = "its process ended (SYSTEM_ERROR: Worker unexpectedly exits with a connection error code 2. End of file)"
    actors = [
        rank(n, "busy", n // 4, (n % 4,), call="train_step", since_s=12.3 + n, running=1, calls=40) for n in range(8)
    ]
    actors[2] = rank(2, "dead", 0, (2,), call="train_step", reason=why, calls=40, errors=1, last_error=error)
    actors[4] = rank(4, "ready", 1, (0,), calls=40)
    engines = [
        rank(
            n, "busy" if n else "silent", n // 2, (2 * (n % 2), 2 * (n % 2) + 1), call="generate", running=3,
            since_s=3.1, note=f"http://10.0.0.{n // 2}:3{n}000 weights 12",
        )
        for n in range(4)
    ]  # fmt: skip
    return job(
        GroupStatus("actor", tuple(actors), "Trainer"),
        GroupStatus("rollout", tuple(engines), "EngineWorker"),
        GroupStatus("env", (rank(0, "starting", 1, since_s=2.0),), "Env"),
        nodes=2,
        usage=AcceleratorStatus(140.4, 98.3, 0.97),
    )


def test_the_frame_in_the_docs_is_drawn_so() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate" / "watch.md").read_text(encoding="utf-8")
    shown = page.partition("```text\nmine: ")[2].partition("```")[0].splitlines()[1:]
    drawn = draw_jobs([demo_job()], 100, 45).plain.splitlines()
    assert len(shown) > 20
    assert [line for line in shown if line != "…" and line not in drawn] == []

"""Calls of a hub, and its recovery, with a stand-in for its process."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from roost.data.samples import Sample, SampleGroup
from roost.errors import CallTimeoutError, Finding, RolloutError, WorkerDiedError, WorkerError
from roost.rl import hub as module
from roost.rl.hub import ANSWER_S, Hub, HubLink
from roost.rl.hub_starting import HubStarter
from roost.worker import WorkerGroup

SETTINGS = (SimpleNamespace(namespace="jobs"), "rollout", 8, 10.0, {}, None)


class Result:
    """What a call gives, or raises; it notes for how long it was waited for."""

    def __init__(self, value, waits=None):
        self.value, self.waits = value, [] if waits is None else waits

    def wait(self, timeout_s=None):
        self.waits.append(timeout_s)
        if isinstance(self.value, Exception):
            raise self.value
        return [self.value]


def died():
    return WorkerDiedError([Finding("W202", "the hub died during check()")], "rollout-hub", 0, 0)


def ended():
    """The router's error, as it comes out of a call."""
    error = WorkerError([Finding("W201", "check() raised")], "rollout-hub", 0, 0, "")
    error.__cause__ = RolloutError([Finding("E106", "the router has ended")])
    return error


class HubGroup:
    """A hub as its callers see it; ``calls`` are the answers of its router, in turn."""

    name = "rollout-hub"
    cluster = SimpleNamespace(get_node_ip=lambda rank: "127.0.0.1")

    def __init__(self, state="idle", calls=(), router_start=("http://router", "key-2")):
        self.state, self.calls, self.router_start = state, list(calls), router_start
        self.waits, self.is_closed = [], False

    def open_lanes(self, ranks, in_order=True):
        pass

    def begin_in_lane(self, rank, part, method, args, kwargs):
        return None

    def router(self, method, args, kwargs):
        return Result(self.calls.pop(0), self.waits)

    def start_router(self):
        return Result(self.router_start)

    def notes(self):
        return Result([])

    def states(self, ranks, timeout_s):
        return [{"state": self.state}]

    def node_rank_of(self, rank):
        return 0

    def actor_id(self, rank):
        return "one"

    def close(self):
        self.is_closed = True


@pytest.fixture(autouse=True)
def no_successor(monkeypatch):
    def attach(name, cluster):
        return SimpleNamespace(actor_id=lambda rank: "one")

    monkeypatch.setattr(WorkerGroup, "attach", staticmethod(attach))


def test_calls_of_the_router_are_not_waited_for_without_end():
    late = CallTimeoutError([Finding("W203", "rank 0 did not end")])
    group = HubGroup(calls=[late] * 5)
    link = HubLink(group)
    for call in (
        ("check",),
        ("workers",),
        ("add", "http://engine", "key", 7.0),
        ("remove", "http://engine", 5.0),
        ("remove", "http://engine"),
    ):
        with pytest.raises(CallTimeoutError):
            link.call("router", *call)
    assert group.waits == [ANSWER_S, ANSWER_S, ANSWER_S + 7.0, ANSWER_S + 5.0, ANSWER_S + 30.0]


@pytest.fixture
def starter(monkeypatch):
    made = HubStarter(*SETTINGS)

    def launch():
        made._group = HubGroup()
        made.url, made.key = "http://another-router", "key-3"

    monkeypatch.setattr(made, "_launch", launch)
    return made


@pytest.mark.parametrize(
    "first",
    [HubGroup("dead"), HubGroup(calls=[died()]), HubGroup(calls=[ended()], router_start=died())],
    ids=["before", "before-check", "before-the-start-of-its-router"],
)
def test_a_hub_that_dies_while_it_is_recovered_is_started_again(starter, first):
    starter._group = first
    link = starter.link
    assert starter.recover()
    assert first.is_closed
    assert starter.group is not first
    assert starter.link is link
    assert link.group is starter.group
    assert (starter.url, starter.key) == ("http://another-router", "key-3")


@pytest.mark.parametrize(("calls", "is_new"), [([None], False), ([ended()], True)], ids=["alive", "ended"])
def test_a_router_that_has_ended_is_started_again_in_its_hub(starter, calls, is_new):
    starter._group = first = HubGroup(calls=calls)
    assert starter.recover() is is_new
    assert starter.group is first
    assert (starter.url, starter.key) == (("http://router", "key-2") if is_new else ("", ""))


def test_the_key_of_a_router_whose_start_was_not_waited_for_is_fetched_later(starter):
    starter._group = group = HubGroup(calls=[ended()], router_start=CallTimeoutError([Finding("W203", "it is late")]))
    with pytest.raises(CallTimeoutError):
        starter.recover()
    group.router_start = ("http://router", "key-2")
    assert starter.recover(), "it runs, and has a key that is not known here"
    assert (starter.url, starter.key) == ("http://router", "key-2")
    group.calls.append(None)
    assert not starter.recover()


def test_a_hub_that_does_not_answer_is_left_alone(starter):
    starter._group = first = HubGroup("silent", calls=[CallTimeoutError([Finding("W203", "rank 0 did not end")])])
    with pytest.raises(CallTimeoutError):
        starter.recover()
    assert not first.is_closed


def test_old_journals_are_removed_by_a_new_job_and_not_by_a_successor_of_a_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "temporary_folder", lambda: str(tmp_path))
    monkeypatch.setattr(module, "session_folder", lambda: "/somewhere/session_7")
    monkeypatch.delenv("ROOST_NAMESPACE", raising=False)
    hub = object.__new__(Hub)
    monkeypatch.setattr(Hub, "group_name", "short-hub")
    journals = tmp_path / "journals"
    hub._make_buffer(8, "", continues=False).put([SampleGroup("a", {}, [Sample([1], [2], [-0.1], [1], 0, "stop")])])
    assert [path.name for path in journals.iterdir()] == ["roost-roost-short-hub-session_7.journal"]
    assert journals.stat().st_mode & 0o777 == 0o700
    (journals / "of-a-killed-job.journal").touch()
    for path in journals.iterdir():
        os.utime(path, (0, 0))
    successor = hub._make_buffer(8, "", continues=True)
    assert successor.stats()["waiting"] == 1, "its own is as old, and is still needed"
    assert len(list(journals.iterdir())) == 2
    hub._make_buffer(8, "", continues=False).remove_journal()
    assert list(journals.iterdir()) == []

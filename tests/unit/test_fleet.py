"""The engines of a rollout, with stand-ins for their processes, the hub and the cluster."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from roost.engines.handles import EngineHandle
from roost.rl.fleet import Fleet

WAIT_S = 60.0


class Group:
    """Workers that note when they are ended."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def kill_workers(self, ranks):
        self.events.append(("end", self.name))


class Hub:
    """Notes calls of the router; ``during`` is called in each."""

    def __init__(self, events, during=lambda *call: None):
        self.events, self.during = events, during

    def call(self, part, method, url="", *rest):
        self.events.append((method, url))
        self.during(method, url, *rest)


def engines_of(group, count=1, **fields):
    placements = [SimpleNamespace(cluster_node_rank=rank, local_accelerator_rank=0) for rank in range(count)]
    component = SimpleNamespace(placements=placements)
    return [
        EngineHandle(f"rollout/{rank}", component, (rank,), group, rank, url=f"http://engine-{rank}", **fields)
        for rank in range(count)
    ]


@pytest.fixture
def events():
    return []


@pytest.fixture
def fleet_of():
    made = []

    def make(engines, hub, url="http://router"):
        made.append(Fleet("rollout", engines, hub, url, "key"))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


def test_an_eviction_ends_the_processes_that_it_is_about_and_no_later_ones(events, fleet_of):
    removing, may_go_on = threading.Event(), threading.Event()

    def during(*call):
        removing.set()
        assert may_go_on.wait(WAIT_S)

    old, new = Group("old", events), Group("new", events)
    (engine,) = engines_of(old, is_registered=True)
    fleet = fleet_of([engine], Hub(events, during))

    def recover():
        assert fleet.gone() == [engine]
        engine.incarnation += 1
        engine.group, engine.url, engine.is_registered = new, "http://later", True

    threads = [threading.Thread(target=fleet._evict, args=(engine, engine.identity, "it is silent"), daemon=True)]
    threads[0].start()
    assert removing.wait(WAIT_S)
    assert events == [("end", "old"), ("remove", "http://engine-0")]
    threads.append(threading.Thread(target=recover, daemon=True))
    threads[1].start()
    may_go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert events == [("end", "old"), ("remove", "http://engine-0")]
    assert engine.group is new
    assert engine.is_registered, "the eviction had ended before the engine came back"


def test_an_engine_whose_processes_cannot_be_ended_gets_no_requests(events, fleet_of):
    class Stubborn(Group):
        def kill_workers(self, ranks):
            raise ConnectionError("Ray does not answer")

    (engine,) = engines_of(Stubborn("stubborn", events), is_registered=True)
    fleet = fleet_of([engine], Hub(events))
    with pytest.raises(ConnectionError):
        fleet._evict(engine, engine.identity, "it is silent")
    assert events == [("remove", "http://engine-0")]
    assert not engine.is_registered
    assert not fleet.serves

"""The engines of a rollout, with stand-ins for their processes, the hub and the cluster."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from toy_models import until

from roost.cluster.losses import LostNode
from roost.engines.handles import EngineHandle
from roost.errors import ClusterError, Finding, GenerationError, RolloutError
from roost.rl.fleet import Fleet
from roost.rl.generating import Generator
from roost.rl.rollout import RolloutManager

WAIT_S = 60.0


class Group:
    """Workers that note when they are ended."""

    def __init__(self, name, events, state="idle", lost=()):
        self.name, self.events, self.state = name, events, state
        self.cluster = SimpleNamespace(lost_nodes=lambda ranks: [node for node in lost if node.rank in ranks])

    def kill_workers(self, ranks):
        self.events.append(("end", self.name))

    def ask_states(self, ranks):
        return list(ranks)

    def read_states(self, asked, timeout_s):
        return [{"rank": rank, "state": self.state} for rank in asked]


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


def refusing(*urls):
    """A router that does not take these engines."""

    def during(method, url, *rest):
        if method == "add" and url in urls:
            raise RolloutError([Finding("E107", f"the router did not take the engine at {url}")])

    return during


def test_an_engine_that_the_router_does_not_take_keeps_no_other_out(events, fleet_of):
    engines = engines_of(Group("engines", events), 4, is_registered=True)
    engines[3].is_alive = False
    hub = Hub(events, refusing("http://engine-1", "http://engine-2"))
    fleet = fleet_of(engines, hub)
    with pytest.raises(RolloutError) as caught:
        fleet.use_router("http://router-2", "key-2")
    assert caught.value.codes == ("E107", "E107")
    assert "engine-1" in str(caught.value)
    assert "engine-2" in str(caught.value)
    assert [engine.is_registered for engine in engines] == [True, False, False, False]
    assert fleet.serves
    events.clear()
    hub.during = refusing("http://engine-2")
    with pytest.raises(RolloutError, match="engine-2"):
        fleet.register(fleet.alive)
    assert [engine.is_registered for engine in engines] == [True, True, False, False]
    assert sorted(events) == [("add", "http://engine-1"), ("add", "http://engine-2")], "only those that were not taken"


def test_an_engine_that_dies_while_the_router_takes_it_gets_no_requests(events, fleet_of):
    (engine,) = engines_of(Group("engine", events))
    fleet = fleet_of([engine], Hub(events, lambda *call: setattr(engine, "is_alive", False)))
    fleet.register([engine])
    assert not engine.is_registered
    assert events == [("add", engine.url), ("remove", engine.url)]


class Answering(ThreadingHTTPServer):
    """Answers every request with tokens, where a router was; it notes connections and keys."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen, self.may_answer = [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.client_address, self.headers["Authorization"]))
        self.server.may_answer.wait(WAIT_S)
        body = json.dumps({"output_ids": [7], "meta_info": {"finish_reason": {"type": "length"}}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def impostor():
    server = Answering()
    yield server
    server.may_answer.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("code", ["E106", "S210"])
def test_nothing_of_who_takes_the_place_of_a_dead_router_is_accepted(impostor, events, fleet_of, code):
    """Whether the router runs is asked for also while everything that is sent to its address is answered."""

    def dead(method, *rest):
        raise RolloutError([Finding(code, "the router has ended")])

    hub = Hub(events)
    fleet = fleet_of([], hub, impostor.url)
    fleet.client.attempts = 3
    impostor.may_answer.set()
    (before,) = fleet.client.generate_all([{"input_ids": [1]}])
    assert before[0].output_ids == [7], "it answers as a router does"
    impostor.may_answer.clear()

    errors = []

    def generate():
        try:
            errors.append(fleet.client.generate_all([{"input_ids": [1]}]))
        except GenerationError as error:
            errors.append(error)

    asking = threading.Thread(target=generate, daemon=True)
    asking.start()
    until(lambda: len(impostor.seen) == 2)
    fleet._look()
    until(lambda: events == [("check", "")])
    assert fleet.client.urls == [impostor.url], "the router runs, as far as is known"
    hub.during = dead
    until(lambda: fleet._look() or not fleet.client.urls)
    impostor.may_answer.set()
    asking.join(WAIT_S)
    assert isinstance(errors[0], GenerationError)
    assert "the router has ended" in str(errors[0])
    with pytest.raises(GenerationError):
        fleet.client.generate_all([{"input_ids": [1]}])
    assert len(impostor.seen) == 2

    hub.during = lambda *call: None
    fleet.use_router(impostor.url, "key-2")
    (after,) = fleet.client.generate_all([{"input_ids": [1]}])
    assert after[0].output_ids == [7]
    assert [key for _, key in impostor.seen] == ["Bearer key", "Bearer key", "Bearer key-2"]
    assert impostor.seen[2][0] != impostor.seen[1][0], "it is another connection"

    def dead_before(*call):
        fleet._routers += 1
        dead(*call)

    hub.during = dead_before
    fleet._abandon_dead_router()
    assert fleet.client.urls == [impostor.url], "the answer was about the router before"


def test_the_router_gets_no_more_time_for_an_engine_than_is_left(events, fleet_of):
    limits = []
    (engine,) = engines_of(Group("engine", events))
    fleet = fleet_of([engine], Hub(events, lambda method, url, key, timeout_s: limits.append(timeout_s)))
    for timeout_s in (None, 3.0, 1000.0):
        engine.is_registered = False
        fleet.register([engine], timeout_s)
    assert limits == [70.0, 3.0, 70.0]


def manager_of(fleet, engines, routers):
    """A manager of version 3, whose router was started again as often as ``routers`` says."""
    manager = object.__new__(RolloutManager)

    def restart(engine):
        engine.incarnation += 1
        engine.url, engine.version, engine.is_alive = "http://later", 0, True

    manager._fleet, manager._engines, manager._groups = fleet, engines, []
    manager._hub_starter = SimpleNamespace(recover=lambda: routers.pop(0), url="http://router-2", key="key-2")
    manager._starter = SimpleNamespace(restart=restart)
    manager._cluster = SimpleNamespace(lost_nodes=lambda ranks: [])
    manager.version = manager._last_version = 3
    return manager


def test_recovery_goes_on_after_an_engine_that_the_router_does_not_take(events, fleet_of):
    engines = engines_of(Group("engines", events), 3, is_registered=True, version=3)
    engines[2].is_alive = engines[2].is_registered = False
    hub = Hub(events, refusing("http://engine-1"))
    manager = manager_of(fleet_of(engines, hub), engines, [True, False])
    with pytest.raises(RolloutError, match="http://engine-1") as caught:
        manager.recover()
    assert caught.value.codes == ("E107",)
    assert [engine.is_alive for engine in engines] == [True, True, True]
    assert [engine.is_registered for engine in engines] == [True, False, False]
    hub.during = refusing()
    assert manager.recover() == []
    assert [engine.is_registered for engine in engines] == [True, True, False], "the last one waits for an update"


LOST = LostNode(1, "127.0.0.3", "Ray has marked it dead")


@pytest.mark.parametrize("how", ["find_dead", "_look"])
def test_errors_of_requests_name_the_lost_node_of_an_engine(events, fleet_of, how):
    engines = engines_of(Group("engines", events, "dead", [LOST]), 2)
    fleet = fleet_of(engines, Hub(events), url="")
    fleet.pulses = SimpleNamespace(
        look=lambda engines: None, is_dead=lambda engine: True, silent_s=lambda engine: 0.0, limit_s=60.0
    )

    def generate_all(requests, **limits):
        getattr(fleet, how)()
        raise GenerationError([Finding("E108", "1 of 1 request failed")])

    fleet.client = SimpleNamespace(generate_all=generate_all, names={}, keys={}, urls=[], close=lambda: None)
    lock = SimpleNamespace(shared=lambda holder, timeout_s: contextlib.nullcontext())
    with pytest.raises(GenerationError) as caught:
        Generator("rollout", fleet, lock).generate([], {}, 60.0)
    text = str(caught.value)
    assert "rollout/0 was ended: its process ended\n" in text
    assert "rollout/1 was ended: its process ended; node 1 (127.0.0.3) is gone: Ray has marked it dead" in text


def test_requests_are_given_up_when_rays_head_is_lost(fleet_of, events):
    def generate_all(requests, timeout_s, check):
        check()

    def check():
        raise ClusterError([Finding("R116", "Ray's head is gone")])

    fleet = fleet_of([], Hub(events))
    fleet.client = SimpleNamespace(generate_all=generate_all, close=lambda: None)
    lock = SimpleNamespace(shared=lambda holder, timeout_s: contextlib.nullcontext())
    with pytest.raises(ClusterError, match="head is gone"):
        Generator("rollout", fleet, lock, check).generate([], {}, 60.0)

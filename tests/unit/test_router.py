"""The router as a process of its own, with real servers behind it."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from other_user import listening_as_nobody, needs_root
from serving import KEY, SOURCES, ask, deadline_in_flight, post, start_server, url_of
from toy_models import Gated, toy, until

from roost import EnginePlace, RolloutError, Router, TorchEngine, lease_ports
from roost.cluster.ports import is_own_server
from roost.engines import EngineClient
from roost.engines import router as module

SIZES = {"context": 64, "length_multiple": 16, "batch_rows": 8}


@pytest.fixture(scope="module")
def router():
    with Router(health_period_s=1, worker_startup_s=3, key=KEY) as router:
        yield router


@pytest.fixture(scope="module")
def engines():
    engines = [TorchEngine(toy, **SIZES) for _ in range(2)]
    yield [(engine, engine.start(EnginePlace(key=KEY))) for engine in engines]
    for engine in engines:
        engine.stop()


@pytest.fixture(autouse=True)
def empty(request):
    """Every test begins with a router that has no engines."""
    yield
    if "router" in request.fixturenames:
        router = request.getfixturevalue("router")
        for worker in router.workers():
            router.remove(worker.url)


@pytest.fixture
def client(router):
    client = EngineClient(router.url, key=KEY)
    yield client
    client.close()


def some_requests(count, tokens=4):
    return [
        {
            "input_ids": [index % 30, 1],
            "sampling_params": {"max_new_tokens": tokens, "seed": index, "n": 2, "temperature": 0.7},
        }
        for index in range(count)
    ]


def test_engines_come_and_go(router, engines):
    urls = sorted(url for _, url in engines)
    for url in urls:
        assert router.add(f"{url}/", KEY).url == url
    router.add(urls[0])  # again: nothing happens
    assert [(worker.url, worker.is_healthy) for worker in router.workers()] == [(url, True) for url in urls]
    router.remove(urls[0])
    router.remove(urls[0])
    assert [worker.url for worker in router.workers()] == urls[1:]
    router.add(urls[0], KEY)
    assert len(router.workers()) == 2


def test_samples_are_the_same_through_the_router(router, engines, client):
    for _, url in engines:
        router.add(url, KEY)
    requests = some_requests(24)
    direct = [engines[0][0].generate([r["input_ids"]], r["sampling_params"]) for r in requests]
    assert client.generate_all(requests) == direct


def test_without_engines_requests_fail_and_say_so(router):
    status, answer = post(f"{router.url}/generate", input_ids=[1], sampling_params={})
    assert status == 503
    assert answer["error"]["code"] == "no_available_workers"


def test_an_error_names_the_engine_behind_the_router(router, engines, client):
    engine = TorchEngine(toy, **SIZES)
    router.add(engine.start(EnginePlace(name="small", engine=3, key=KEY)), KEY)
    good, bad = some_requests(2)
    bad["input_ids"] = [999]
    with pytest.raises(RolloutError, match="out of range") as error:
        client.generate_all([good, bad])
    assert f"request 1: 1 attempt, the last at small/3 ({router.url}): status 400" in str(error.value)
    assert list(error.value.finished) == [0]
    router.remove(router.workers()[0].url)
    engine.stop()


def test_an_engine_that_is_not_there(router, engines):
    with lease_ports() as lease:
        url = f"http://127.0.0.1:{lease.port}"
        with pytest.raises(RolloutError, match=f"cannot reach the engine at {url}") as error:
            router.add(url, KEY)
        assert error.value.codes == ("E107",)
        engine = TorchEngine(toy, **SIZES)
        engine.start(EnginePlace(server_port=lease.port, key=KEY))
        assert router.add(url, KEY).is_healthy
        router.remove(url)
        engine.stop()


def test_a_removed_engine_finishes_what_it_has(router, client):
    module = Gated()
    engine = TorchEngine(lambda: module, **SIZES)
    url = engine.start(EnginePlace(key=KEY))
    router.add(url, KEY)
    results = []
    asking = threading.Thread(target=lambda: results.extend(client.generate_all(some_requests(1))))
    asking.start()
    until(lambda: engine.info()["num_running_samples"] == 2)
    router.remove(url)
    assert not results
    module.is_free.set()
    asking.join()
    assert [output.finish_reason for output in results[0]] == ["length"] * 2
    engine.stop()


def test_a_client_that_hangs_up_takes_its_request_along(router, client):
    module = Gated()
    engine = TorchEngine(lambda: module, **SIZES)
    router.add(engine.start(EnginePlace(key=KEY)), KEY)
    assert "no answer before the deadline" in deadline_in_flight(client, some_requests(1))
    until(lambda: engine.info()["num_running_samples"] == 0)
    module.is_free.set()
    router.remove(router.workers()[0].url)
    engine.stop()


def test_an_engine_killed_in_the_middle(router, engines, client):
    process = start_server("toy_models:slow", "--context", "64")
    url = url_of(process)
    engine, healthy = engines[0]
    router.add(url, KEY)
    router.add(healthy, KEY)
    requests = some_requests(16, tokens=20)
    results = []
    asking = threading.Thread(target=lambda: results.extend(client.generate_all(requests)))
    asking.start()
    until(lambda: ask("GET", f"{url}/get_server_info")[1]["num_running_samples"] > 0)
    process.kill()
    process.wait()
    process.stderr.close()
    asking.join()
    # Each once, whole, and with the tokens that the dead engine would have given.
    outputs = [[output.output_ids for output in answer] for answer in results]
    expected = [engine.generate([r["input_ids"]], r["sampling_params"]) for r in requests]
    assert outputs == [[output.output_ids for output in answer] for answer in expected]
    until(lambda: [worker.is_healthy for worker in router.workers() if worker.url == url] == [False])
    router.remove(url)
    assert [worker.url for worker in router.workers()] == [healthy]


def test_two_routers_at_once(router, engines):
    with Router() as second:
        assert second.url != router.url
        second.add(engines[0][1], KEY)
        assert router.workers() == []
        assert router.is_alive()
        assert second.is_alive()
    assert not second.is_alive()
    assert second.url == ""
    second.stop()
    with pytest.raises(RolloutError, match="not running"):
        second.workers()


def test_a_router_that_does_not_start():
    router = Router(options=["--no-such-option"])
    with pytest.raises(RolloutError, match="process has ended") as error:
        router.start()
    assert error.value.codes == ("E106",)
    assert "--no-such-option" in str(error.value)
    assert not router.is_alive()
    with pytest.raises(RolloutError, match="round_robin"):
        Router(policy="round_robbin")


def processes_of(port):
    """Those whose command line has a port."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file, open(f"/proc/{name}/stat", encoding="utf-8") as stat:
                    words, state = file.read().split(b"\0"), stat.read().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(port).encode() in words and state not in "ZX":
                found.append(int(name))
    return found


def test_nothing_is_left_when_what_holds_it_is_killed():
    with Router() as router:
        port = router.url.rpartition(":")[2]
        os.kill(router._child.pid, signal.SIGKILL)
        until(lambda: not router.is_alive())
        until(lambda: not processes_of(port))
        with pytest.raises(RolloutError, match="does not answer") as error:
            router.workers()
        assert error.value.codes == ("E106",)


def test_nobody_takes_the_place_of_a_router_that_has_ended():
    """Also who sets SO_REUSEADDR, as every user can; a router that is started again has another key."""
    with Router() as router:
        url, key = router.url, router.key
        port = int(url.rpartition(":")[2])
        os.kill(router._child.pid, signal.SIGKILL)
        until(lambda: not is_own_server(port))
        for address in ("127.0.0.1", "0.0.0.0"):  # noqa: S104
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    other.bind((address, port))
        with pytest.raises(RolloutError, match="process has ended"):
            router.add("http://127.0.0.1:1", "the key of an engine")
        assert router.start() == url
        assert router.key != key
        assert ask("GET", f"{url}/workers", key=key)[0] == 401
        assert router.workers() == []
        assert ask("GET", f"http://127.0.0.1:{port + 1}/metrics", key="")[0] == 200
    kept = Router(key=KEY)
    for _ in range(2):
        kept.start()
        assert kept.key == KEY
        kept.stop()


@needs_root
def test_a_router_whose_port_another_user_took_while_it_started_shows_no_key(monkeypatch):
    with lease_ports(2) as lease, listening_as_nobody(lease.port) as heard:
        assert not is_own_server(lease.port)
        monkeypatch.setattr(module, "lease_ports", lambda count: lease)
        with pytest.raises(RolloutError, match="process has ended") as error:
            Router().start()
        assert error.value.codes == ("E106",)
    assert heard == [""]


PARENT = """
import sys, threading, time
from roost import Router
router = Router()
starting = threading.Thread(target=router.start)  # a thread that ends
starting.start()
starting.join()
print(router.url, flush=True)
time.sleep(600)
"""


def test_it_ends_with_the_process_that_started_it():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=env)
    url = parent.stdout.readline().strip()
    try:
        assert ask("GET", f"{url}/health")[0] == 200
        port = url.rpartition(":")[2]
        assert processes_of(port)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    until(lambda: not processes_of(port))

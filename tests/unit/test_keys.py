"""Servers obey those who present their key, and nobody else: real sockets, also as another user of the machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from other_user import as_nobody, needs_root
from safetensors.torch import save_file
from serving import KEY, SOURCES, ask
from toy_models import toy

from roost import EnginePlace, RolloutError, Router, TorchEngine
from roost.engines import EngineClient
from roost.engines.handles import EngineHandle, ExternalEngine
from roost.engines.keys import VARIABLE, headers_of, is_permitted, make_key
from roost.engines.server import EngineServer
from roost.worker.lane import LaneServer

WRONG = "x" * len(KEY)
ROUTES = [
    ("POST", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}),
    ("POST", "/pause_generation", {"mode": "abort"}),
    ("POST", "/continue_generation", {}),
    ("POST", "/update_weights_from_disk", {"model_path": "FOLDER", "weight_version": 9}),
    ("POST", "/release_memory_occupation", {}),
    ("POST", "/resume_memory_occupation", {}),
    ("POST", "/flush_cache", {}),
    ("POST", "/abort_request", {"abort_all": True}),
    ("GET", "/get_model_info", None),
    ("GET", "/model_info", None),
    ("GET", "/get_server_info", None),
    ("GET", "/server_info", None),
    ("GET", "/health_generate", None),
    ("GET", "/no_such_route", None),
    ("POST", "/health", {}),
    ("OPTIONS", "/generate", None),
]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[TorchEngine, str]]:
    engine = TorchEngine(toy, context=64, length_multiple=16, batch_rows=8)
    yield engine, engine.start(EnginePlace(key=KEY))
    engine.stop()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that the engine would take."""
    folder = tmp_path_factory.mktemp("weights")
    save_file({name: tensor.clone() for name, tensor in toy(1).state_dict().items()}, folder / "model.safetensors")
    return folder


def state_of(engine: TorchEngine) -> Any:
    (output,) = engine.generate([[1, 2]], {"max_new_tokens": 8, "seed": 1})
    return engine.version, output.output_ids, engine.info()


# Keys ------------------------------------------------------------------------------------------


def test_which_headers_present_a_key() -> None:
    key = make_key()
    assert len(key) >= 43
    assert key != make_key()
    assert headers_of(key) == {"Authorization": f"Bearer {key}"}
    assert headers_of("") == {}
    assert is_permitted(f"Bearer {key}", key)
    assert is_permitted(f"bearer {key}", key)
    for header in (
        None,
        "",
        key,
        f"Basic {key}",
        "Bearer",
        "Bearer ",
        f"Bearer {key}x",
        f"Bearer {key[:-1]}",
        "Bearer \udcff",
    ):
        assert not is_permitted(header, key)
    assert not is_permitted("Bearer ", "")
    assert not is_permitted(None, "")


def test_what_holds_a_key_does_not_print_it() -> None:
    component: Any = None
    lane = LaneServer(object(), "127.0.0.1")
    holders = [
        EnginePlace(key=KEY),
        ExternalEngine("http://elsewhere", key=KEY),
        EngineHandle("rollout/0", component, (0,), component, 0, key=KEY),
    ]
    assert KEY not in f"{holders}"
    assert repr(lane.address.key) not in repr(lane.address)
    lane.close()


# An engine's server ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", WRONG])
@pytest.mark.parametrize(("method", "route", "body"), ROUTES, ids=[f"{method} {route}" for method, route, _ in ROUTES])
def test_an_engine_refuses_every_route_without_its_key(
    method: str, route: str, body: Any, key: str, served: tuple[TorchEngine, str], weights: Path
) -> None:
    engine, url = served
    before = state_of(engine)
    if body and "model_path" in body:
        body = {**body, "model_path": str(weights)}
    status, answer = ask(method, f"{url}{route}", body, key=key)
    assert (status, answer) == (
        401,
        {"error": {"message": "the request does not present the key of this server", "code": 401}},
    )
    assert state_of(engine) == before


def test_the_same_routes_are_there_for_who_has_the_key(weights: Path) -> None:
    engine = TorchEngine(toy, context=64, length_multiple=16, batch_rows=8)
    url = engine.start(EnginePlace(key=KEY))
    for method, route, body in ROUTES[:13]:
        if body and "model_path" in body:
            body = {**body, "model_path": str(weights)}
        assert ask(method, f"{url}{route}", body)[0] == 200, route
    assert engine.version == 9
    engine.stop()


def test_health_is_open_and_tells_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(toy)
    url = engine.start(EnginePlace(key=KEY))
    assert ask("GET", f"{url}/health", key="") == (200, "ok")
    monkeypatch.setattr(engine, "health", lambda: "/models/secret-model is not loaded")
    assert ask("GET", f"{url}/health", key="") == (503, "not healthy")
    assert ask("GET", f"{url}/health", key=KEY) == (503, "/models/secret-model is not loaded")
    engine.stop()


def test_a_large_body_is_not_read_without_the_key(served: tuple[TorchEngine, str]) -> None:
    there = urlsplit(served[1])
    with socket.create_connection((there.hostname, there.port), timeout=60) as made:
        made.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 500000000\r\n\r\n{")
        assert made.recv(100).startswith(b"HTTP/1.1 401 ")


def test_a_server_without_a_key_is_never_open(served: tuple[TorchEngine, str]) -> None:
    server = EngineServer(served[0])
    url = server.start()
    assert ask("GET", f"{url}/get_model_info", key="")[0] == 401
    assert ask("GET", f"{url}/get_model_info", key=server.key)[0] == 200
    server.stop()
    assert EnginePlace().key != EnginePlace().key


@needs_root
def test_another_user_cannot_command_an_engine(served: tuple[TorchEngine, str], weights: Path) -> None:
    engine, url = served
    before = state_of(engine)
    as_request = """
exec 3<>"/dev/tcp/$1/$2"
printf 'POST %s HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\nContent-Length: %s\\r\\n\\r\\n%s' "$3" "${#4}" "$4" >&3
cat <&3
"""
    there = urlsplit(url)
    body = f'{{"model_path": "{weights}", "weight_version": 9}}'
    command = [
        "/bin/bash",
        "-c",
        as_request,
        "bash",
        str(there.hostname),
        str(there.port),
        "/update_weights_from_disk",
        body,
    ]
    done = as_nobody('exec "$@"', *command)
    assert done.stdout.startswith("HTTP/1.1 401 "), done
    assert str(weights) not in done.stdout
    assert state_of(engine) == before


def test_serving_by_itself_needs_a_key_and_keeps_it() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    env.pop(VARIABLE, None)
    command = [sys.executable, "-m", "roost.engines.serve", "toy_models:toy"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error[E113]: {VARIABLE} is not set" in done.stderr
    with subprocess.Popen(command, env={**env, VARIABLE: KEY}, stderr=subprocess.PIPE, text=True) as child:
        said = []
        try:
            for line in child.stderr or ():
                said.append(line)
                if line.startswith("ready "):
                    break
            url = said[-1].split()[1]
            assert ask("GET", f"{url}/get_model_info", key="")[0] == 401
            assert ask("GET", f"{url}/get_model_info")[0] == 200
            assert KEY.encode() not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
        finally:
            child.terminate()
        said += child.stderr or ()
    assert KEY not in "".join(said)


# The router ----------------------------------------------------------------------------------------


class Recorder:
    """An HTTP server that says it is an engine, and notes what it was asked and with which header."""

    def __init__(self) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                asked.append((self.path, self.headers.get("Authorization")))
                meta = '{"id": "x", "finish_reason": {"type": "length"}, "weight_version": "0"}'
                text = f'{{"served_model_name": "roost", "output_ids": [13], "meta_info": {meta}}}'.encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.close()


@pytest.fixture(scope="module")
def started_router() -> Iterator[Router]:
    with Router(health_period_s=1, worker_startup_s=3, key=KEY, log_level="debug") as started:
        yield started


@pytest.fixture
def router(started_router: Router) -> Iterator[Router]:
    """A router that has no engines when a test begins."""
    yield started_router
    for worker in started_router.workers():
        started_router.remove(worker.url)


def test_the_router_refuses_everything_without_its_key(
    router: Router, served: tuple[TorchEngine, str], recorder: Recorder
) -> None:
    router.add(served[1], KEY)
    engine_id = router.workers()[0].id
    routes = [
        ("POST", "/workers", {"url": recorder.url}),
        ("GET", "/workers", None),
        ("GET", f"/workers/{engine_id}", None),
        ("PUT", f"/workers/{engine_id}", {"priority": 1}),
        ("DELETE", f"/workers/{engine_id}", None),
        ("POST", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}),
        ("POST", "/v1/chat/completions", {"model": "roost", "messages": []}),
        ("POST", "/v1/completions", {"model": "roost", "prompt": "x"}),
        ("POST", "/flush_cache", {}),
        ("GET", "/get_loads", None),
        ("GET", "/get_model_info", None),
        ("POST", "/v1/tokenizers", {"name": "x", "source": "/etc"}),
        ("POST", "/wasm", {"modules": []}),
    ]
    for key in ("", WRONG):
        for method, route, body in routes:
            assert ask(method, f"{router.url}{route}", body, key=key)[0] == 401, (method, route)
    assert [(worker.id, worker.url) for worker in router.workers()] == [(engine_id, served[1])]
    client = EngineClient(router.url, key=KEY)
    requests = [{"input_ids": [1], "sampling_params": {"max_new_tokens": 1}} for _ in range(20)]
    assert all(len(answer[0].output_ids) == 1 for answer in client.generate_all(requests))
    client.close()
    assert recorder.asked == [], "an engine that was not admitted is never asked"


@pytest.mark.parametrize(
    ("key", "shown"), [("the-key-of-this-engine", "Bearer the-key-of-this-engine"), ("", "Bearer none")]
)
def test_the_router_presents_to_an_engine_the_key_of_that_engine_alone(
    key: str, shown: str, router: Router, recorder: Recorder
) -> None:
    router.add(recorder.url, key)
    client = EngineClient(router.url, key=KEY)
    (answer,) = client.generate_all([{"input_ids": [1]}])
    client.close()
    assert answer[0].output_ids == [13]
    assert ("/generate", shown) in recorder.asked
    assert {header for _, header in recorder.asked} <= {shown, None}


def test_nobody_reads_the_routers_key_from_a_command_line_or_a_log(router: Router) -> None:
    words = b""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words += Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
    assert router.url.rpartition(":")[2].encode() in words
    assert KEY.encode() not in words
    assert KEY not in router.logs()
    with pytest.raises(RolloutError) as caught:
        router.add("http://127.0.0.1:1", KEY)
    assert KEY not in str(caught.value)


# Those that run elsewhere ------------------------------------------------------------------------


def test_an_engine_elsewhere_with_another_key_is_an_error_that_says_so(served: tuple[TorchEngine, str]) -> None:
    engine = ExternalEngine(served[1], key=KEY)
    assert engine.health() == ""
    assert engine.ask_version() == served[0].version
    for key, what in ((WRONG, "refuses the key that it was shown"), ("", "asks for a key, and none is known")):
        other = ExternalEngine(served[1], key=key)
        with pytest.raises(RolloutError, match=what) as caught:
            other.ask_version()
        assert caught.value.codes == ("E113",)
        with pytest.raises(RolloutError, match=what):
            other.post("flush_cache", {})
        assert WRONG not in str(caught.value)


def test_a_client_says_which_engine_refuses_it(served: tuple[TorchEngine, str]) -> None:
    client = EngineClient(served[1], key=WRONG)
    with pytest.raises(RolloutError, match="status 401: the request does not present") as caught:
        client.generate_all([{"input_ids": [1]}])
    client.close()
    assert WRONG not in str(caught.value)

"""The HTTP front of engines, its client, and serving by itself."""

import asyncio
import http.client
import json
import logging
import os
import pickle
import signal
import socket
import threading
from urllib.parse import urlsplit

import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file
from serving import KEY, ask, deadline_in_flight, post, start_server, url_of
from toy_models import VOCABULARY, Gated, samples_in, toy, until

from roost import Engine, EngineOutput, EnginePlace, GenerationError, RolloutError, TorchEngine, lease_ports
from roost.engines import EngineClient
from roost.engines.server import EngineServer
from roost.errors import ClusterError, Finding


@pytest.fixture(scope="module")
def served():
    engine = TorchEngine(toy, context=64, length_multiple=16, batch_rows=8)
    yield engine, engine.start(EnginePlace(key=KEY))
    engine.stop()


@pytest.fixture
def fresh():
    engine = TorchEngine(toy, context=64, length_multiple=16, batch_rows=8)
    yield engine, engine.start(EnginePlace(key=KEY))
    engine.stop()


@pytest.fixture
def gated():
    module = Gated()
    engine = TorchEngine(lambda: module, context=64, length_multiple=16, batch_rows=4)
    yield engine, module, engine.start(EnginePlace(key=KEY))
    module.is_free.set()
    engine.stop()


@pytest.fixture
def client():
    clients = []

    def client(*args, **kwargs):
        clients.append(EngineClient(*args, **{"key": KEY, **kwargs}))
        return clients[-1]

    yield client
    for one in clients:
        one.close()


# The wire ------------------------------------------------------------------------------------


def test_one_sample_as_sglang_says_it(served):
    engine, url = served
    params = {"max_new_tokens": 5, "seed": 1, "temperature": 0.5}
    status, answer = post(f"{url}/generate", input_ids=[1, 2], sampling_params=params, return_logprob=True, rid="me")
    (expected,) = engine.generate([[1, 2]], params)
    assert status == 200
    assert answer == {
        "output_ids": expected.output_ids,
        "meta_info": {
            "id": "me",
            "finish_reason": {"type": "length", "length": 5},
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "weight_version": "0",
            "weight_versions": [0] * 5,
            "output_token_logprobs": [
                [p, i, None] for p, i in zip(expected.logprobs, expected.output_ids, strict=True)
            ],
        },
    }
    assert EngineOutput.from_wire(answer) == expected


def test_lists_where_several_were_asked_for(served):
    engine, url = served
    params = {"max_new_tokens": 3, "sampling_seed": 1}
    _, two = post(f"{url}/generate", input_ids=[1], sampling_params={**params, "n": 2})
    assert [EngineOutput.from_wire(one).output_ids for one in two] == [
        one.output_ids for one in engine.generate([[1]], {**params, "n": 2})
    ]
    assert "output_token_logprobs" not in two[0]["meta_info"]
    _, batch = post(f"{url}/generate", input_ids=[[1], [2, 3]], sampling_params=params, rid=["a", "b"])
    assert [one["meta_info"]["id"] for one in batch] == ["a", "b"]
    _, single = post(f"{url}/generate", input_ids=[[1]], sampling_params=params)
    assert isinstance(single, list)


def test_a_server_that_knows_one_version_only():
    answer = {"output_ids": [1, 2], "meta_info": {"weight_version": "7", "finish_reason": {"type": "stop"}}}
    assert EngineOutput.from_wire(answer) == EngineOutput([1, 2], [], [7, 7], "stop")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[1]", "must be a JSON object"),
        (b"{}", "no input_ids"),
        (b'{"text": "hello"}', "no tokenizer"),
        (b'{"input_ids": "x"}', "input_ids must be a list"),
        (b'{"input_ids": [1, [2]]}', "input_ids must be a list"),
        (b'{"input_ids": []}', "the prompt is empty"),
        (b'{"input_ids": [[], [1]]}', "prompt 0 is empty"),
        (b'{"input_ids": [1], "stream": true}', "does not stream"),
        (b'{"input_ids": [1], "sampling_params": [1]}', "sampling_params must be an object"),
        (b'{"input_ids": [99], "sampling_params": {"n": 0}}', "out of range"),
        (b'{"input_ids": [99], "sampling_params": {"n": 0}}', "n must be"),
        (b'{"input_ids": [1.5, null, {}]}', "out of range"),
    ],
)
def test_bad_requests_get_a_message(served, raw, message):
    status, answer = ask("POST", f"{served[1]}/generate", raw=raw)
    assert status == 400
    assert message in answer["error"]["message"]
    assert "Traceback" not in json.dumps(answer)


def test_routes_that_there_are_not(served):
    status, answer = ask("GET", f"{served[1]}/nothing")
    assert (status, answer["error"]["message"]) == (404, "GET /nothing: Not Found")
    assert ask("GET", f"{served[1]}/generate")[0] == 405


def test_what_it_says_of_itself(served):
    _, url = served
    assert ask("GET", f"{url}/health") == (200, "ok")
    assert ask("GET", f"{url}/health_generate") == (200, "ok")
    for route in ("get_model_info", "model_info"):
        assert ask("GET", f"{url}/{route}") == (200, {"is_generation": True, "weight_version": "0"})
    for route in ("get_server_info", "server_info"):
        status, info = ask("GET", f"{url}/{route}")
        assert status == 200
        assert (info["engine"], info["context_length"], info["dp_size"]) == ("TorchEngine", 64, 1)
    assert post(f"{url}/flush_cache")[0] == 200


def test_connections_are_kept(served):
    where = urlsplit(served[1])
    connection = http.client.HTTPConnection(where.hostname, where.port)
    ports = set()
    for _ in range(3):
        connection.request("POST", "/generate", b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}')
        assert connection.getresponse().read()
        ports.add(connection.sock.getsockname()[1])
    connection.close()
    assert len(ports) == 1


def test_http_2_is_turned_away_without_a_word(served, caplog):
    where = urlsplit(served[1])
    with caplog.at_level(logging.DEBUG), socket.create_connection((where.hostname, where.port)) as stranger:
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        stranger.settimeout(30)
        while stranger.recv(4096):
            pass
    assert ask("GET", f"{served[1]}/health")[0] == 200
    assert "Traceback" not in caplog.text


def test_a_client_that_hangs_up_takes_its_request_along(gated):
    engine, _, url = gated
    where = urlsplit(url)
    body = b'{"input_ids": [1], "sampling_params": {"n": 9}}'
    with socket.create_connection((where.hostname, where.port)) as impatient:
        head = (
            f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        impatient.sendall(head.encode() + body)
        until(lambda: engine.info()["num_running_samples"] == 4)
    until(lambda: samples_in(engine) == 0)


# Control -------------------------------------------------------------------------------------


def test_pause_abort_and_continue(gated, client):
    engine, module, url = gated
    results = []
    one = client(url)
    request = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4, "seed": 1}}
    asking = threading.Thread(target=lambda: results.extend(one.generate_all([{**request, "rid": "x"}])))
    asking.start()
    until(lambda: engine.info()["num_running_samples"] == 1)
    module.step(2)
    until(lambda: len(engine._batcher._running[0].output.output_ids) == 2)
    assert post(f"{url}/pause_generation", mode="abort")[0] == 200
    asking.join()
    assert [(output.finish_reason, len(output.output_ids)) for output in results[0]] == [("abort", 2)]
    assert ask("GET", f"{url}/health")[0] == 200
    assert post(f"{url}/pause_generation", mode="never")[0] == 400
    module.is_free.set()
    assert post(f"{url}/continue_generation")[0] == 200
    assert one.generate_all([request])[0][0].finish_reason == "length"


def test_abort_request(gated, client):
    engine, _, url = gated
    one, results = client(url), []
    requests = [{"input_ids": [1], "rid": rid} for rid in "abc"]
    asking = threading.Thread(target=lambda: results.extend(one.generate_all(requests)))
    asking.start()
    until(lambda: samples_in(engine) == 3)
    assert post(f"{url}/abort_request")[0] == 400
    assert post(f"{url}/abort_request", rid="b")[0] == 200
    until(lambda: samples_in(engine) == 2)
    assert post(f"{url}/abort_request", abort_all=True)[0] == 200
    asking.join()
    assert [answer[0].finish_reason for answer in results] == ["abort"] * 3


def test_memory_is_given_and_taken(fresh):
    engine, url = fresh
    assert post(f"{url}/release_memory_occupation")[0] == 200
    assert engine.info()["is_offloaded"]
    assert post(f"{url}/resume_memory_occupation")[0] == 200
    assert post(f"{url}/generate", input_ids=[1], sampling_params={"max_new_tokens": 1})[0] == 200


def weights(seed):
    return {name: tensor for name, tensor in toy(seed).state_dict().items() if name != "head.weight"}


def split_into_shards(folder, tensors):
    names = sorted(tensors)
    shards = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, mine in shards.items():
        save_file({name: tensors[name] for name in mine}, folder / file)
    index = {"weight_map": {name: file for file, mine in shards.items() for name in mine}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_weights_from_disk(fresh, tmp_path):
    engine, url = fresh
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    save_file(weights(1), tmp_path / "one" / "model.safetensors")
    split_into_shards(tmp_path / "two", weights(2))
    save_file({"stray": torch.zeros(1)}, tmp_path / "two" / "stray.safetensors")  # not in the index
    status, answer = post(f"{url}/update_weights_from_disk", model_path=str(tmp_path / "one"), weight_version="5")
    assert (status, answer["success"]) == (200, True)
    assert ask("GET", f"{url}/get_model_info")[1]["weight_version"] == "5"
    status, answer = post(f"{url}/update_weights_from_disk", model_path=str(tmp_path / "two"))
    assert (status, engine.version) == (200, 6)
    _, answer = post(f"{url}/generate", input_ids=[1], sampling_params={"max_new_tokens": 5, "seed": 1})
    other = TorchEngine(lambda: toy(2), context=64, length_multiple=16)
    assert answer["output_ids"] == other.generate([[1]], {"max_new_tokens": 5, "seed": 1})[0].output_ids
    assert answer["meta_info"]["weight_versions"] == [6] * 5
    other.stop()


def test_weights_that_are_not_taken(fresh, tmp_path):
    engine, url = fresh
    update = f"{url}/update_weights_from_disk"
    cases = {"nowhere": "not a folder"}
    for name in ("empty", "damaged", "twice", "lost", "outside", "noindex", "other"):
        (tmp_path / name).mkdir()
    cases["empty"] = "has no *.safetensors"
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nonsense")
    cases["damaged"] = "cannot be read"
    for file in "ab":
        save_file({"scale": torch.zeros(1)}, tmp_path / "twice" / f"{file}.safetensors")
    cases["twice"] = "scale is in a.safetensors and in b.safetensors"
    split_into_shards(tmp_path / "lost", weights(1))
    save_file({}, tmp_path / "lost" / "a.safetensors")
    cases["lost"] = "is not in a.safetensors"
    (tmp_path / "outside" / "x.safetensors.index.json").write_text('{"weight_map": {"scale": "../x.safetensors"}}')
    cases["outside"] = "not in the folder itself"
    (tmp_path / "noindex" / "x.safetensors.index.json").write_text("[]")
    cases["noindex"] = "not an index of safetensors files"
    save_file({**weights(1), "scale": torch.zeros(3)}, tmp_path / "other" / "model.safetensors")
    cases["other"] = "scale has shape [3]"
    for name, message in cases.items():
        status, answer = post(update, model_path=str(tmp_path / name), weight_version="1")
        assert (status, answer["success"]) == (400, False), name
        assert message in answer["message"]
    assert post(update)[0] == 400
    assert post(update, model_path="x", weight_version="new")[0] == 400
    assert engine.version == 0
    (tmp_path / "good").mkdir()
    save_file(weights(1), tmp_path / "good" / "model.safetensors")
    assert post(update, model_path=str(tmp_path / "good"), weight_version=0)[0] == 409


# Ports and ends ------------------------------------------------------------------------------


def test_it_binds_beside_the_lease_that_holds_its_port():
    engine = TorchEngine(toy)
    with lease_ports() as lease:
        url = engine.start(EnginePlace(server_port=lease.port, key=KEY))
        assert url == f"http://127.0.0.1:{lease.port}"
        assert ask("GET", f"{url}/health")[0] == 200
        engine.stop()


def test_a_port_that_somebody_has(served):
    server = EngineServer(served[0], port=urlsplit(served[1]).port)
    with pytest.raises(RolloutError, match="cannot listen") as error:
        server.start()
    assert error.value.codes == ("E110",)
    server.stop()


def test_other_members_serve_nothing():
    engine = TorchEngine(toy)
    assert engine.start(EnginePlace(member=1, num_members=2)) == ""
    engine.stop()


def test_stopping_answers_what_is_left_and_leaves_no_thread(client):
    before = set(threading.enumerate())
    module = Gated()
    engine = TorchEngine(lambda: module, batch_rows=2)
    url = engine.start(EnginePlace(key=KEY))
    one, results = client(url, attempts=1), []
    asking = threading.Thread(target=lambda: results.extend(one.generate_all([{"input_ids": [1]}], return_errors=True)))
    asking.start()
    until(lambda: engine.info()["num_running_samples"] == 1)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    until(lambda: engine._batcher.is_closed)
    module.is_free.set()
    stopping.join()
    asking.join()
    engine.stop()
    assert "status 503: error[E105]: the engine was stopped" in str(results[0])
    with pytest.raises(OSError, match="refused"):
        ask("GET", f"{url}/health")
    one.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RolloutError, match="stopped"):
        engine.start(EnginePlace(key=KEY))


# An engine of one's own ----------------------------------------------------------------------


class Echo(Engine):
    """Repeats the last token."""

    def __init__(self):
        self.gain = torch.zeros(1)
        self.entered = threading.Event()
        self.may_go = threading.Event()

    def generate(self, prompts, params):
        self.entered.set()
        self.may_go.wait()
        if prompts == [[0]]:
            raise KeyError("zero")
        return [EngineOutput([p[-1]] * 2, [0.0] * 2, [self.version] * 2, "length", len(p)) for p in prompts]

    def describe_weights(self):
        return {"gain": ((1,), "float32")}

    def load_weights(self, named, version):
        with self.lock:
            self.gain.copy_(named["gain"])
            self.version = version


def test_an_engine_of_three_methods(tmp_path, client):
    engine = Echo()
    engine.may_go.set()
    url = engine.start(EnginePlace(key=KEY))
    try:
        requests = [{"input_ids": [index, index + 1]} for index in range(20)]
        assert [a[0].output_ids for a in client(url).generate_all(requests)] == [[i + 1] * 2 for i in range(20)]
        save_file({"gain": torch.ones(1)}, tmp_path / "x.safetensors")
        assert post(f"{url}/update_weights_from_disk", model_path=str(tmp_path))[0] == 200
        assert (engine.version, engine.gain.item()) == (1, 1.0)
        assert [shard.name for shard in engine.shards()] == ["gain"]
        status, answer = post(f"{url}/generate", input_ids=[0])
        assert (status, answer["error"]["message"]) == (500, "KeyError: 'zero'")
        assert "KeyError" in engine.logs()
        assert ask("GET", f"{url}/get_server_info")[1]["engine"] == "Echo"
    finally:
        engine.stop()


def test_the_default_gate():
    engine = Echo()
    running = engine.submit([[1]], {})
    engine.entered.wait()
    pausing = threading.Thread(target=engine.pause)
    pausing.start()
    until(lambda: not engine._defaults.may_run.is_set())
    new = engine.submit([[2]], {})
    assert pausing.is_alive()
    engine.may_go.set()
    pausing.join()
    assert running.result()[0].output_ids == [1, 1]
    assert not new.done()
    engine.resume()
    assert new.result()[0].output_ids == [2, 2]
    engine.stop()
    with pytest.raises(RolloutError, match="stopped"):
        engine.submit([[1]], {})


# The client ----------------------------------------------------------------------------------


def test_many_requests_keep_their_order(served, client):
    engine, url = served
    requests = [
        {"input_ids": [index % VOCABULARY], "sampling_params": {"max_new_tokens": 1, "seed": index}}
        for index in range(300)
    ]
    answers = client(url).generate_all(requests, concurrency=100)
    assert [answer[0].output_ids for answer in answers] == [
        engine.generate([r["input_ids"]], r["sampling_params"])[0].output_ids for r in requests
    ]


def test_in_an_event_loop(served):
    async def both():
        one = EngineClient(served[1], key=KEY)
        request = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "seed": 1}}
        found = await asyncio.gather(one.generate([request]), one.generate([request] * 2))
        await one.aclose()
        return found

    first, second = asyncio.run(both())
    assert first + first == second


class Faulty:
    """A server whose answers are given beforehand; the last one again and again."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._lease = lease_ports()
        self.url = f"http://127.0.0.1:{self._lease.port}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._up.wait()

    def _run(self):
        async def handle(request):
            self.asked.append(await request.json())
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if answer == "hang up":
                request.transport.close()
            return web.json_response(
                answer if isinstance(answer, dict) else {}, status=answer if isinstance(answer, int) else 200
            )

        async def start():
            app = web.Application()
            app.router.add_post("/generate", handle)
            self._runner = web.AppRunner(app)
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", self._lease.port, reuse_address=True).start()
            self._up.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    def stop(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._lease.release()


@pytest.fixture
def faulty():
    servers = []

    def faulty(*answers):
        servers.append(Faulty(*answers))
        return servers[-1]

    yield faulty
    for server in servers:
        server.stop()


GOOD = {"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}, "weight_version": "1"}}


def test_what_may_be_better_next_time_is_tried_again(faulty, client):
    server = faulty(503, "hang up", 429, GOOD)
    request = {"input_ids": [1], "sampling_params": {"seed": 5}}
    assert client(server.url).generate_all([request]) == [[EngineOutput([1], [], [1], "stop")]]
    assert len(server.asked) == 4
    assert {asked["sampling_params"]["sampling_seed"] for asked in server.asked} == {5}
    assert all("seed" not in asked["sampling_params"] for asked in server.asked)


def test_the_error_says_which_failed_where_and_how_often(faulty, client):
    server = faulty(500)
    one = client(server.url, attempts=2)
    with pytest.raises(RolloutError) as error:
        one.generate_all([{"input_ids": [1]}, {"input_ids": [1], "rid": "mine"}])
    text = str(error.value)
    assert error.value.codes == ("E108",)
    assert "2 of 2 requests failed" in text
    assert f"request 1 (mine): 2 attempts, the last at {server.url}: status 500" in text


def test_an_error_keeps_the_answers_of_requests_that_did_not_fail(faulty, client):
    bad, good = faulty(400), faulty(GOOD)
    one = client([bad.url, good.url])
    one.names = {bad.url: "small/0", good.url: "small/1"}
    with pytest.raises(GenerationError, match="2 of 4 requests failed") as error:
        one.generate_all([{"input_ids": [1]}] * 4)
    for found in (error.value, pickle.loads(pickle.dumps(error.value))):  # noqa: S301
        assert found.finished == {index: [EngineOutput([1], [], [1], "stop")] for index in (1, 3)}
        assert f"request 2: 1 attempt, the last at small/0 ({bad.url}): status 400" in str(found)


def test_an_error_keeps_the_answers_that_came_before_the_deadline(served, client):
    process = start_server("toy_models:toy", "--context", "32")
    stopped = url_of(process)
    one = client([served[1], stopped])
    one.names = {served[1]: "small/0", stopped: "small/1"}
    request = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    os.kill(process.pid, signal.SIGSTOP)
    try:
        for timeout_s in (2.0, 10.0, 50.0):  # a busy machine may need longer for the answers that come
            with pytest.raises(GenerationError) as error:
                one.generate_all([request] * 4, timeout_s=timeout_s)
            if set(error.value.finished) == {0, 2} and "not sent" not in str(error.value):
                break
        assert set(error.value.finished) == {0, 2}
        assert f"request 3: 1 attempt, the last at small/1 ({stopped}): no answer before the deadline" in str(
            error.value
        )
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_client_without_engines_says_so(client):
    with pytest.raises(GenerationError, match="the last at no engine: OSError: no engine is alive") as error:
        client([], attempts=2).generate_all([{"input_ids": [1]}])
    assert error.value.codes == ("E108",)


def test_a_request_that_is_cut_off_as_its_address_is_abandoned_fails_as_others_do(client, monkeypatch):
    asking = client("http://127.0.0.1:1", attempts=2)

    async def cut_off(*request):
        asking.abandon("the router has ended")
        raise RuntimeError("Connection closed.")  # what aiohttp raises there

    monkeypatch.setattr(asking, "_post", cut_off)
    with pytest.raises(GenerationError, match="the last at no engine: OSError: the router has ended"):
        asking.generate_all([{"input_ids": [1]}])

    async def broken(*request):
        raise RuntimeError("a mistake in the program")

    asking.urls = ["http://127.0.0.1:1"]
    monkeypatch.setattr(asking, "_post", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        asking.generate_all([{"input_ids": [1]}])


def test_a_bad_request_is_not_tried_again_and_others_are_answered(served, client):
    good, bad = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}, {"input_ids": [999]}
    answers = client(served[1]).generate_all([good, bad], return_errors=True)
    assert len(answers[0]) == 1
    assert isinstance(answers[1], RolloutError)
    assert "1 attempt," in str(answers[1])
    assert "out of range" in str(answers[1])


def test_the_deadline_ends_it(gated, client):
    assert "no answer before the deadline" in deadline_in_flight(client(gated[2]), [{"input_ids": [1]}])
    until(lambda: gated[0].info()["num_running_samples"] == 0)


def test_a_wait_for_answers_ends_with_the_error_of_its_check(gated, client, monkeypatch):
    monkeypatch.setattr("roost.engines.client.SLICE_S", 0.05)

    def check():
        if gated[0].info()["num_running_samples"]:
            raise ClusterError([Finding("R116", "Ray's head is gone")])

    with pytest.raises(ClusterError, match="head is gone"):
        client(gated[2]).generate_all([{"input_ids": [1]}], timeout_s=120.0, check=check)
    until(lambda: gated[0].info()["num_running_samples"] == 0)


def test_several_engines_take_turns_and_dead_ones_are_passed_over(served, client):
    with lease_ports() as dead:
        one = client([f"http://127.0.0.1:{dead.port}", served[1]])
        request = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "seed": 1}}
        assert len(one.generate_all([request] * 4)) == 4


# By itself -----------------------------------------------------------------------------------


def test_serving_by_itself():
    process = start_server("toy_models:toy", "--context", "32", "--version", "4")
    try:
        url = url_of(process)
        assert ask("GET", f"{url}/get_model_info")[1]["weight_version"] == "4"
        assert ask("GET", f"{url}/get_server_info")[1]["context_length"] == 32
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("name", ["no_such_module:toy", "toy_models:no_such", "toy_models", "toy_models:VOCABULARY"])
def test_what_cannot_be_served(name, monkeypatch, capsys):
    from roost.engines import serve

    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    monkeypatch.setenv("ROOST_SERVER_KEY", KEY)
    assert serve.main([name]) == 2
    error = capsys.readouterr().err
    assert "error[E109]" in error
    assert "Traceback" not in error

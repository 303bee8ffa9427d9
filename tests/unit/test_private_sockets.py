"""Servers on Unix sockets in a private folder: nobody else reaches them, and bursts of connections are waited for."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from other_user import as_nobody, needs_root
from toy_models import until

from roost import RolloutError
from roost.cluster.private_folder import PrivateFolder
from roost.engines.http_calls import ask
from roost.engines.vllm.generating import VllmClient

BACKLOG = 1
ANSWER = {
    "choices": [
        {
            "token_ids": [3],
            "weight_versions": [],
            "finish_reason": "length",
            "logprobs": {"content": [{"logprob": -1.0}]},
        }
    ],
    "usage": {"prompt_tokens": 1},
}


class Server:
    """An HTTP server that has a socket from the start, and accepts connections from :meth:`start` on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.bodies: list[object] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(BACKLOG)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def waiting(self) -> int:
        """How many connections nobody has accepted."""
        return sum(line.endswith(f" {self.path}") for line in Path("/proc/net/unix").read_text().splitlines()) - 1

    def start(self) -> None:
        async def handle(request: web.Request) -> web.Response:
            self.bodies.append(await request.json())
            return web.json_response(ANSWER)

        async def serve() -> None:
            app = web.Application()
            app.router.add_post("/{route:.*}", handle)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.SockSite(runner, self._socket, backlog=BACKLOG).start()

        self._thread.start()
        asyncio.run_coroutine_threadsafe(serve(), self._loop).result(60)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._socket.close()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # Not tmp_path: its path may be too long for a socket, and its parents may be closed to other users, too.
    parent = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent))
    made = PrivateFolder("vllm")
    yield made.path()
    made.close()
    assert list((parent / "roost" / "vllm").iterdir()) == []
    shutil.rmtree(parent)


@pytest.fixture
def server(folder: str) -> Iterator[Server]:
    made = Server(f"{folder}/http")
    yield made
    made.stop()


def test_requests_wait_while_the_server_accepts_no_connection(server: Server) -> None:
    asking = VllmClient("http://vllm", server.path, 0)
    futures = [asking.submit([{"token_ids": [number]}], f"{number}") for number in range(50)]
    until(lambda: server.waiting() > BACKLOG)  # the kernel takes one more, and refuses the rest
    server.start()
    assert [future.result(60)[0].output_ids for future in futures] == [[3]] * 50
    assert sorted(json.loads(json.dumps(body))["token_ids"][0] for body in server.bodies) == list(range(50))
    asking.close()


def test_a_command_waits_while_the_server_accepts_no_connection(server: Server) -> None:
    early = []
    while server.waiting() <= BACKLOG:
        early.append(socket.socket(socket.AF_UNIX))
        early[-1].connect(server.path)
    answers: list[object] = []
    asking = threading.Thread(
        target=lambda: answers.append(ask("http://vllm/pause", "POST", {"mode": "wait"}, socket_path=server.path))
    )
    asking.start()
    server.start()
    asking.join(60)
    assert answers == [ANSWER]
    for one in early:
        one.close()


def test_a_command_has_a_limit_and_a_named_error(server: Server) -> None:
    early = []
    while server.waiting() <= BACKLOG:
        early.append(socket.socket(socket.AF_UNIX))
        early[-1].connect(server.path)
    with pytest.raises(RolloutError, match="POST http://vllm/pause does not answer") as caught:
        ask("http://vllm/pause", "POST", {}, 0.1, socket_path=server.path)
    assert caught.value.codes == ("E111",)
    for one in early:
        one.close()
    with pytest.raises(RolloutError, match="does not answer"):
        ask("http://vllm/pause", "POST", {}, socket_path=f"{server.path}-of-nobody")


def test_requests_to_a_server_that_is_gone_fail(folder: str) -> None:
    asking = VllmClient("http://vllm", f"{folder}/http", 0)
    with pytest.raises(RolloutError, match="vLLM's server does not answer"):
        asking.submit([{"token_ids": [1]}], "x").result(60)
    asking.close()


@needs_root
def test_another_user_cannot_even_see_the_socket(server: Server) -> None:
    folder = Path(server.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    private = folder.parents[1]
    private.parent.chmod(0o755)  # another user reaches the private folder of Roost, which alone protects the socket
    assert as_nobody('[ -d "$1" ]', str(private)).returncode == 0
    assert as_nobody('[ -e "$1" ]', server.path).returncode == 1
    assert as_nobody('ls "$1"', str(private)).returncode != 0


def test_a_reply_counts_although_the_server_did_not_read_the_body(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def reply() -> None:
            connection, _ = server.accept()
            with connection:
                received = b""
                while b"\r\n\r\n" not in received:
                    received += connection.recv(1)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

        thread = threading.Thread(target=reply)
        thread.start()
        body = {"larger than what a socket buffers": "x" * 4_000_000}
        assert ask("http://vllm/resume", "POST", body, 10.0, socket_path=path) == {}
        thread.join()

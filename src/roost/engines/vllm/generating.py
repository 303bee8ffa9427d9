"""A client for many requests at once to vLLM's own server, in a thread with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import aiohttp

from roost.engines.engine import EngineOutput, stopped
from roost.engines.sampling import SamplingParams, check_request, uniform
from roost.errors import Finding, RolloutError

__all__ = ["VllmClient", "bodies_of"]

NAMES = {
    "frequency_penalty": "frequency_penalty",
    "min_new_tokens": "min_tokens",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Sampling parameters that are passed on → their names in vLLM."""
CONNECT_AGAIN_S = 0.02
"""Seconds between attempts to connect to a server whose backlog is full."""

logger = logging.getLogger(__name__)


def bodies_of(
    prompts: Sequence[Sequence[int]],
    params: Mapping[str, Any],
    vocabulary: int,
    context: int,
    eos: Sequence[int],
) -> list[dict[str, Any]]:
    """Return the requests to vLLM for a request in SGLang's format: one for each sample.

    vLLM would seed the samples of one request with consecutive numbers, so that requests with neighbouring seeds would
    share samples. It would also crash on a token id outside its vocabulary.

    Raises:
        RolloutError: The request is invalid; with all of its problems (E101).
    """
    own = {name: value for name, value in params.items() if name not in NAMES}
    read = check_request(prompts, own, vocabulary, context)
    more = {NAMES[name]: value for name, value in params.items() if name in NAMES and value is not None}
    stop = set(read.stop_token_ids) | (set() if params.get("ignore_eos") else set(eos))
    return [
        {
            "token_ids": list(prompt),
            "sampling_params": {
                **more,
                "max_tokens": read.max_new_tokens,
                "temperature": read.temperature,
                "seed": _seed(read, index, len(prompt)),
                "stop_token_ids": sorted(stop),
                "ignore_eos": True,  # those of the model are among the stop tokens
                "logprobs": 0,
                "detokenize": False,
            },
        }
        for prompt in prompts
        for index in range(read.n)
    ]


def _seed(read: SamplingParams, index: int, length: int) -> int:
    """Return the seed of one sample. It depends on the length so far: a continued sample draws new numbers."""
    return int(uniform(read.seed, index, length) * (1 << 53))


class _UnixLoop(asyncio.SelectorEventLoop):
    """An event loop that waits to connect to a Unix socket while the server's backlog is full.

    Over TCP the kernel retries by itself. On a Unix socket ``connect`` fails with EAGAIN, which asyncio takes for a
    connection in progress, so that sending fails later.
    """

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **options: Any) -> Any:
        """Connect as the base class does, but retry while the backlog is full."""
        made = socket.socket(socket.AF_UNIX)
        made.setblocking(False)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    made.connect(path)
                    break
                await asyncio.sleep(CONNECT_AGAIN_S)
            return await super().create_unix_connection(protocol_factory, sock=made, **options)
        except BaseException:
            made.close()
            raise


class VllmClient:
    """A client of vLLM's server, with a thread of its own.

    Args:
        url: Base URL, as a name for the server.
        socket_path: The Unix socket of the server.
        first_version: Version of the weights with which vLLM started, which it calls ``default``.
    """

    def __init__(self, url: str, socket_path: str, first_version: int) -> None:
        self._url = url
        self._socket_path = socket_path
        self._first_version = first_version
        self._session: aiohttp.ClientSession | None = None
        self._names: dict[str, list[str]] = {}
        self._is_closed = False
        self._loop = _UnixLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """Number of samples in flight."""
        return sum(len(names) for names in list(self._names.values()))

    def names(self, rid: str) -> list[str]:
        """Return vLLM's ids of the samples of a request."""
        return [f"generate-tokens-{name}" for name in self._names.get(rid, ())]

    def submit(self, bodies: Sequence[Mapping[str, Any]], rid: str) -> Future[list[EngineOutput]]:
        """Send requests and return a future of their outputs. Cancelling the future drops the requests."""
        if self._is_closed:
            raise stopped()
        return asyncio.run_coroutine_threadsafe(self._ask_all(bodies, rid or uuid.uuid4().hex), self._loop)

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]], rid: str) -> list[EngineOutput]:
        names = [uuid.uuid4().hex for _ in bodies]
        known = self._names.setdefault(rid, [])
        known += names
        asked = [asyncio.ensure_future(self._ask(body, name)) for body, name in zip(bodies, names, strict=True)]
        try:
            return list(await asyncio.gather(*asked))
        except BaseException:
            for one in asked:
                one.cancel()
            raise
        finally:
            for name in names:
                known.remove(name)
            if not known:
                self._names.pop(rid, None)

    async def _ask(self, body: Mapping[str, Any], name: str) -> EngineOutput:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._socket_path, limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with self._session.post(
                f"{self._url}/inference/v1/generate", json={**body, "request_id": name}
            ) as answer:
                status, text = answer.status, await answer.text()
        except (aiohttp.ClientError, OSError) as error:
            message = f"vLLM's server does not answer: {type(error).__name__}: {error}"
            raise RolloutError([Finding("E111", message)]) from error
        if status != 200:
            raise RolloutError(
                [Finding("E101" if status == 400 else "E111", f"vLLM answered {status}: {_message(text)}")]
            )
        return self._output(json.loads(text))

    def _output(self, answer: Mapping[str, Any]) -> EngineOutput:
        choice = answer["choices"][0]
        tokens = list(choice["token_ids"])
        versions = [self._first_version] * len(tokens)
        for span in choice["weight_versions"] or ():
            if span["version"].isdigit():
                versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
        reason = choice["finish_reason"] if choice["finish_reason"] in ("length", "abort") else "stop"
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"] or ()]
        return EngineOutput(tokens, logprobs, versions, reason, answer["usage"]["prompt_tokens"])

    def close(self) -> None:
        """Cancel all requests and stop the thread; takes at most about 10 s. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if self._session is not None:
                await self._session.close()

        try:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        except Exception as error:
            logger.info("closing the connections to vLLM failed: %s: %s", type(error).__name__, error)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _message(text: str) -> str:
    """Return the message in the body of an error, in one line."""
    with contextlib.suppress(ValueError, TypeError, KeyError):  # not JSON in this format: use the whole body
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:500]

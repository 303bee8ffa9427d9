"""A client for many requests at once to engines, or to the router in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import aiohttp

from roost.engines.engine import ENGINE_HEADER, EngineOutput
from roost.engines.keys import headers_of
from roost.engines.sampling import check_seeds
from roost.errors import Finding, GenerationError, counted

__all__ = ["EngineClient"]

MAX_NAMED = 10
"""Number of failed requests that an error names at most."""
RETRIED = (408, 425, 429)
"""HTTP statuses after which a request is sent again, besides all from 500 up."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0
SLICE_S = 2.0
"""Seconds between two checks of :meth:`EngineClient.generate_all`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Failure:
    """A request that failed, after its last attempt."""

    index: int
    rid: str
    engine: str
    attempts: int
    reason: str

    def __str__(self) -> str:
        name = f"request {self.index}" + (f" ({self.rid})" if self.rid else "")
        return f"{name}: {counted(self.attempts, 'attempt')}, the last at {self.engine}: {self.reason}"


class EngineClient:
    """Sends requests in SGLang's format, and retries those that fail.

    A request is sent again after a connection error, a server error or the death of its engine. Retries are safe:
    a request with a seed gets the same samples from every engine.

    Args:
        url: URL of the router, or of one or more engines, which are used round-robin.
        attempts: Number of times that a request is sent at most.
        timeout_s: Seconds that a call may take, all attempts included.
        concurrency: Number of requests of one call that are in flight at most.
        key: The key of the router or of all engines; or a mapping from URL to key.

    Attributes:
        urls: Destinations of requests: the router, or the engines.
        names: URL → name of the engine, for errors.
        keys: URL → key.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        attempts: int = 8,
        timeout_s: float = 1800.0,
        concurrency: int = 256,
        *,
        key: str | Mapping[str, str] = "",
    ) -> None:
        self.urls = [one.rstrip("/") for one in ([url] if isinstance(url, str) else url)]
        self.names: dict[str, str] = {}
        self.keys = dict.fromkeys(self.urls, key) if isinstance(key, str) else dict(key)
        self.attempts = attempts
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        self._url_epoch = 0  # counts the calls of abandon()
        self._reason = "no engine is alive"
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[int, aiohttp.ClientSession]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    # In an event loop ----------------------------------------------------------------------

    async def generate(
        self,
        requests: Sequence[Mapping[str, Any]],
        concurrency: int | None = None,
        timeout_s: float | None = None,
        return_errors: bool = False,
    ) -> list[Any]:
        """Return the answers to requests, in the order of the requests; each is a list of :class:`EngineOutput`.

        Args:
            requests: Bodies of ``/generate``: ``input_ids``, ``sampling_params``, and optionally ``rid``.
            concurrency: Number of requests in flight at most; by default that of the client.
            timeout_s: Seconds that all requests together may take; by default that of the client.
            return_errors: Put a ``RolloutError`` into the list in place of the answer of a request that failed.
                Otherwise raise one error when all requests have ended.

        Raises:
            GenerationError: Some requests failed; names the engine, the attempts and the reason of each (E108). Its
                ``finished`` has the answers to the other requests.
            RolloutError: Some requests have a seed that is invalid for engines (E101). No request was sent.
        """
        check_seeds(requests)
        until_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        gate = asyncio.Semaphore(concurrency or self.concurrency)

        async def one(index: int) -> list[EngineOutput] | _Failure:
            async with gate:
                return await self._ask(index, requests[index], until_s)

        found = await asyncio.gather(*(one(index) for index in range(len(requests))))
        failures = [answer for answer in found if isinstance(answer, _Failure)]
        if failures and not return_errors:
            finished = {index: answer for index, answer in enumerate(found) if not isinstance(answer, _Failure)}
            raise _error(failures, len(requests), finished)
        return [_error([answer], 1, {}) if isinstance(answer, _Failure) else answer for answer in found]

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        found = self._sessions.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found[1].close()

    def abandon(self, reason: str) -> None:
        """Stop sending until :attr:`urls` is set again, and reject the answers to all requests in flight.

        Requests in flight count as failed, and are sent again once :attr:`urls` is set. Their connections are closed,
        so that later requests do not reuse them. Any thread may call this.

        Args:
            reason: Reason for the errors of these requests, such as that the router has ended.
        """
        self._reason = reason
        self.urls = []
        self._url_epoch += 1  # after urls: a thread that reads the new epoch reads no old URL
        for loop in list(self._sessions):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._session()))

    async def _ask(self, index: int, request: Mapping[str, Any], until_s: float) -> list[EngineOutput] | _Failure:
        body = json.dumps(_with_seed(request)).encode()
        engine, reason, attempt = "no engine", "the deadline passed, and it was not sent", 0
        wait_s = FIRST_WAIT_S
        while attempt < self.attempts and time.monotonic() < until_s:
            url_epoch = self._url_epoch
            urls = self.urls  # one list for this attempt: another thread replaces it when engines come and go
            url = urls[(index + attempt) % len(urls)] if urls else ""
            engine = self._named(url) if url else "no engine"
            attempt += 1
            try:
                if not url:
                    raise OSError(self._reason)
                status, text, name = await self._post(url, body, until_s - time.monotonic())
                engine = f"{name} ({url})" if name else engine
                if url_epoch != self._url_epoch:
                    raise OSError(self._reason)
                if status == 200:
                    answer = json.loads(text)
                    return [EngineOutput.from_wire(o) for o in (answer if isinstance(answer, list) else [answer])]
                reason = f"status {status}: {_message(text)}"
                if status < 500 and status not in RETRIED:
                    break
            except asyncio.TimeoutError:
                reason = "no answer before the deadline"
            except (aiohttp.ClientError, OSError, ValueError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
            except RuntimeError as error:
                if url_epoch == self._url_epoch:
                    raise
                # aiohttp raises this if abandon() closes the connection while the answer is read.
                reason = f"{self._reason} ({error})"
            if attempt < self.attempts:
                left_s = until_s - time.monotonic()
                await asyncio.sleep(max(0.0, min(wait_s * random.uniform(0.5, 1.5), left_s)))  # noqa: S311
                wait_s = min(wait_s * 2, LONGEST_WAIT_S)
        return _Failure(index, str(request.get("rid") or ""), engine, attempt, reason)

    def _named(self, url: str) -> str:
        """Return the name of the engine at a URL together with the URL, for errors."""
        name = self.names.get(url)
        return f"{name} ({url})" if name else url

    async def _post(self, url: str, body: bytes, timeout_s: float) -> tuple[int, bytes, str]:
        """Return the status, the body, and the name of the engine that answered; empty if the answer has no name."""
        session = await self._session()
        headers = {"Content-Type": "application/json", **headers_of(self.keys.get(url, ""))}
        limit = aiohttp.ClientTimeout(timeout_s)
        async with session.post(f"{url}/generate", data=body, headers=headers, timeout=limit) as answer:
            return answer.status, await answer.read(), unquote(answer.headers.get(ENGINE_HEADER, ""))

    async def _session(self) -> aiohttp.ClientSession:
        """Return the session of the running event loop; close a session that is older than :meth:`abandon`."""
        loop = asyncio.get_running_loop()
        while True:
            found = self._sessions.get(loop)
            if found is not None and found[0] == self._url_epoch:
                return found[1]
            connector = aiohttp.TCPConnector(limit=0)
            self._sessions[loop] = (self._url_epoch, aiohttp.ClientSession(connector=connector))
            if found is not None:
                await found[1].close()

    # From plain threads ----------------------------------------------------------------------

    def generate_all(
        self,
        requests: Sequence[Mapping[str, Any]],
        concurrency: int | None = None,
        timeout_s: float | None = None,
        return_errors: bool = False,
        *,
        check: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """Run :meth:`generate` from a plain thread and wait for its result. Several threads may call it at once.

        Args:
            requests: See :meth:`generate`, as for the next three.
            concurrency: Number of requests in flight at most.
            timeout_s: Seconds that all requests together may take.
            return_errors: Put errors of failed requests into the list.
            check: Called every two seconds while this waits. An exception of it cancels the requests and is raised.
        """
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
                self._thread.start()
            loop = self._loop
        future = asyncio.run_coroutine_threadsafe(self.generate(requests, concurrency, timeout_s, return_errors), loop)
        try:
            while not wait([future], SLICE_S).done:
                check()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the thread of :meth:`generate_all` and close its connections. Safe to call twice."""
        with self._starting:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is None or thread is None:
            return

        async def end() -> None:
            await self.aclose()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        try:
            asyncio.run_coroutine_threadsafe(end(), loop).result()
        except Exception as error:
            logger.info("closing the connections to the engines failed: %s: %s", type(error).__name__, error)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _with_seed(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request with its seed as ``sampling_seed``: the router drops ``seed``."""
    params = dict(request.get("sampling_params") or {})
    if params.get("seed") is not None:
        params.setdefault("sampling_seed", params["seed"])
    params.pop("seed", None)
    return {"return_logprob": True, **request, "sampling_params": params}


def _message(text: bytes) -> str:
    """Return the message in the body of an error, in one line."""
    message = text.decode(errors="replace")
    with contextlib.suppress(ValueError, TypeError, KeyError):  # not JSON in this format: use the whole body
        message = str(json.loads(message)["error"]["message"])
    return " ".join(message.split())[:500]


def _error(failures: Sequence[_Failure], total: int, finished: Mapping[int, Any]) -> GenerationError:
    lines = [str(failure) for failure in failures[:MAX_NAMED]]
    if len(failures) > MAX_NAMED:
        lines.append(f"… and {len(failures) - MAX_NAMED:,} more")
    message = f"{len(failures):,} of {counted(total, 'request')} failed"
    return GenerationError([Finding("E108", message, context=tuple(lines))], finished)

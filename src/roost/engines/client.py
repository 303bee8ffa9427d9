"""A client of engines, or of the router in front of them, for many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
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
"""How many requests an error names."""
RETRIED = (408, 425, 429)
"""Statuses that may be better next time, besides all from 500 up."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0
SLICE_S = 2.0
"""Seconds between two checks of :meth:`EngineClient.generate_all`."""


@dataclass(frozen=True)
class _Failure:
    """A request that was given up."""

    index: int
    rid: str
    engine: str
    attempts: int
    reason: str

    def __str__(self) -> str:
        name = f"request {self.index}" + (f" ({self.rid})" if self.rid else "")
        return f"{name}: {counted(self.attempts, 'attempt')}, the last at {self.engine}: {self.reason}"


class EngineClient:
    """Sends requests in SGLang's format, and sees to it that each is answered.

    What fails by no fault of its own (a connection, a server, an engine that died) is sent again. That
    cannot double anything: a request that has a seed gets the same samples wherever it is answered.

    Args:
        url: The router, or one or more engines that take turns.
        attempts: How often a request is sent at most.
        timeout_s: How long a call may take, all attempts included.
        concurrency: How many requests of one call are under way at once.
        key: The key of the router or the engines; a mapping gives the key of each URL.

    Attributes:
        urls: Where requests go: the router, or the engines that take turns.
        names: Names for URLs, for errors.
        keys: The keys of URLs.
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
        self._era = 0
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
        """Answers to requests, in their order; each is a list of :class:`EngineOutput`.

        Args:
            requests: Bodies of ``/generate``: ``input_ids``, ``sampling_params``, and perhaps ``rid``.
            concurrency: How many are under way at once.
            timeout_s: How long all of them may take.
            return_errors: Whether a request that failed has a ``RolloutError`` in the list, in place of
                its answer; else an error says which failed when all are done.

        Raises:
            GenerationError: Which requests failed, at which engine, and after how many attempts (E108); its
                ``finished`` has the answers to the others.
            RolloutError: Which requests have a seed that engines cannot hold (E101); none was sent.
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
        """Closes the connections of the running event loop."""
        found = self._sessions.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found[1].close()

    def abandon(self, reason: str) -> None:
        """Send nothing to anybody until :attr:`urls` is set again, and accept no answer to what was sent before.

        Requests in flight count as failed, and are sent again once there is an address. Their connections are closed,
        so that later requests do not travel over them either. Any thread may call this.

        Args:
            reason: What errors of requests say, such as that the router has ended.
        """
        self._reason = reason
        self.urls = []
        self._era += 1  # after urls: who reads the new number reads no old address
        for loop in list(self._sessions):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._session()))

    async def _ask(self, index: int, request: Mapping[str, Any], until_s: float) -> list[EngineOutput] | _Failure:
        body = json.dumps(_with_seed(request)).encode()
        engine, reason, attempt = "no engine", "the deadline passed, and it was not sent", 0
        wait_s = FIRST_WAIT_S
        while attempt < self.attempts and time.monotonic() < until_s:
            era = self._era
            urls = self.urls  # one list for this attempt: another thread replaces it when engines come and go
            url = urls[(index + attempt) % len(urls)] if urls else ""
            engine = self._named(url) if url else "no engine"
            attempt += 1
            try:
                if not url:
                    raise OSError(self._reason)
                status, text, name = await self._post(url, body, until_s - time.monotonic())
                engine = f"{name} ({url})" if name else engine
                if era != self._era:
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
            if attempt < self.attempts:
                left_s = until_s - time.monotonic()
                await asyncio.sleep(max(0.0, min(wait_s * random.uniform(0.5, 1.5), left_s)))  # noqa: S311
                wait_s = min(wait_s * 2, LONGEST_WAIT_S)
        return _Failure(index, str(request.get("rid") or ""), engine, attempt, reason)

    def _named(self, url: str) -> str:
        """What stands at a URL, for errors."""
        name = self.names.get(url)
        return f"{name} ({url})" if name else url

    async def _post(self, url: str, body: bytes, timeout_s: float) -> tuple[int, bytes, str]:
        """Status, body, and the name of the engine that answered where it is known."""
        session = await self._session()
        headers = {"Content-Type": "application/json", **headers_of(self.keys.get(url, ""))}
        limit = aiohttp.ClientTimeout(timeout_s)
        async with session.post(f"{url}/generate", data=body, headers=headers, timeout=limit) as answer:
            return answer.status, await answer.read(), unquote(answer.headers.get(ENGINE_HEADER, ""))

    async def _session(self) -> aiohttp.ClientSession:
        """Return the connections of the running event loop; close those from before :meth:`abandon`."""
        loop = asyncio.get_running_loop()
        while True:
            found = self._sessions.get(loop)
            if found is not None and found[0] == self._era:
                return found[1]
            connector = aiohttp.TCPConnector(limit=0)
            self._sessions[loop] = (self._era, aiohttp.ClientSession(connector=connector))
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
        """As :meth:`generate`, for code without an event loop; several threads may call it at once.

        Args:
            requests: See :meth:`generate`, as for the next three.
            concurrency: How many are under way at once.
            timeout_s: How long all of them may take.
            return_errors: Whether a request that failed has an error in the list.
            check: Called every two seconds while it waits. What it raises cancels the requests, and is raised.
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
        """Ends the thread of :meth:`generate_all`, and its connections. Safe to call twice."""
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

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _with_seed(request: Mapping[str, Any]) -> dict[str, Any]:
    """A seed goes under the name that the router passes on."""
    params = dict(request.get("sampling_params") or {})
    if params.get("seed") is not None:
        params.setdefault("sampling_seed", params["seed"])
    params.pop("seed", None)
    return {"return_logprob": True, **request, "sampling_params": params}


def _message(text: bytes) -> str:
    """What a server said of an error, in one line."""
    said = text.decode(errors="replace")
    with contextlib.suppress(ValueError, TypeError, KeyError):
        said = str(json.loads(said)["error"]["message"])
    return " ".join(said.split())[:500]


def _error(failures: Sequence[_Failure], total: int, finished: Mapping[int, Any]) -> GenerationError:
    lines = [str(failure) for failure in failures[:MAX_NAMED]]
    if len(failures) > MAX_NAMED:
        lines.append(f"… and {len(failures) - MAX_NAMED:,} more")
    message = f"{len(failures):,} of {counted(total, 'request')} failed"
    return GenerationError([Finding("E108", message, context=tuple(lines))], finished)

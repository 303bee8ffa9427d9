"""The HTTP server for engines that have none of their own, in the format of SGLang's servers.

It runs in a thread of the engine's process. Requests are not queued here: each goes to the engine at
once, and an engine that is paused or offloaded takes longer to answer. If a client disconnects, its request
is cancelled.

Every request must present the server's key, except ``GET /health``, which shows only a status without the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

import roost
from roost.cluster.ports import PortLease, lease_ports
from roost.engines.engine import ENGINE_HEADER, Engine, url_of
from roost.engines.keys import is_permitted, make_key
from roost.errors import Finding, Fix, RolloutError, RoostError, shown

__all__ = ["EngineServer"]

MAX_BODY_BYTES = 512 << 20
"""The router's limit."""

HEALTH_TIMEOUT_S = 20.0
"""Seconds that ``/health_generate`` waits for one token."""

_STATUS = {"E101": 400, "E102": 400, "E103": 409, "E105": 503, "E112": 503, "E120": 400}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """Serves an engine over HTTP, in a thread.

    Args:
        engine: The engine.
        host: Address to bind.
        port: A leased port; 0: lease one here.
        name: Name of the engine. Answers have it in a header, so that errors behind a router can name the engine.
        key: The key that every request must present; empty: make a new one, which is in :attr:`key`.
    """

    def __init__(
        self, engine: Engine, host: str = "127.0.0.1", port: int = 0, name: str = "engine", *, key: str = ""
    ) -> None:
        self.key = key or make_key()
        self._engine = engine
        self._host = host
        self._port = port
        self._name = name
        self._lease: PortLease | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._end: asyncio.Event | None = None

    @property
    def url(self) -> str:
        """The base URL."""
        return url_of(self._host, self._port)

    def start(self) -> str:
        """Bind the port, start serving and return the base URL.

        Raises:
            RolloutError: The port cannot be bound (E110).
        """
        if not self._port:
            self._lease = lease_ports()
            self._port = self._lease.port
        outcome: list[BaseException] = []
        is_up = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(is_up, outcome), name="engine-server", daemon=True)
        self._thread.start()
        is_up.wait()
        if outcome:
            self._thread.join()
            self._thread = None
            self._release_port()
            message = f"the engine's server cannot listen on {self._host}, port {self._port}: {outcome[0]}"
            fixes = (Fix("see who has the port", f"ss -tlnp 'sport = :{self._port}'"),)
            raise RolloutError([Finding("E110", message, fixes=fixes)]) from outcome[0]
        return self.url

    def stop(self) -> None:
        """Stop the server, its connections and its thread. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None and self._loop is not None and self._end is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._end.set)
            thread.join()
        self._release_port()

    def _release_port(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    # In the thread -------------------------------------------------------------------------

    def _serve(self, is_up: threading.Event, outcome: list[BaseException]) -> None:
        try:
            asyncio.run(self._run(is_up))
        except BaseException as error:
            if is_up.is_set():  # start() has returned: nobody reads the outcome
                _logger.exception("the server of %s ended", self._name)
            outcome.append(error)
        finally:
            is_up.set()

    async def _run(self, is_up: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, logger=_logger, shutdown_timeout=0.5,
            keepalive_timeout=120,
        )  # fmt: skip
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, reuse_address=True, backlog=4096).start()
            is_up.set()
            await self._end.wait()
        finally:
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(
            client_max_size=MAX_BODY_BYTES,
            middlewares=[web.middleware(_errors_as_json), _check_of(self._is_permitted)],
        )
        app.on_response_prepare.append(self._add_engine_name)
        for path in ("/get_model_info", "/model_info"):
            app.router.add_get(path, self._model_info)
        for path in ("/get_server_info", "/server_info"):
            app.router.add_get(path, self._server_info)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health_generate", self._health_generate)
        for path, handler in {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/flush_cache": self._flush,
            "/abort_request": self._abort,
        }.items():
            app.router.add_post(path, handler)
        return app

    def _is_permitted(self, http: web.Request) -> bool:
        return is_permitted(http.headers.get("Authorization"), self.key)

    async def _add_engine_name(self, http: web.Request, answer: web.StreamResponse) -> None:
        """Add the engine's name to answers: behind a router a client does not know which engine answered."""
        if http.path == "/generate" and self._is_permitted(http):
            answer.headers[ENGINE_HEADER] = quote(self._name)

    # Generating ----------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.Response:
        body = await _body(http)
        prompts, is_single = _prompts(body)
        rid = body.get("rid") or uuid.uuid4().hex
        rids = [str(one) for one in rid] if isinstance(rid, list) else [str(rid)]
        params = body.get("sampling_params")
        if params is not None and not isinstance(params, Mapping):
            raise _bad_request(f"sampling_params must be an object, not {shown(params)}")
        # Not asyncio.to_thread: a waiting request should not occupy a thread.
        future = self._engine.submit(prompts, dict(params or {}), rids[0])
        outputs = await asyncio.wrap_future(future)
        each = max(1, len(outputs) // len(prompts))
        answers = []
        for index, output in enumerate(outputs):
            name = rids[index // each] if len(rids) == len(prompts) else rids[0]
            answers.append(output.to_wire(name, self._engine.version, bool(body.get("return_logprob"))))
        return web.json_response(answers[0] if is_single and len(answers) == 1 else answers)

    async def _pause(self, http: web.Request) -> web.Response:
        mode = str((await _body(http)).get("mode", "wait"))
        await asyncio.to_thread(self._engine.pause, mode)
        return web.json_response({"status": "ok", "message": "paused"})

    async def _continue(self, http: web.Request) -> web.Response:
        await asyncio.to_thread(self._engine.resume)
        return web.json_response({"status": "ok", "message": "continued"})

    async def _abort(self, http: web.Request) -> web.Response:
        body = await _body(http)
        rid = body.get("rid")
        if not rid and not body.get("abort_all"):
            raise _bad_request('abort_request needs a "rid", or "abort_all": true')
        await asyncio.to_thread(self._engine.abort, "" if body.get("abort_all") else str(rid))
        return web.Response()

    # Weights and memory --------------------------------------------------------------------

    async def _update(self, http: web.Request) -> web.Response:
        body = await _body(http)
        try:
            message = await asyncio.to_thread(self._load, body.get("model_path"), body.get("weight_version"))
        except RoostError as error:
            answer = {"success": False, "message": str(error), "num_paused_requests": 0}
            return web.json_response(answer, status=_status_of(error))
        return web.json_response({"success": True, "message": message, "num_paused_requests": 0})

    def _load(self, path: object, version: object) -> str:
        if not isinstance(path, str) or not path:
            raise _bad_request(f"model_path must be the path of a folder, not {shown(path)}")
        number = self._engine.version + 1 if version is None else version
        if isinstance(number, str) and number.isdigit():
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool):
            raise _bad_request(f"weight_version must be a whole number, not {shown(version)}")
        self._engine.load_weights(self._engine.read_weights(path), number)
        return f"version {number} from {path}"

    async def _release(self, http: web.Request) -> web.Response:
        await asyncio.to_thread(self._engine.offload)
        return web.json_response({})

    async def _resume(self, http: web.Request) -> web.Response:
        await asyncio.to_thread(self._engine.onload)
        return web.json_response({})

    async def _flush(self, http: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.")

    # Health and information ----------------------------------------------------------------

    async def _health(self, http: web.Request) -> web.Response:
        missing = await asyncio.to_thread(self._engine.health)
        if missing and not self._is_permitted(http):
            missing = "not healthy"
        return web.Response(status=503 if missing else 200, text=missing or "ok")

    async def _health_generate(self, http: web.Request) -> web.Response:
        missing = await asyncio.to_thread(self._engine.health)
        if missing:
            return web.Response(status=503, text=missing)
        future = asyncio.wrap_future(self._engine.submit([[0]], {"max_new_tokens": 1, "temperature": 0}))
        try:
            await asyncio.wait_for(future, HEALTH_TIMEOUT_S)
        except asyncio.TimeoutError:
            return web.Response(status=503, text=f"no token within {HEALTH_TIMEOUT_S:g} s")
        return web.Response(text="ok")

    async def _model_info(self, http: web.Request) -> web.Response:
        # No model_path: the router would look for a tokenizer of that name on the internet.
        return web.json_response({"is_generation": True, "weight_version": str(self._engine.version)})

    async def _server_info(self, http: web.Request) -> web.Response:
        engine = self._engine
        return web.json_response(
            {
                "served_model_name": "roost",
                "engine": type(engine).__name__,
                "version": f"roost {roost.__version__}",
                "weight_version": str(engine.version),
                "tp_size": engine.tensor_parallel,
                "dp_size": 1,
                **engine.info(),
            }
        )


def _bad_request(message: str) -> RolloutError:
    return RolloutError([Finding("E101", message)])


def _status_of(error: RoostError) -> int:
    return max((_STATUS.get(code, 500) for code in error.codes), default=500)


async def _body(http: web.Request) -> dict[str, Any]:
    """Return the JSON object in the body of a request; an empty one if there is no body."""
    raw = await http.read()
    try:
        body = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        raise _bad_request(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise _bad_request(f"the body must be a JSON object, not {shown(body)}")
    return body


def _prompts(body: Mapping[str, Any]) -> tuple[list[list[int]], bool]:
    """Return the prompts of a request, and whether ``input_ids`` is a single prompt and not a list of prompts."""
    ids: Any = body.get("input_ids")
    problems = []
    if ids is None:
        text = " (the engine has no tokenizer: `text` is not understood)" if body.get("text") is not None else ""
        problems.append(Finding("E101", f"the request has no input_ids{text}"))
    elif not isinstance(ids, list) or len({isinstance(item, list) for item in ids}) > 1:
        problems.append(Finding("E101", f"input_ids must be a list of token ids, or of such lists, not {shown(ids)}"))
    if body.get("stream"):
        problems.append(Finding("E101", "the engine does not stream: leave `stream` out"))
    if problems:
        raise RolloutError(problems)
    is_single = not (ids and isinstance(ids[0], list))
    return ([ids] if is_single else ids), is_single


def _check_of(is_permitted: Callable[[web.Request], bool]) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reject requests without the key before their body is read, also for unknown routes."""
        if (request.method, request.path) != ("GET", "/health") and not is_permitted(request):
            raise web.HTTPUnauthorized
        return await handler(request)

    return check


async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return every error in the format of SGLang's servers. Tracebacks go to the log only."""
    try:
        return await handler(request)
    except web.HTTPUnauthorized:
        return _answer(401, "the request does not present the key of this server")
    except web.HTTPException as error:
        return _answer(error.status, f"{request.method} {request.path}: {error.reason}")
    except RoostError as error:
        return _answer(_status_of(error), str(error))
    except asyncio.CancelledError:
        raise
    except Exception as error:
        _logger.exception("%s %s", request.method, request.path)
        return _answer(500, f"{type(error).__name__}: {error}")


def _answer(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


class _IgnoreHttp2Probes(logging.Filter):
    """Drops the tracebacks that aiohttp logs when the router tries HTTP/2 first."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_logger = logging.getLogger("roost.engines.engine.server")
_logger.addFilter(_IgnoreHttp2Probes())

"""A server written to SGLang's documentation: its flags, routes, bodies and refusals, around a small real model.

It is no part of SGLang and has none of its code. ``sglang_model.write_package`` makes a package of that name,
so that ``python -m sglang.launch_server`` starts this.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from aiohttp import web
from sglang_ranks import Rank

ENOUGH, TOO_MUCH = 0.2, 0.95
"""What it needs of a GPU, and what is more than there is."""
DEFAULT_SEED, LARGEST_SEED = 42, 2**63 - 1
FREE_GIB = float(os.environ.get("TEST_FREE_GIB", "100"))
"""What is free of its GPU when it starts."""
STEP_S = float(os.environ.get("TEST_STEP_S", "0"))
BRAKE, BRAKED_S = os.environ.get("TEST_BRAKE", ""), 0.25
"""A file, and the seconds of a step while it is there."""
WITHOUT = os.environ.get("TEST_WITHOUT", "")
"""A route that it does not have."""
IS_OPEN = bool(os.environ.get("TEST_OPEN"))
"""Whether it obeys everybody, as SGLang does in some modes."""
KNOWN = {
    "max_new_tokens", "temperature", "n", "sampling_seed", "stop_token_ids", "top_p", "top_k", "min_p", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "min_new_tokens", "stop", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag",
    "stream_interval", "logit_bias", "custom_params",
}  # fmt: skip


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("launch_server", allow_abbrev=False)
    for name in (
        "--api-key",
        "--model-path",
        "--host",
        "--device",
        "--dist-init-addr",
        "--weight-version",
        "--load-format",
    ):
        parser.add_argument(name)
    for name in ("--port", "--tp-size", "--base-gpu-id", "--nnodes", "--node-rank", "--nccl-port", "--random-seed",
                 "--context-length"):  # fmt: skip
        parser.add_argument(name, type=int)
    parser.add_argument("--mem-fraction-static", type=float)
    for name in ("--skip-tokenizer-init", "--enable-memory-saver", "--enable-weights-cpu-backup",
                 "--enable-deterministic-inference"):  # fmt: skip
        parser.add_argument(name, action="store_true")
    parser.set_defaults(
        host="127.0.0.1", port=30000, tp_size=1, base_gpu_id=0, nnodes=1, node_rank=0, weight_version="default",
        context_length=256, load_format="auto", device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    return parser


class Server:
    """The HTTP API."""

    def __init__(self, asked: argparse.Namespace, rank: Rank, version: str, pids: list[int]) -> None:
        self.asked, self.rank, self.version, self.pids = asked, rank, version, pids
        self.thread = ThreadPoolExecutor(1)
        self.is_paused = False
        self.offloaded: set[str] = set()
        self.running: dict[str, bool] = {}
        """Requests that are computed, and whether they were aborted."""
        self.writers = 0
        self.changed = asyncio.Condition()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30, middlewares=[self.check_key])
        routes = {
            "/generate": self.generate, "/pause_generation": self.pause, "/continue_generation": self.proceed,
            "/abort_request": self.abort, "/flush_cache": self.flush, "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.restore,
        }  # fmt: skip
        for name in ("init_weights_update_group", "destroy_weights_update_group"):
            routes[f"/{name}"] = self.told(name)
        for name in ("from_disk", "from_tensor", "from_distributed"):
            routes[f"/update_weights_{name}"] = self.updated(f"update_weights_{name}")
        routes.pop(WITHOUT, None)
        for path, handler in routes.items():
            app.router.add_post(path, handler)
        asked = {"/health": self.health, "/health_generate": self.health, "/model_info": self.model_info,
                 "/get_model_info": self.model_info, "/server_info": self.server_info,
                 "/get_server_info": self.server_info}  # fmt: skip
        for path, handler in asked.items():
            app.router.add_get(path, handler)
        app.router.add_get("/openapi.json", lambda _: _json({"paths": {path: {} for path in (*routes, *asked)}}))
        return app

    @web.middleware
    async def check_key(self, http: web.Request, handler: Any) -> Any:
        """As SGLang does: health and metrics are open."""
        is_open = IS_OPEN or http.path.startswith(("/health", "/ready", "/metrics"))
        if is_open or http.headers.get("Authorization") == f"Bearer {self.asked.api_key}":
            return await handler(http)
        return _json({"error": "Unauthorized"}, 401)

    async def on_ranks(self, command: str, **arguments: Any) -> tuple[bool, str]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self.rank.tell_all, command, arguments)

    # Requests

    async def generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        params = dict(body.get("sampling_params") or {})
        ids = body.get("input_ids")
        if body.get("text") is not None or not ids:
            return _bad("Either text, input_ids or input_embeds should be provided; there is no tokenizer.")
        if unknown := set(params) - KNOWN:
            return _bad(f"Unexpected keyword argument {sorted(unknown)[0]!r}")
        prompts = ids if isinstance(ids[0], list) else [ids]
        rid = str(body.get("rid") or os.urandom(8).hex())
        async with self.changed:
            await self.changed.wait_for(lambda: not self.is_paused and not self.writers)
            self.running[rid] = False
        try:
            found = [
                await self.sample(rid, prompt, params, bool(body.get("return_logprob")))
                for prompt in prompts
                for _ in range(int(params.get("n") or 1))
            ]
        finally:
            async with self.changed:
                del self.running[rid]
                self.changed.notify_all()
        return _json(found if isinstance(ids[0], list) or len(found) > 1 else found[0])

    async def sample(self, rid: str, prompt: list[int], params: dict[str, Any], logprob: bool) -> Any:
        tokens, rows = list(prompt), []
        # All samples of a request have its seed, and all requests without one have the same.
        seed = DEFAULT_SEED if params.get("sampling_seed") is None else params["sampling_seed"]
        if seed > LARGEST_SEED:
            _die("RuntimeError: Overflow when unpacking long long")
        limit = min(int(params.get("max_new_tokens") or 128), self.asked.context_length - len(prompt))
        heat = float(params.get("temperature", 1.0))
        finish: dict[str, Any] = {"type": "length", "length": limit}
        while len(rows) < limit:
            if self.running[rid]:
                finish = {"type": "abort", "message": "Abort in waiting queue" if not rows else "Aborted"}
                break
            if self.offloaded:
                _die("RuntimeError: CUDA error: an illegal memory access was encountered")
            scores = self.rank.model(torch.tensor(tokens[-1:], device=self.rank.device))[-1].double()
            odds = torch.log_softmax(scores / (heat or 1.0), -1)
            token = int(scores.argmax())
            if heat:
                maker = None
                if self.asked.enable_deterministic_inference:  # seeds are ignored without it
                    maker = torch.Generator().manual_seed(hash((seed, len(tokens))))
                token = int(torch.multinomial(odds.exp().cpu(), 1, generator=maker))
            rows.append([float(odds[token]), token, None])
            tokens.append(token)
            if token in (params.get("stop_token_ids") or ()):
                finish = {"type": "stop", "matched": token}
                break
            await asyncio.sleep(BRAKED_S if BRAKE and os.path.exists(BRAKE) else STEP_S)
        meta = {"id": rid, "finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": len(rows),
                "cached_tokens": 0, "weight_version": self.asked.weight_version}  # fmt: skip
        if logprob:
            meta["output_token_logprobs"] = rows
        return {"output_ids": tokens[len(prompt) :], "meta_info": meta}

    async def abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        for rid in self.running:
            if body.get("abort_all") or rid == body.get("rid"):
                self.running[rid] = True
        return web.Response()

    async def pause(self, http: web.Request) -> web.Response:
        mode = (await http.json()).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _bad(f"Invalid mode: {mode!r}. Expected one of ['abort', 'retract', 'in_place'].")
        if mode != "abort":
            return _bad(f"this server has no {mode}")
        async with self.changed:
            self.is_paused = True
            for rid in self.running:
                self.running[rid] = True
            await self.changed.wait_for(lambda: not self.running)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def proceed(self, http: web.Request) -> web.Response:
        await http.json()
        async with self.changed:
            self.is_paused = False
            self.changed.notify_all()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, http: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n", status=400 if self.running else 200)

    # Weights and memory

    def told(self, command: str) -> Any:
        async def handle(http: web.Request) -> web.Response:
            success, message = await self.on_ranks(command, **await http.json())
            return _json({"success": success, "message": message}, 200 if success else 400)

        return handle

    def updated(self, command: str) -> Any:
        wanted = {
            "update_weights_from_disk": {"model_path": None, "load_format": self.asked.load_format},
            "update_weights_from_tensor": {"serialized_named_tensors": None, "load_format": None},
            "update_weights_from_distributed": {"names": None, "dtypes": None, "shapes": None, "group_name": None},
        }[command]

        async def handle(http: web.Request) -> web.Response:
            body = await http.json()
            flush, version = body.pop("flush_cache", True), body.pop("weight_version", None)
            if set(body) - set(wanted):
                return _bad(f"{command} has no {sorted(set(body) - set(wanted))}")
            async with contextlib.nullcontext() if self.is_paused else self.alone():
                if "weights" in self.offloaded:
                    _die("RuntimeError: CUDA error: an illegal memory access was encountered")
                success, message = await self.on_ranks(command, **{**wanted, **body})
                if success and flush and (self.running or "kv_cache" in self.offloaded):
                    _die("AssertionError: Cache flush failed after updating weights")
            if success and version is not None:
                self.asked.weight_version = version
                message += f" Weight version updated to {version}."
            answer = {"success": success, "message": message}
            if command.endswith("disk"):
                answer["num_paused_requests"] = 0
            return _json(answer, 200 if success else 400)

        return handle

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """What runs is finished first, and what comes waits."""
        async with self.changed:
            self.writers += 1
            await self.changed.wait_for(lambda: not self.running)
        try:
            yield
        finally:
            async with self.changed:
                self.writers -= 1
                self.changed.notify_all()

    async def release(self, http: web.Request) -> web.Response:
        tags = (await http.json()).get("tags") or ["kv_cache", "weights"]
        if self.running:
            _die("AssertionError: release_memory_occupation should be called only when no ongoing request.")
        if self.asked.enable_memory_saver:
            await self.on_ranks("release", tags=[tag for tag in tags if tag not in self.offloaded])
            self.offloaded |= set(tags)
        return _json(None)

    async def restore(self, http: web.Request) -> web.Response:
        tags = (await http.json()).get("tags") or ["kv_cache", "weights"]
        if not self.asked.enable_memory_saver:
            return _json(None)
        if set(tags) - self.offloaded:
            _die(f"KeyError: {(set(tags) - self.offloaded).pop()!r}")
        await self.on_ranks("restore", tags=tags)
        self.offloaded -= set(tags)
        return _json(None)

    # What it is

    async def health(self, http: web.Request) -> web.Response:
        generates = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true") != "false"
        if (generates or http.path == "/health_generate") and self.is_paused:
            await asyncio.sleep(20)
            return web.Response(status=503)
        return web.Response()

    async def model_info(self, http: web.Request) -> web.Response:
        return _json({"model_path": self.asked.model_path, "tokenizer_path": self.asked.model_path,
                      "is_generation": True, "weight_version": self.asked.weight_version})  # fmt: skip

    async def server_info(self, http: web.Request) -> web.Response:
        more = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid(), "running": len(self.running),
                "pids_of_ranks": self.pids, "temporary": tempfile.gettempdir(),
                "static_gib": FREE_GIB * (self.asked.mem_fraction_static or 0.88),
                "is_paused": self.is_paused, "offloaded": sorted(self.offloaded)}  # fmt: skip
        return _json({**vars(self.asked), "internal_states": [more], "version": self.version})


def _json(answer: Any, status: int = 200) -> Any:
    return web.json_response(answer, status=status)


def _bad(message: str) -> web.Response:
    _log(f"[http_server] Error: Traceback (most recent call last):\nValueError: {message}")
    return _json({"error": {"message": message}}, 400)


def _log(words: str) -> None:
    sys.stderr.write(f"[2026-01-01 00:00:00] {words}\n")
    sys.stderr.flush()


def _die(words: str) -> None:
    _log(f"Scheduler hit an exception: Traceback (most recent call last):\n{words}")
    os._exit(1)


def _watch(children: list[Any]) -> None:
    """Ends everything when a rank has ended."""
    while True:
        for number, child in enumerate(children, 1):
            if not child.is_alive():
                name = f"Subprocess scheduler_{number} (pid={child.pid})"
                _log(f"{name} crashed with exit code {child.exitcode}. Triggering SIGQUIT for cleanup...")
                _log("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)


def _rank_main(asked: argparse.Namespace, rank: int) -> None:
    Rank(asked, rank).run()


def main() -> None:
    """Starts the ranks of this node, and serves where it is the first."""
    asked = flags().parse_args()
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s")
    logging.info(f"server_args={asked}")  # as SGLang does, key included
    torch.set_num_threads(1)
    fraction = asked.mem_fraction_static
    if fraction is not None and fraction < ENOUGH:
        _die("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
    if fraction is not None and fraction > TOO_MUCH:
        _die("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.11 GiB in total.")
    each = asked.tp_size // asked.nnodes
    first = asked.node_rank * each
    start = multiprocessing.get_context("spawn").Process
    children: list[Any] = []
    for rank in range(first + 1, first + each):
        children.append(start(target=_rank_main, args=(asked, rank), daemon=True))
        children[-1].start()
    if first:
        _rank_main(asked, first)
    import sglang

    threading.Thread(target=_watch, args=(children,), daemon=True).start()
    server = Server(asked, Rank(asked, 0), sglang.__version__, [child.pid for child in children])
    web.run_app(server.app(), host=asked.host, port=asked.port, reuse_address=True, print=None, shutdown_timeout=0)

"""What the router costs: a request straight to an engine, and the same through the router."""

from __future__ import annotations

import http.client
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from benchmarks.launching import Row
from roost import Engine, EngineOutput, Router
from roost.engines.keys import VARIABLE, headers_of, make_key

WARM_UP = 100
REQUESTS = 1500
LIMIT_S = 0.002
BODY = b'{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}, "return_logprob": true}'


class Echo(Engine):
    """Answers at once: what is measured is the way."""

    def generate(self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]) -> list[EngineOutput]:
        return [EngineOutput([1] * 8, [0.0] * 8, [self.version] * 8, "length", len(prompt)) for prompt in prompts]

    def describe_weights(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {}

    def load_weights(self, named: Mapping[str, Any], version: int) -> None:
        self.version = version


def _ask(connection: http.client.HTTPConnection, headers: Mapping[str, str]) -> float:
    start = time.perf_counter()
    connection.request("POST", "/generate", BODY, headers)
    answer = connection.getresponse()
    answer.read()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}")
    return time.perf_counter() - start


def _row(name: str, routed_s: float, direct_s: float) -> Row:
    return Row(name, routed_s, direct_s, f"≤ + {LIMIT_S * 1000:g} ms", routed_s <= direct_s + LIMIT_S)


def measure_router() -> list[Row]:
    """Median and 99th percentile of one request after another, in turn directly and through the router."""
    command = [sys.executable, "-m", "roost.engines.serve", "benchmarks.routing:Echo"]
    key = make_key()
    env = {**os.environ, VARIABLE: key}
    headers = {"Content-Type": "application/json", **headers_of(key)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as server, Router(key=key) as router:
        try:
            lines = iter(server.stderr or ())
            url = next(line.split()[1] for line in lines if line.startswith("ready "))
            router.add(url, key)
            ways = [http.client.HTTPConnection(urlsplit(way).netloc) for way in (router.url, url)]
            found: list[list[float]] = [[], []]
            for number in range(WARM_UP + REQUESTS):
                for way, times in zip(ways, found, strict=True):
                    took_s = _ask(way, headers)
                    if number >= WARM_UP:
                        times.append(took_s)
            for way in ways:
                way.close()
        finally:
            server.terminate()
    routed, direct = (statistics.quantiles(times, n=100) for times in found)
    return [
        _row("a request through the router, p50", routed[49], direct[49]),
        _row("a request through the router, p99", routed[98], direct[98]),
    ]

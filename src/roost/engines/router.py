"""The router in front of the engines: sglang-router as a child process.

Observed behaviour of version 0.3.2:

* It opens two ports, its own and one for Prometheus. With the default Prometheus port, a second router on the same node
  does not start; here both ports are leased. The router binds beside the sockets that hold the leases. Once it listens,
  these sockets keep other processes from binding the port, also after the router has ended.
* With an API key it answers 401 to requests without it, for all routes that generate, or list or change its
  workers. Open to everybody remain ``/liveness``, ``/readiness``, ``/health``, ``/health_generate``, ``/v1/models``,
  ``/get_server_info`` (counts), ``/engine_metrics`` (the workers' ``/metrics``), ``/get_model_info`` (passed on with
  the caller's header, so workers refuse it) and the port for Prometheus, which names its workers.
* It presents a worker's own key to that worker, and the header of its client to workers that have none.
* Workers are added and removed in the background (202); those that cannot be reached fail after
  ``worker_startup_s``. A removed worker finishes the requests that it has.
* If an engine dies during a request, the request is sent to other engines, up to ``retries`` times in all; if the last
  attempt fails too, the answer is a 500. The dead engine is still tried until three health checks have failed. It is
  used again two good health checks after its URL answers again.
* If no engine can take a request, the answer is a 503 after the retries.
* It parses requests and serialises them anew: unknown fields are lost, among them ``seed`` in the sampling parameters;
  ``sampling_seed`` (64 bits, not negative) is kept. Temperatures are rounded to 32 bits. Answers are passed on
  unchanged.
* If a client disconnects, so does the router, and the engine drops the request.
* On SIGTERM it finishes the requests that it has, within its grace period.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from roost.cluster.ports import PortLease, is_own_server, lease_ports
from roost.engines import router_process
from roost.engines.engine import url_of
from roost.engines.http_calls import send
from roost.engines.keys import VARIABLE, make_key
from roost.engines.server_process import LOG_LINES, ServerProcess
from roost.errors import Finding, Fix, RolloutError, did_you_mean

__all__ = ["RoutedWorker", "Router", "add_limit_s"]

logger = logging.getLogger(__name__)

POLICIES = ("cache_aware", "manual", "power_of_two", "random", "round_robin")
PERIOD_S = 0.05
CALL_S = 10.0
"""Seconds to wait for the router's answer to a command."""
NOTICE_S = 2.0
"""Seconds within which this process notices the end of the router's process."""
STARTUP_S = 60
"""Seconds that the router waits by default for an engine that does not answer yet."""
SLACK_S = 10.0
"""Seconds that the router may take beyond that to report that it gave up."""
NO_KEY = "none"
"""Key that the router presents to engines without a key. Without it the router would show them its client's key."""


@dataclass(frozen=True)
class RoutedWorker:
    """An engine as the router sees it.

    Attributes:
        id: Id that the router gave it.
        url: Base URL.
        is_healthy: Whether its last health checks succeeded.
        load: Number of its requests in flight.
    """

    id: str
    url: str
    is_healthy: bool
    load: int


def add_limit_s(settings: Mapping[str, Any]) -> float:
    """Return the default timeout of :meth:`Router.add` in seconds, for a router with these settings."""
    return float(settings.get("worker_startup_s", STARTUP_S)) + SLACK_S


class Router:
    """Balances requests over engines.

    Args:
        host: Address to bind, at which clients reach the router.
        policy: Load-balancing policy.
        request_timeout_s: Seconds that a request may take.
        worker_startup_s: Seconds that :meth:`add` waits for an engine that does not answer yet.
        health_period_s: Seconds between two health checks.
        retries: Number of attempts for a request in all.
        log_level: ``debug``, ``info``, ``warn`` or ``error``.
        options: More options of sglang-router, such as ``["--cache-threshold", "0.5"]``.
        key: The key that requests must present; empty: make a new key for each :meth:`start`.

    Attributes:
        key: The key that requests must present.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        policy: str = "round_robin",
        *,
        request_timeout_s: int = 1800,
        worker_startup_s: int = STARTUP_S,
        health_period_s: int = 2,
        retries: int = 5,
        log_level: str = "warn",
        options: Sequence[str] = (),
        key: str = "",
    ) -> None:
        if policy not in POLICIES:
            near = did_you_mean(policy, POLICIES)
            fixes = (Fix("did you mean", f"policy={near!r}"),) if near else ()
            rule = f"policies: {', '.join(POLICIES)}"
            raise RolloutError([Finding("E106", f"the router has no policy {policy!r}", rule=rule, fixes=fixes)])
        self.key = key or make_key()
        self._keeps_key = bool(key)
        self._was_started = False
        self._host = host
        self._startup_s = worker_startup_s
        self._options = [
            "--policy", policy,
            "--request-timeout-secs", str(request_timeout_s),
            "--worker-startup-timeout-secs", str(worker_startup_s),
            "--worker-startup-check-interval", "1",
            "--health-check-interval-secs", str(health_period_s),
            "--retry-max-retries", str(retries),
            "--retry-max-backoff-ms", "2000",
            # Health checks detect dead engines. A circuit breaker would reject an engine for a minute after its return.
            "--disable-circuit-breaker",
            "--max-concurrent-requests", "-1",
            "--shutdown-grace-period-secs", "1",
            "--log-level", log_level,
            *options,
        ]  # fmt: skip
        self._lease: PortLease | None = None
        self._child: ServerProcess | None = None
        self._changing = threading.Lock()

    @property
    def url(self) -> str:
        """The base URL; empty before :meth:`start` and after :meth:`stop`."""
        return url_of(self._host, self._lease.port) if self._lease is not None else ""

    def start(self, timeout_s: float = 60.0) -> str:
        """Start the router, wait until it answers, and return its base URL.

        A router that has ended is started again on the same ports. A router that runs is left as it is.

        Raises:
            RolloutError: The router ended, or did not answer in time; with its last log lines (E106).
        """
        if self.is_alive():
            return self.url
        if self._child is not None:
            self._child.stop()
        if self._was_started and not self._keeps_key:
            self.key = make_key()  # another process may have bound the port meanwhile and seen the old key
        self._was_started = True
        if self._lease is None:
            self._lease = lease_ports(2)
        self._lease.admit_server()
        command = [
            sys.executable, str(router_process.__file__),
            "--host", self._host, "--port", str(self._lease.port),
            # This port needs no key and cannot be switched off, so only processes of this node may reach it.
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(self._lease.port + 1),
            *self._options,
        ]  # fmt: skip
        self._child = ServerProcess(command, env={VARIABLE: self.key}, name="the router", log_name="router")
        self._child.start()
        try:
            self._wait(self._is_answering, timeout_s, "E106", "the router did not answer")
        except BaseException:
            self.stop()
            raise
        self._lease.exclude_others()
        return self.url

    def stop(self) -> None:
        """Stop the router and release its ports. Safe to call twice."""
        if self._child is not None:
            self._child.stop()
            self._child = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def is_alive(self) -> bool:
        """Return whether the router's process runs."""
        return self._child is not None and self._child.is_alive()

    def check(self) -> None:
        """Raise E106 with the router's last log lines if its process has ended."""
        if self._child is not None and not self._child.is_alive():
            raise self._ended(Fix("start it again, with all engines that are alive", "rollout.recover()"))

    def _ended(self, *fixes: Fix) -> RolloutError:
        code = self._child.exit_code if self._child is not None else None
        message = f"the router at {self.url} does not answer: its process has ended with exit code {code}"
        return self._error("E106", message, *fixes)

    def logs(self) -> str:
        """Return the last lines of the router's log."""
        return self._child.logs() if self._child is not None else ""

    # Workers -------------------------------------------------------------------------------

    def workers(self) -> list[RoutedWorker]:
        """Return the engines behind the router, sorted by URL."""
        found = self._ask("GET", "/workers").get("workers", [])
        rows = [RoutedWorker(row["id"], row["url"], bool(row["is_healthy"]), int(row["load"])) for row in found]
        return sorted(rows, key=lambda worker: worker.url)

    def add(self, url: str, key: str = "", timeout_s: float | None = None) -> RoutedWorker:
        """Add an engine, and return when the router sends it requests. Do nothing for an engine that was added before.

        Args:
            url: The engine's base URL.
            key: The engine's key, which the router presents with each request; empty: the engine needs none.
            timeout_s: Seconds to wait until the router has found the engine healthy; ``None``: until the router
                gives up.

        Raises:
            RolloutError: The engine does not answer in time; with the router's message (E107).
        """
        url = url.rstrip("/")
        with self._changing:
            known = self._find(url)
            body = {"url": url, "api_key": key or NO_KEY}
            worker_id = known.id if known else str(self._ask("POST", "/workers", body).get("worker_id", ""))

        def is_in() -> bool:
            found = self._find(url)
            if found is not None:
                return found.is_healthy
            status = self._ask("GET", f"/workers/{worker_id}", missing_ok=True).get("job_status") or {}
            if status.get("status") == "failed":
                raise self._error("E107", f"the router cannot reach the engine at {url}: {status.get('message')}")
            return False

        limit_s = self._startup_s + SLACK_S if timeout_s is None else timeout_s
        self._wait(is_in, limit_s, "E107", f"the router did not take the engine at {url}")
        found = self._find(url)
        return found or RoutedWorker(worker_id, url, True, 0)

    def remove(self, url: str, timeout_s: float = 30.0) -> None:
        """Remove an engine, and return when it gets no more requests. The engine finishes the requests that it has.

        Do nothing if the router does not know the engine.
        """
        url = url.rstrip("/")
        with self._changing:
            known = self._find(url)
            if known is None:
                return
            self._ask("DELETE", f"/workers/{known.id}", missing_ok=True)
        self._wait(
            lambda: self._find(url) is None, timeout_s, "E107", f"the router did not let go of the engine at {url}"
        )

    def _find(self, url: str) -> RoutedWorker | None:
        return next((worker for worker in self.workers() if worker.url == url), None)

    # Requests to the router ----------------------------------------------------------------

    def _is_answering(self) -> bool:
        if self._lease is None or not is_own_server(self._lease.port):  # do not show the key to another process
            return False
        try:
            self._ask("GET", "/liveness")
        except RolloutError as error:
            logger.debug("not yet: %s", error.findings[0].message)
            return False
        return True

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, missing_ok: bool = False
    ) -> dict[str, Any]:
        if not self.url:
            raise RolloutError([Finding("E106", "the router is not running")])
        self.check()
        try:
            reply = send(self.url + path, method, body, CALL_S, key=self.key)
        except OSError as error:
            deadline = time.monotonic() + NOTICE_S
            while self.is_alive() and time.monotonic() < deadline:
                time.sleep(PERIOD_S)
            self.check()
            raise self._error("E106", f"the router at {self.url} does not answer: {error}") from error
        if reply.status == 404 and missing_ok:
            return {}
        if reply.is_error:
            raise self._error("E107", f"the router answered {method} {path} with {reply.status}: {reply.text[:1000]}")
        with contextlib.suppress(ValueError):  # some answers are plain text, such as that of /liveness
            found = json.loads(reply.body)
            return found if isinstance(found, dict) else {}
        return {}

    def _wait(self, is_done: Callable[[], bool], timeout_s: float, code: str, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_done():
            if not self.is_alive():
                raise self._ended()
            if time.monotonic() > deadline:
                raise self._error(code, f"{what} within {timeout_s:g} s")
            time.sleep(PERIOD_S)

    def _error(self, code: str, message: str, *fixes: Fix) -> RolloutError:
        lines = tuple(self.logs().splitlines()[-LOG_LINES:])
        fixes += (self._child.log_fix,) if self._child is not None else ()
        return RolloutError([Finding(code, message, context=lines, fixes=fixes)])

    def __enter__(self) -> Router:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

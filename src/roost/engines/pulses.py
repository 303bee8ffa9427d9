"""Pulses: for how long the engines of a rollout have not answered, measured without blocking.

Each engine is probed in two ways: through the control lane of each of its processes, and by ``/health`` of its server.
Each probe has at most one request in flight, so an engine that hangs occupies one thread at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from roost.engines.handles import EngineHandle, ExternalEngine
from roost.engines.http_calls import send

__all__ = ["Pulses"]

HEALTH_S = 5.0
"""Seconds between two requests to ``/health`` of an engine."""
STEP_S = 2.0
"""Maximum growth of an engine's silence between two calls of :meth:`Pulses.look`. If the driver itself was stopped or
starved of CPU for longer, the excess does not count against the engines."""


logger = logging.getLogger(__name__)


class Pulses:
    """Measures for how long engines have not answered.

    Args:
        limit_s: Seconds without an answer after which an engine counts as hung. "Not healthy" is an answer too.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._probes: dict[tuple[str, int], list[_LaneProbe | _HealthProbe]] = {}
        self._looked_s = time.monotonic()

    def look(self, engines: Sequence[EngineHandle | ExternalEngine]) -> None:
        """Collect the answers of engines, and send new probes to those that have answered; return at once."""
        now_s = time.monotonic()
        step_s, self._looked_s = min(STEP_S, now_s - self._looked_s), now_s
        # Replace the dictionary in one step: other threads read the old one meanwhile.
        self._probes = {
            engine.identity: self._probes.get(engine.identity) or self._probes_of(engine) for engine in engines
        }
        for probes in self._probes.values():
            for probe in probes:
                probe.look(step_s)

    def is_dead(self, engine: EngineHandle | ExternalEngine) -> bool:
        """Return whether Ray knows that a process of the engine has ended."""
        return any(isinstance(probe, _LaneProbe) and probe.is_dead for probe in self._probes.get(engine.identity, ()))

    def silent_s(self, engine: EngineHandle | ExternalEngine) -> float:
        """Return for how many seconds the oldest unanswered probe of an engine has waited."""
        return max((probe.silent_s for probe in self._probes.get(engine.identity, ())), default=0.0)

    def described(self, engine: EngineHandle | ExternalEngine) -> str:
        """Return which part of an engine has not answered for how long, as text for messages."""
        probes = self._probes.get(engine.identity, ())
        probe = max(probes, key=lambda probe: probe.silent_s, default=None)
        return f"{probe.what} has not answered for {probe.silent_s:.1f} s" if probe is not None else ""

    def _probes_of(self, engine: EngineHandle | ExternalEngine) -> list[_LaneProbe | _HealthProbe]:
        probes: list[_LaneProbe | _HealthProbe] = []
        if isinstance(engine, EngineHandle):
            probes += [_LaneProbe(engine, member) for member in range(engine.num_members)]
        if engine.url:
            probes.append(_HealthProbe(engine.url, engine.key, self.limit_s))
        return probes


class _LaneProbe:
    """Probes a member's process through its control lane."""

    def __init__(self, engine: EngineHandle, member: int) -> None:
        rank = engine.first + member
        self.what = f"the process of rank {rank} on node {engine.group.node_rank_of(rank)}"
        self.silent_s = 0.0
        self.is_dead = False
        self._group, self._rank = engine.group, rank
        self._asked: ray.ObjectRef[Any] | None = None

    def look(self, step_s: float) -> None:
        if self._asked is not None:
            (state,) = self._group.read_states({self._rank: self._asked}, 0.0)
            if state["state"] == "silent":
                self.silent_s += step_s
                return
            self.is_dead = state["state"] == "dead"
            self.silent_s = 0.0
        self._asked = self._group.ask_states([self._rank])[self._rank]


class _HealthProbe:
    """Probes an engine's server by ``/health``."""

    def __init__(self, url: str, key: str, limit_s: float) -> None:
        self.what = f"{url}/health"
        self.silent_s = 0.0
        self._url, self._key = self.what, key
        self._limit_s = limit_s
        self._due_s = 0.0
        self._answers: list[bool] | None = None

    def look(self, step_s: float) -> None:
        if self._answers is not None:
            if not any(self._answers):
                self.silent_s += step_s
            elif self._answers:
                self.silent_s = 0.0
            if not self._answers:
                return
            self._answers = None
        if time.monotonic() >= self._due_s or self.silent_s:
            self._due_s = time.monotonic() + min(HEALTH_S, self._limit_s / 4)
            self._answers = []
            threading.Thread(target=self._ask, args=(self._answers,), name="engine-health", daemon=True).start()

    def _ask(self, answers: list[bool]) -> None:
        try:
            send(self._url, timeout_s=min(self._limit_s, threading.TIMEOUT_MAX), key=self._key)
        except OSError as error:
            logger.debug("%s: %s", self._url, error)
            answers.append(False)
        else:
            answers.append(True)  # an error status is an answer too

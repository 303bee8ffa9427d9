"""Pulses: how long the engines of a rollout have not answered, found out without waiting for them.

An engine is asked in two ways: the control lane of each of its processes, and ``/health`` of its server. At most one
question of each kind is open, so an engine that hangs costs nothing but that question.
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
"""Seconds between two questions to ``/health`` of an engine."""
STEP_S = 2.0
"""The most that silence grows between two looks: a driver that was itself stopped or starved blames nobody for it."""


logger = logging.getLogger(__name__)


class Pulses:
    """How long engines have not answered.

    Args:
        limit_s: Seconds without an answer after which an engine counts as hung. An answer that says that the engine
            is not healthy is an answer.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._probes: dict[tuple[str, int], list[_LaneProbe | _HealthProbe]] = {}
        self._looked_s = time.monotonic()

    def look(self, engines: Sequence[EngineHandle | ExternalEngine]) -> None:
        """Ask engines that have no open question, and note who has answered; returns at once."""
        now_s = time.monotonic()
        step_s, self._looked_s = min(STEP_S, now_s - self._looked_s), now_s
        # A new dictionary in one step: other threads read this one meanwhile.
        self._probes = {
            engine.identity: self._probes.get(engine.identity) or self._probes_of(engine) for engine in engines
        }
        for probes in self._probes.values():
            for probe in probes:
                probe.look(step_s)

    def is_dead(self, engine: EngineHandle | ExternalEngine) -> bool:
        """Whether Ray knows that a process of an engine has ended."""
        return any(isinstance(probe, _LaneProbe) and probe.is_dead for probe in self._probes.get(engine.identity, ()))

    def silent_s(self, engine: EngineHandle | ExternalEngine) -> float:
        """Seconds that the longest open question to an engine has waited for its answer."""
        return max((probe.silent_s for probe in self._probes.get(engine.identity, ())), default=0.0)

    def described(self, engine: EngineHandle | ExternalEngine) -> str:
        """What of an engine has not answered for how long, for messages."""
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
    """Asks the control lane of a member's process."""

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
    """Asks ``/health`` of an engine's server."""

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

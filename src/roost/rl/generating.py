"""Generation over all engines of a rollout: requests out, samples back, also when some requests fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roost.data.samples import Sample, SampleGroup
from roost.engines.engine import EngineOutput
from roost.engines.requests import make_requests
from roost.errors import GenerationError
from roost.rl.fleet import Fleet
from roost.rl.hub import LockClient

__all__ = ["Generator"]


class Generator:
    """Generates what is missing of sample groups; several threads may call it at once.

    Args:
        name: Name of the rollout, for the lock's messages.
        fleet: The engines, and the client that sends requests to them.
        lock: Held shared while requests are in flight.
        check: Called every two seconds while requests are in flight; what it raises ends the call.
    """

    def __init__(self, name: str, fleet: Fleet, lock: LockClient, check: Callable[[], object] = lambda: None) -> None:
        self._name = name
        self._fleet = fleet
        self._lock = lock
        self._check = check
        self._changing = threading.Lock()
        self._deadlines: dict[int, float] = {}
        self._calls = 0

    def generate(self, groups: Sequence[SampleGroup], params: Mapping[str, Any], timeout_s: float) -> list[SampleGroup]:
        """Generate what is missing, within ``timeout_s``; see :meth:`RolloutManager.generate`."""
        deadline_s = time.monotonic() + timeout_s
        with self._changing:
            self._calls += 1
            number = self._calls
            self._deadlines[number] = deadline_s
        try:
            with self._lock.shared(f"{self._name}: generation", timeout_s):
                requests, owners = make_requests(groups, params)
                self._send(requests, owners, groups, deadline_s)
        finally:
            with self._changing:
                del self._deadlines[number]
        return list(groups)

    def left_s(self) -> float:
        """Seconds until the last of the running calls reaches its timeout; 0 when none runs."""
        with self._changing:
            return max(0.0, max(self._deadlines.values(), default=0.0) - time.monotonic())

    def _send(
        self,
        requests: Sequence[Mapping[str, Any]],
        owners: Sequence[Sequence[Sample]],
        groups: Sequence[SampleGroup],
        deadline_s: float,
    ) -> None:
        began_s = time.monotonic()
        try:
            answers = self._fleet.client.generate_all(
                requests, timeout_s=max(0.0, deadline_s - time.monotonic()), check=self._check
            )
        except GenerationError as error:
            for index, outputs in error.finished.items():
                _extend(owners[index], outputs)
            finished = {index: group for index, group in enumerate(groups) if group.is_finished}
            (failed,) = error.findings
            context = (*failed.context, *self._fleet.troubles(began_s))
            findings = (*self._fleet.router_problem(), replace(failed, context=context))
            raise GenerationError(findings, finished) from None
        for samples, outputs in zip(owners, answers, strict=True):
            _extend(samples, outputs)


def _extend(samples: Iterable[Sample], outputs: Iterable[EngineOutput]) -> None:
    """Add what a request gave to the samples that it was sent for."""
    for sample, output in zip(samples, outputs, strict=True):
        sample.output_ids += output.output_ids
        sample.logprobs += output.logprobs
        sample.versions += output.versions
        sample.finish_reason = output.finish_reason

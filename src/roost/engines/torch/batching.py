"""Continuous batching: requests join and leave the batch between two tokens.

One thread computes: it calls :meth:`Batcher.next` in a loop, and reports the outcome with :meth:`Batcher.settle` or
:meth:`Batcher.fail`. All other methods may be called from any thread.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from roost.engines.engine import EngineOutput, check_mode, stopped
from roost.engines.sampling import SamplingParams

__all__ = ["Batcher", "Command", "GenerationRequest", "Row"]


@dataclass(eq=False)
class GenerationRequest:
    """A request with its samples.

    Attributes:
        rid: Id of the request.
        rows: Its samples.
        future: Resolved when all samples are finished.
        has_begun: Whether a sample of it was ever computed.
    """

    rid: str
    rows: list[Row] = field(default_factory=list)
    future: Future[list[EngineOutput]] = field(default_factory=Future)
    has_begun: bool = False

    def add(self, prompt: Sequence[int], params: SamplingParams, limit: int) -> None:
        """Add a sample of a prompt; ``limit`` is its maximum length, prompt included."""
        output = EngineOutput([], finish_reason="", prompt_tokens=len(prompt))
        self.rows.append(Row(self, list(prompt), params, len(self.rows), limit, output))

    def finish(self) -> None:
        """Resolve the future if all samples are finished and the request was not cancelled."""
        outputs = [row.output for row in self.rows]
        if all(output.finish_reason for output in outputs) and self.future.set_running_or_notify_cancel():
            self.future.set_result(outputs)

    def fail(self, error: BaseException) -> None:
        """Resolve the future with an error, unless it is resolved already."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(eq=False)
class Row:
    """A sample in progress: one row of the batch.

    Attributes:
        request: The request of the sample.
        tokens: The prompt and the tokens generated so far.
        params: The sampling parameters.
        index: Index of the sample in the request.
        limit: Maximum length, prompt included.
        output: The output, to which each step adds a token.
    """

    request: GenerationRequest
    tokens: list[int]
    params: SamplingParams
    index: int
    limit: int
    output: EngineOutput

    @property
    def is_open(self) -> bool:
        """Whether the sample is unfinished and its request neither answered nor cancelled."""
        return not self.output.finish_reason and not self.request.future.done()

    def add(self, token: int, logprob: float, version: int) -> None:
        """Add a token, and set the finish reason if it is the last."""
        self.tokens.append(token)
        self.output.output_ids.append(token)
        self.output.logprobs.append(logprob)
        self.output.versions.append(version)
        if token in self.params.stop_token_ids:
            self.output.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.output.finish_reason = "length"


@dataclass
class Command:
    """A function to call between two steps."""

    action: Callable[[], None]
    future: Future[None] = field(default_factory=Future)

    def run(self) -> None:
        """Call the function, and resolve the future with its result or error."""
        try:
            self.action()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


class Batcher:
    """Decides which samples are computed next.

    Args:
        size: Number of samples in a batch at most.

    Attributes:
        is_paused: Whether requests that have not begun are held.
        is_held: Whether no step is computed at all.
        is_closed: Whether :meth:`close` was called.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._commands: collections.deque[Command] = collections.deque()
        self._waiting: collections.deque[Row] = collections.deque()
        self._running: list[Row] = []
        self.is_paused = False
        self.is_held = False
        self.is_closed = False

    # For callers in any thread -------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> Future[list[EngineOutput]]:
        """Queue a request and return its future. Cancelling the future drops the request."""
        request.future.add_done_callback(self._drop_cancelled)
        with self._changed:
            if self.is_closed:
                raise stopped()
            self._waiting.extend(request.rows)
            self._changed.notify_all()
        return request.future

    def do(self, action: Callable[[], None]) -> None:
        """Have the computing thread call a function between two steps, and wait for it."""
        command = Command(action)
        with self._changed:
            if self.is_closed:
                raise stopped()
            self._commands.append(command)
            self._changed.notify_all()
        command.future.result()

    def hold(self, is_held: bool) -> None:
        """Stop computing after the current step, or continue. Samples in progress keep their tokens."""
        with self._changed:
            self.is_held = is_held
            self._changed.notify_all()

    def pause(self, mode: str) -> None:
        """Hold requests that have not begun, and return when none is running; ``abort`` ends all requests first."""
        check_mode(mode)
        with self._changed:
            self.is_paused = True
            if mode == "abort":
                self._abort(lambda request: True)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_busy() or self.is_held or self.is_closed)

    def resume(self) -> None:
        """Let held requests begin."""
        with self._changed:
            self.is_paused = False
            self._changed.notify_all()

    def abort(self, rid: str) -> None:
        """Answer a request with the tokens so far; with an empty ``rid`` all requests."""
        with self._changed:
            self._abort(lambda request: not rid or request.rid == rid)

    def close(self) -> None:
        """Make :meth:`next` return ``None``; requests that are left fail."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def counts(self) -> tuple[int, int]:
        """Return the number of samples in the batch and the number of samples that wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    # For the computing thread ----------------------------------------------------------------

    def next(self) -> list[Row] | None:
        """Return the samples that need a token, or ``None`` once closed. Block until there is one, and run commands."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.is_closed or self._commands or self._admit())
                commands, self._commands = self._commands, collections.deque()
                rows = None if self.is_closed else list(self._running)
            for command in commands:
                command.run()
            if rows is None:
                self._fail_all()
                return None
            if rows and not commands:
                return rows

    def settle(self, drawn: Iterable[tuple[Row, int, float]], version: int) -> None:
        """Add a token with its log probability to each row; skip rows that were ended meanwhile."""
        with self._changed:
            for row, token, logprob in drawn:
                if row.is_open:
                    row.add(token, logprob, version)
                    if row.output.finish_reason:
                        row.request.finish()
            self._running = [row for row in self._running if row.is_open]
            self._changed.notify_all()

    def fail(self, rows: Iterable[Row], error: BaseException) -> None:
        """Fail the requests of some rows."""
        with self._changed:
            for row in rows:
                row.request.fail(error)
            self._forget()

    # Under the lock --------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Fill the batch; return whether there is a sample to compute."""
        if self.is_held:
            return False
        left: list[Row] = []
        while self._waiting and len(self._running) < self._size:
            row = self._waiting.popleft()
            if self.is_paused and not row.request.has_begun:
                left.append(row)
            else:
                row.request.has_begun = True
                self._running.append(row)
        self._waiting.extendleft(reversed(left))
        return bool(self._running)

    def _is_busy(self) -> bool:
        return bool(self._running) or any(row.request.has_begun for row in self._waiting)

    def _abort(self, is_selected: Callable[[GenerationRequest], bool]) -> None:
        requests = {
            id(row.request): row.request for row in [*self._running, *self._waiting] if is_selected(row.request)
        }
        for request in requests.values():
            for row in request.rows:
                row.output.finish_reason = row.output.finish_reason or "abort"
            request.finish()
        self._forget()

    def _forget(self) -> None:
        """Remove rows whose samples are finished or whose requests were answered or cancelled."""
        self._running = [row for row in self._running if row.is_open]
        self._waiting = collections.deque(row for row in self._waiting if row.is_open)
        self._changed.notify_all()

    def _drop_cancelled(self, future: Future[list[EngineOutput]]) -> None:
        if future.cancelled():
            with self._changed:
                self._forget()

    def _fail_all(self) -> None:
        with self._changed:
            for command in self._commands:
                command.future.set_exception(stopped())
            self._commands.clear()
            for row in [*self._running, *self._waiting]:
                row.request.fail(stopped())
            self._forget()

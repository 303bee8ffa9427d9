"""Continuous batching: requests that join and leave a batch between two tokens.

Whoever computes asks for :meth:`Batcher.next` in a loop, and says what came of it with
:meth:`Batcher.settle` or :meth:`Batcher.fail`. Everybody else may call anything from any thread.
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
    """A request, and the samples that it asks for."""

    rid: str
    rows: list[Row] = field(default_factory=list)
    future: Future[list[EngineOutput]] = field(default_factory=Future)
    has_begun: bool = False

    def add(self, prompt: Sequence[int], params: SamplingParams, limit: int) -> None:
        """One more sample of a prompt, as long as the limit at most, prompt included."""
        output = EngineOutput([], finish_reason="", prompt_tokens=len(prompt))
        self.rows.append(Row(self, list(prompt), params, len(self.rows), limit, output))

    def finish(self) -> None:
        """Answers, if all samples are finished and somebody still wants them."""
        outputs = [row.output for row in self.rows]
        if all(output.finish_reason for output in outputs) and self.future.set_running_or_notify_cancel():
            self.future.set_result(outputs)

    def fail(self, error: BaseException) -> None:
        """Answers with an error, if nothing else was answered yet."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(eq=False)
class Row:
    """A sample that is being made.

    Attributes:
        request: Whose it is.
        tokens: Its prompt, and what was generated.
        params: How it is sampled.
        index: Its index in the request.
        limit: How long it may become.
        output: What is answered.
    """

    request: GenerationRequest
    tokens: list[int]
    params: SamplingParams
    index: int
    limit: int
    output: EngineOutput

    @property
    def is_open(self) -> bool:
        """Whether it is unfinished, and somebody wants it."""
        return not self.output.finish_reason and not self.request.future.done()

    def add(self, token: int, logprob: float, version: int) -> None:
        """Adds a token; it may be the last."""
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
    """Something to do between two steps."""

    action: Callable[[], None]
    future: Future[None] = field(default_factory=Future)

    def run(self) -> None:
        """Does it; whoever waits for it gets its error."""
        try:
            self.action()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


class Batcher:
    """Decides what is computed next.

    Args:
        size: How many samples are computed at once.
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

    # For those who ask ---------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> Future[list[EngineOutput]]:
        """Queues a request. Cancelling its future drops it."""
        request.future.add_done_callback(self._drop_cancelled)
        with self._changed:
            if self.is_closed:
                raise stopped()
            self._waiting.extend(request.rows)
            self._changed.notify_all()
        return request.future

    def do(self, action: Callable[[], None]) -> None:
        """Has something done between two steps, by the thread that computes, and waits for it."""
        command = Command(action)
        with self._changed:
            if self.is_closed:
                raise stopped()
            self._commands.append(command)
            self._changed.notify_all()
        command.future.result()

    def hold(self, is_held: bool) -> None:
        """Stops computing where it is, or goes on there."""
        with self._changed:
            self.is_held = is_held
            self._changed.notify_all()

    def pause(self, mode: str) -> None:
        """Holds requests that have not begun, and returns when nothing runs; ``abort`` ends all that are here."""
        check_mode(mode)
        with self._changed:
            self.is_paused = True
            if mode == "abort":
                self._abort(lambda request: True)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_busy() or self.is_held or self.is_closed)

    def resume(self) -> None:
        """Lets requests begin again."""
        with self._changed:
            self.is_paused = False
            self._changed.notify_all()

    def abort(self, rid: str) -> None:
        """Answers a request, or with no name all of them, with what there is of it."""
        with self._changed:
            self._abort(lambda request: not rid or request.rid == rid)

    def close(self) -> None:
        """Ends :meth:`next`; what is left fails."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def counts(self) -> tuple[int, int]:
        """Samples that are computed, and samples that wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    # For the thread that computes ------------------------------------------------------------

    def next(self) -> list[Row] | None:
        """The samples that want a token, or ``None`` when closed. Waits, and runs commands meanwhile."""
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
        """Takes a token and its log probability for each row; rows that were ended meanwhile stay as they are."""
        with self._changed:
            for row, token, logprob in drawn:
                if row.is_open:
                    row.add(token, logprob, version)
                    if row.output.finish_reason:
                        row.request.finish()
            self._running = [row for row in self._running if row.is_open]
            self._changed.notify_all()

    def fail(self, rows: Iterable[Row], error: BaseException) -> None:
        """Ends the requests of rows with an error."""
        with self._changed:
            for row in rows:
                row.request.fail(error)
            self._forget()

    # Under the lock --------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Fills the batch; whether there is something to compute."""
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

    def _abort(self, is_meant: Callable[[GenerationRequest], bool]) -> None:
        requests = {id(row.request): row.request for row in [*self._running, *self._waiting] if is_meant(row.request)}
        for request in requests.values():
            for row in request.rows:
                row.output.finish_reason = row.output.finish_reason or "abort"
            request.finish()
        self._forget()

    def _forget(self) -> None:
        """Drops rows that nobody waits for any more."""
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

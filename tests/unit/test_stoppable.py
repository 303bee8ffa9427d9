"""Broadcasts to engines that hang or have failed: given up at the deadline, or as soon as the failure is known."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from roost.errors import RolloutError, WorkerError
from roost.plan import Sharding, TensorShards, WeightTransport, plan_transfer
from roost.weights.endpoints import WeightSender
from roost.weights.stoppable import FailureWatch, Stoppable
from roost.weights.streams import WeightStream, make_streams

LARGE = (64, 2**20)
"""256 MiB of float32: more than sockets take without a reader."""
LIMIT_S = 240.0
"""Seconds for what ends within a few: the start of a process that imports torch is among it."""


def stream_of(sender: str = "") -> WeightStream:
    side = Sharding((TensorShards("large", LARGE, "float32"),))
    [stream] = make_streams(plan_transfer(side, side), lambda *_: WeightTransport.BROADCAST)
    return replace(stream, backend="gloo", sender=sender, first_ranks=(1,), world_size=2)


@contextmanager
def sender_of_a_stuck_receiver(stream: WeightStream) -> Iterator[WeightSender]:
    sender = WeightSender([stream], None, "127.0.0.1", "", LIMIT_S)
    script = Path(__file__).parent / "stuck_receiver.py"
    with subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as receiver:
        try:
            assert receiver.stdin is not None
            assert receiver.stdout is not None
            pickle.dump((stream, sender.addresses[stream.id]), receiver.stdin)
            receiver.stdin.close()
            sender.join()
            assert receiver.stdout.readline() == b"joined\n"
            yield sender
        finally:
            receiver.kill()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("sender_class", ["", "roost.engines.sglang.sender:DirectSender"], ids=["gloo", "sglang"])
def test_a_broadcast_to_a_hung_engine_is_given_up(sender_class: str) -> None:
    weights = {"large": torch.zeros(LARGE)}
    with sender_of_a_stuck_receiver(stream_of(sender_class)) as sender:
        before = set(threading.enumerate())
        raised: list[BaseException] = []

        def send() -> None:
            try:
                sender.send(lambda: weights, 1, bool(sender_class))
            except BaseException as error:
                raised.append(error)

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        until(lambda: any(thread.name == "broadcast" for thread in set(threading.enumerate()) - before))
        sender.stop("engine rollout/1 died")
        sending.join(LIMIT_S / 2)  # the library itself would give up after LIMIT_S and more
        assert not sending.is_alive()
        [error] = raised
        assert isinstance(error, RolloutError)
        assert error.codes == ("S207",)
        assert "weights-0 to 1 engine process was given up: engine rollout/1 died" in str(error)
        sender.close()
        with pytest.raises(RuntimeError, match="are closed"):
            sender.send(lambda: weights, 2, bool(sender_class))


def test_a_broadcast_ends_at_its_deadline() -> None:
    with sender_of_a_stuck_receiver(stream_of()) as sender:
        sender._timeout_s = 0.5
        with pytest.raises(RolloutError, match=r"not all of its ranks took part within 0\.5 s") as caught:
            sender.send(lambda: {"large": torch.zeros(LARGE)}, 1)
        assert caught.value.codes == ("S207",)


def test_the_start_of_a_broadcast_that_no_engine_joins_ends_at_its_deadline() -> None:
    sender = WeightSender([stream_of()], None, "127.0.0.1", "", 0.5)
    with pytest.raises(RolloutError, match="the start of the broadcast") as caught:
        sender.join()
    assert caught.value.codes == ("S207",)


def test_an_abort_that_blocks_is_not_waited_for() -> None:
    calls, never = Stoppable(), threading.Event()
    with pytest.raises(RolloutError, match="a call was given up"):
        calls.run(never.wait, never.wait, 0.1, "a call")
    never.set()


def test_a_call_has_the_device_and_the_stream_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch has them: both belong to a thread, and begin with device 0 and its default stream."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name, first in (("device", 0), ("stream", "default")):
        monkeypatch.setattr(torch.cuda, f"set_{name}", partial(setattr, current, name))
        monkeypatch.setattr(torch.cuda, f"current_{name}", partial(getattr, current, name, first))
    torch.cuda.set_device(3)
    torch.cuda.set_stream("of the trainer")  # type: ignore[arg-type]
    found: list[object] = []
    Stoppable().run(
        lambda: found.extend([torch.cuda.current_device(), torch.cuda.current_stream()]),
        lambda: None,
        LIMIT_S,
        "a call",
    )
    assert found == [3, "of the trainer"]


def test_what_a_call_raises_is_raised() -> None:
    def fails() -> None:
        raise LookupError("no weights")

    with pytest.raises(LookupError, match="no weights"):
        Stoppable().run(fails, lambda: None, LIMIT_S, "a call")


class Call:
    """As the result of a call on a group."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        assert self.ended.wait(timeout)
        if self.error is not None:
            raise self.error


def test_the_first_failure_is_reported_while_others_are_waited_for() -> None:
    calls = [Call(), Call(), Call()]
    found: list[Exception] = []
    reported = threading.Event()

    def report(error: Exception) -> None:
        found.append(error)
        reported.set()

    with FailureWatch(calls, report):
        calls[1].ended.set()
        calls[2].error = WorkerError("it died")
        calls[2].ended.set()
        assert reported.wait(LIMIT_S)
    assert found == [calls[2].error]
    with FailureWatch(calls[:1], report):
        pass
    assert len(found) == 1

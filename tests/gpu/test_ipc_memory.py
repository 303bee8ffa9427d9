"""Memory that a trainer exported on a real GPU is freed with its tensors, whatever its receivers did with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from roost.plan import WeightTransport  # noqa: E402
from roost.weights.ipc import DEVICE, IpcAddress, IpcSender  # noqa: E402
from roost.weights.streams import Piece, WeightStream  # noqa: E402

TENSORS, ELEMENTS = 4, 2**26
"""One GiB in all."""
GIB = 2**30
SLACK = 2**28
"""What else a process may take of the device meanwhile, such as for its first kernels."""
WAIT_S = 120.0


def receive(pipe: Any) -> None:
    """Maps and releases what it is sent, as SGLang does at every update."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    torch.zeros(1, device="cuda:0")
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        address, is_kept = told
        handles = IpcAddress.from_bytes(address).handles
        views = [rebuild_cuda_tensor(*handle[:DEVICE], 0, *handle[DEVICE + 1 :]) for handle in handles]
        pipe.send([float(view[-1]) for view in views])
        if is_kept:
            signal.pause()
        views.clear()
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        pipe.send("released")
    pipe.close()


class Receiver:
    """A process that maps memory of this one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=receive, args=(there,), daemon=True)
        self.process.start()
        assert self.answer() == "ready"

    def answer(self) -> Any:
        assert self.pipe.poll(WAIT_S), "the receiver does not answer"
        return self.pipe.recv()

    def map(self, address: bytes, is_kept: bool = False) -> list[float]:
        self.pipe.send((address, is_kept))
        found: list[float] = self.answer()
        if not is_kept:
            assert self.answer() == "released"
        return found

    def end(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(WAIT_S)


@pytest.fixture(scope="module")
def receivers() -> Iterator[list[Receiver]]:
    started: list[Receiver] = []
    try:
        for _ in range(3):
            started.append(Receiver())
        yield started
    finally:
        for one in started:
            one.end()


def used_bytes() -> int:
    """What the driver says is in use on the device: not what torch believes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def export(value: float) -> tuple[IpcSender, dict[str, Any]]:
    """A trainer's weights of one GiB, exported."""
    weights = {f"w{number}": torch.full((ELEMENTS,), value + number, device="cuda:0") for number in range(TENSORS)}
    box = ((0, ELEMENTS),)
    pieces = tuple(
        Piece(name, "float32", (ELEMENTS,), box, box, box, (ELEMENTS,), 0, tensor.nbytes)
        for name, tensor in weights.items()
    )
    stream = WeightStream("c", WeightTransport.IPC, 0, (0,), pieces, 0)
    return IpcSender(stream, lambda: weights), weights


def check_is_freed(use: Callable[[IpcSender, list[float]], None]) -> None:
    """Exports one GiB twice, has it used, and looks whether the driver gets it back each time."""
    sender, weights = export(0.0)  # the first export makes what is kept: the counter
    sender.close()
    weights.clear()
    before = used_bytes()
    for value in (10.0, 20.0):
        sender, weights = export(value)
        assert used_bytes() - before > GIB - SLACK
        use(sender, [value + number for number in range(TENSORS)])
        sender.close()
        sender.close()
        weights.clear()
        left = used_bytes() - before
        assert left < SLACK, f"{left / GIB:.2f} GiB were not given back"


@pytest.mark.parametrize("times", [0, 1, 2, 5])
def test_mapped_and_released_any_number_of_times(receivers: list[Receiver], times: int) -> None:
    def use(sender: IpcSender, expected: list[float]) -> None:
        for _ in range(times):
            assert receivers[0].map(sender.address) == expected

    check_is_freed(use)


def test_mapped_by_several_receivers(receivers: list[Receiver]) -> None:
    def use(sender: IpcSender, expected: list[float]) -> None:
        for receiver in receivers:
            assert receiver.map(sender.address) == expected

    check_is_freed(use)


def test_mapped_by_a_receiver_that_was_killed() -> None:
    receiver = Receiver()
    sender, weights = export(1.0)
    try:
        assert receiver.map(sender.address, is_kept=True) == [1.0 + number for number in range(TENSORS)]
    finally:
        receiver.end()
    full = used_bytes()
    sender.close()
    weights.clear()
    assert full - used_bytes() > GIB - SLACK


def test_memory_is_kept_while_the_channel_is_open(receivers: list[Receiver]) -> None:
    """A trainer that drops its tensors does not pull them away under a receiver that reads them."""
    sender, weights = export(5.0)
    weights.clear()
    torch.cuda.empty_cache()
    other = [torch.full((ELEMENTS,), -1.0, device="cuda:0") for _ in range(TENSORS)]
    assert receivers[0].map(sender.address) == [5.0 + number for number in range(TENSORS)]
    full = used_bytes()
    sender.close()
    assert full - used_bytes() > GIB - SLACK
    assert all(float(tensor[0]) == -1.0 for tensor in other)

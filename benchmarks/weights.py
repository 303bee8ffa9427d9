"""What weight sync costs beside the bare copy, and beside the same broadcast written by hand."""

from __future__ import annotations

import datetime
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launching import Row
from roost.cluster import lease_ports
from roost.plan import Sharding, TensorShards, WeightTransport, plan_transfer
from roost.weights.collective import BUCKET_BYTES
from roost.weights.endpoints import WeightReceiver, WeightSender
from roost.weights.streams import make_streams

GIB = 2**30
TENSORS = 64
REPEATS = 5
HOST = "127.0.0.1"


def _weights(nbytes: int) -> dict[str, torch.Tensor]:
    size = nbytes // TENSORS // 4
    return {f"layer.{number}": torch.full((size,), float(number)) for number in range(TENSORS)}


def _side(weights: dict[str, torch.Tensor]) -> Sharding:
    return Sharding(tuple(TensorShards(name, tuple(tensor.shape), "float32") for name, tensor in weights.items()))


def _receive(pipe: Connection, nbytes: int) -> None:
    """The engine's process: takes a version, and puts it where its parameters are."""
    torch.set_num_threads(1)
    weights = _weights(nbytes)
    streams, addresses = pipe.recv()
    receiver = WeightReceiver(streams, addresses, 0, HOST, 60.0)
    pipe.send("joined")
    while (version := pipe.recv()) is not None:
        receiver.receive(version)
        pipe.send("received")
        pipe.recv()
        for name, tensor in receiver.staged().items():
            weights[name].copy_(tensor)
        pipe.send("used")


def _sync_s(kind: WeightTransport, nbytes: int) -> tuple[float, float]:
    """Best seconds of a sync between two processes after the first: until it has arrived, and until it is used."""
    weights = _weights(nbytes)
    side = _side(weights)
    streams = make_streams(plan_transfer(side, side), lambda sender, receiver: kind)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs, nbytes))
    process.start()
    sender = WeightSender(streams, None, HOST, "", 60.0)
    ours.send((streams, sender.addresses))
    sender.join()
    ours.recv()
    times = []
    for version in range(1, REPEATS + 2):
        start = time.perf_counter()
        ours.send(version)
        sender.send(lambda: weights, version)
        ours.recv()
        arrived = time.perf_counter() - start
        ours.send("use it")
        ours.recv()
        times.append((arrived, time.perf_counter() - start))
    ours.send(None)
    process.join()
    sender.close()
    return min(arrived for arrived, _ in times[1:]), min(used for _, used in times[1:])


def _copy_s(nbytes: int) -> float:
    source = torch.ones(nbytes // 4)
    target = torch.empty_like(source)
    return min(_timed(lambda: target.copy_(source)) for _ in range(REPEATS + 1))


def _bare_rank(rank: int, port: int, nbytes: int) -> list[float]:
    torch.set_num_threads(1)
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        HOST, port, 2, rank == 0, datetime.timedelta(seconds=60)
    )
    group: Any = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60))
    flat = torch.full((nbytes,), rank, dtype=torch.uint8)  # written, so that its memory is really there
    times = []
    for _ in range(REPEATS + 1):
        group.barrier().wait()
        start = time.perf_counter()
        works = [group.broadcast(flat[at : at + BUCKET_BYTES], 0) for at in range(0, nbytes, BUCKET_BYTES)]
        for work in works:
            work.wait()
        group.barrier().wait()
        times.append(time.perf_counter() - start)
    return times


def _bare_broadcast_s(nbytes: int) -> float:
    with lease_ports() as lease:
        process = multiprocessing.get_context("spawn").Process(target=_bare_rank, args=(1, lease.port, nbytes))
        process.start()
        times = _bare_rank(0, lease.port, nbytes)
        process.join()
    return min(times[1:])


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure_weights() -> list[Row]:
    """Shared memory beside a copy of the same size; broadcast beside the same in bare gloo."""
    torch.set_num_threads(1)
    (_, shared), copied = _sync_s(WeightTransport.SHARED_MEMORY, GIB), _copy_s(GIB)
    (sent, used), bare = _sync_s(WeightTransport.BROADCAST, GIB), _bare_broadcast_s(GIB)
    return [
        Row(
            "1 GiB through shared memory until it is used, beside a copy",
            shared,
            copied,
            "≤ 2.5 ×",
            shared <= 2.5 * copied,
        ),
        Row(
            "1 GiB by gloo broadcast until it has arrived, beside bare gloo", sent, bare, "≤ 1.2 ×", sent <= 1.2 * bare
        ),
        Row("the same until it is used", used, bare, "", True),
    ]

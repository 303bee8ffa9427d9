"""A worker may fork, and use CUDA in the child: attestation leaves its process as it was."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

import roost

torch = pytest.importorskip("torch", reason="needs torch")

LIMIT_S = 120.0


def compute(answers: Connection) -> None:
    """Runs in the forked child."""
    try:
        answers.send((int(torch.arange(5, device="cuda").sum()), str(torch.cuda.get_device_properties(0).uuid)))
    except Exception as error:  # the parent shows it
        answers.send(f"{type(error).__name__}: {error}")


class Forking(roost.Worker):
    def compute_in_a_child(self) -> object:
        """What a forked child computes on the GPU, or its error."""
        mine, its = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=compute, args=(its,))
        child.start()
        its.close()
        try:
            return mine.recv() if mine.poll(LIMIT_S) else f"no answer within {LIMIT_S:g} s"
        except EOFError:
            child.join(LIMIT_S)
            return f"the child ended with {child.exitcode}"
        finally:
            child.kill()

    def uses_cuda(self) -> bool:
        """Whether this process has the driver's devices open, which cuInit does."""
        held = []
        for number in os.listdir("/proc/self/fd"):
            try:
                held.append(os.readlink(f"/proc/self/fd/{number}"))
            except OSError:  # the folder's own, closed by now
                continue
        return any("nvidia-uvm" in path for path in held)


@pytest.fixture(scope="module")
def group() -> Iterator[roost.WorkerGroup]:
    os.environ.pop("RAY_ADDRESS", None)
    with (
        roost.Cluster(num_nodes=1) as cluster,
        Forking.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 0)) as workers,
    ):
        yield workers


def test_the_worker_was_attested_and_has_not_started_cuda(group: roost.WorkerGroup) -> None:
    assert group.binding is not None
    assert group.binding.attestations[0].uuids == group.binding.uuids[0]
    assert group.uses_cuda().wait() == [False]


def test_a_forked_child_computes_on_the_gpu(group: roost.WorkerGroup) -> None:
    assert group.binding is not None
    [found] = group.compute_in_a_child().wait(2 * LIMIT_S)
    assert found == (10, group.binding.uuids[0][0].removeprefix("GPU-"))

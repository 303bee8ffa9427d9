"""A real SGLang under Roost, on the GPU of its trainer; skipped, and saying so, where SGLang is not installed.

``ROOST_TEST_SGLANG_OPTIONS`` replaces the options that SGLang gets besides those of Roost, such as for other kernels.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the package sglang", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parent))

import psutil  # noqa: E402
import ray  # noqa: E402
from processes import wait_for  # noqa: E402
from sglang_parts import Learner, save_model  # noqa: E402

import roost  # noqa: E402

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

OPTIONS = os.environ.get("ROOST_TEST_SGLANG_OPTIONS", "--attention-backend triton --sampling-backend pytorch").split()
DETERMINISTIC = ["--enable-deterministic-inference", "--context-length", "2048"]
SHARE = 0.4
JOB = {"cluster": {"component_placement": {
    "actor": {"placement": "0", "gpu_share": 0.3}, "rollout": {"placement": "0", "gpu_share": SHARE},
}}}  # fmt: skip
PARAMS = {"max_new_tokens": 32, "temperature": 1.0, "ignore_eos": True}
START_S = 600.0
BF16_NOISE = 0.3
"""Mean difference of log probabilities between SGLang and the trainer: below 0.1 with equal weights, else above 1."""

Roles = tuple[roost.TrainGroup, roost.RolloutManager]


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    os.environ.pop("RAY_ADDRESS", None)
    folder = str(save_model(tmp_path_factory.mktemp("sglang") / "model"))
    made = functools.partial(roost.SglangEngine, folder, options=[*OPTIONS, *DETERMINISTIC])
    with roost.Cluster(num_nodes=1) as cluster:
        plan = roost.Plan.resolve(JOB, cluster)
        start = time.perf_counter()
        with (
            roost.RolloutManager(cluster, plan, made, start_timeout_s=START_S) as rollout,
            roost.TrainGroup(cluster, Learner, plan) as train,
        ):
            print(f"start: {time.perf_counter() - start:.0f} s")
            train.init(folder)
            train.connect(rollout)
            yield train, rollout
        wait_for(lambda: not schedulers(), "the end of SGLang's processes")


def schedulers() -> list[int]:
    """SGLang's processes that compute, among those that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("sglang::schedul") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def groups(count: int, samples: int, seeds: Sequence[int] = ()) -> list[roost.SampleGroup]:
    return [
        roost.SampleGroup(
            f"g{number}",
            {"seed": seeds[number]} if seeds else {},
            [roost.Sample([5, 6, 7, 8 + number], index=index) for index in range(samples)],
        )
        for number in range(count)
    ]


def tokens(found: Sequence[roost.SampleGroup]) -> list[list[tuple[int, ...]]]:
    return [[tuple(sample.output_ids) for sample in group.samples] for group in found]


def check_serves(train: roost.TrainGroup, rollout: roost.RolloutManager) -> None:
    """SGLang computes with the weights that the trainer has now, and says which version that is."""
    found = rollout.generate(groups(4, 2), PARAMS)
    differences = []
    for group in found:
        for sample in group.samples:
            assert sample.finish_reason == "length"
            assert set(sample.versions) == {rollout.version}
            [own] = train.workers.logprobs(sample.prompt_ids, sample.output_ids).wait()
            differences += [abs(one - other) for one, other in zip(sample.logprobs, own, strict=True)]
    mean = sum(differences) / len(differences)
    print(f"mean difference of log probabilities: {mean:.3f}")
    assert mean < BF16_NOISE


def memory(train: roost.TrainGroup) -> tuple[float, float]:
    used, total = train.workers.memory_gib().wait()[0]
    return used, total


def test_it_serves_the_model_that_the_trainer_has(roles: Roles) -> None:
    check_serves(*roles)


def test_samples_of_a_group_differ_and_seeded_ones_come_again(roles: Roles) -> None:
    _, rollout = roles
    seeds = [1, 2**63 - 1, 3, 4]
    seeded = tokens(rollout.generate(groups(4, 4, seeds), PARAMS))
    again = tokens(rollout.generate(groups(4, 4, seeds), PARAMS))
    assert seeded == again
    unseeded = tokens(rollout.generate(groups(4, 4), PARAMS))
    for found in (seeded, unseeded):
        assert len({sample for group in found for sample in group}) == 16
    assert not {sample for group in seeded for sample in group} & {sample for group in unseeded for sample in group}


def test_a_seed_that_would_end_it_is_refused(roles: Roles) -> None:
    _, rollout = roles
    with pytest.raises(roost.RolloutError) as error:
        rollout.generate(groups(1, 1, [2**63]), PARAMS)
    assert error.value.codes == ("E101",)
    assert tokens(rollout.generate(groups(1, 1), PARAMS))


def test_weights_come_by_ipc(roles: Roles) -> None:
    train, rollout = roles
    for step in range(1, 5):
        train.train(step)
        start = time.perf_counter()
        report = train.update_weights()
        print(f"sync {step}: {1000 * (time.perf_counter() - start):.0f} ms, {report.seconds}")
        assert report.bytes_by_transport == {"ipc": train.workers.nbytes().wait()[0]}
        check_serves(train, rollout)


def test_a_trainer_frees_its_memory_at_every_offload(roles: Roles) -> None:
    train, rollout = roles
    for step in range(10, 13):
        for more in range(2):  # SGLang maps the same memory at each of them
            train.train(10 * step + more)
            train.update_weights()
        before, _ = memory(train)
        [moved] = train.offload()
        freed = before - memory(train)[0]
        train.onload()
        print(f"offload: {moved / 2**30:.2f} GiB moved, {freed:.2f} GiB freed")
        assert freed > 0.9 * moved / 2**30
    train.update_weights()
    check_serves(train, rollout)


def test_its_memory_is_taken_and_given_back_with_new_weights(roles: Roles) -> None:
    train, rollout = roles
    before, total = memory(train)
    rollout.offload()
    freed = before - memory(train)[0]
    print(f"sleep: {freed:.1f} of {total:.1f} GiB freed")
    assert freed > 0.5 * SHARE * total
    train.train(50)
    train.update_weights()
    rollout.onload()
    check_serves(train, rollout)


def test_a_scheduler_that_is_killed_is_named_and_the_engine_gets_its_memory_again(roles: Roles) -> None:
    train, rollout = roles
    before, total = memory(train)
    train.workers.hold(0.25).wait()
    [pid] = schedulers()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not rollout.alive_engines, "its being found dead", 120)
    expected = f"Subprocess scheduler_0 (pid={pid}) crashed with exit code -9 (SIGKILL)"
    wait_for(lambda: expected in logs_of_workers(), "the cause in the log of its worker")
    start = time.perf_counter()
    assert len(rollout.recover()) == 1
    print(f"recovered: {time.perf_counter() - start:.0f} s")
    train.update_weights()
    check_serves(train, rollout)
    after = memory(train)[0] - 0.25 * total
    train.workers.hold(0).wait()
    print(f"used: {before:.1f} GiB before, {after:.1f} GiB after, of {total:.1f} GiB")
    assert abs(after - before) < 0.04 * total, "it has as much as before, beside a trainer that holds a quarter"
    freed = memory(train)[0]
    [moved] = train.offload()
    freed -= memory(train)[0]
    train.onload()
    assert freed > 0.9 * moved / 2**30, "the engine that was killed keeps nothing of the trainer's memory"


def logs_of_workers() -> str:
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    return "\n".join(path.read_text(errors="replace") for path in folder.glob("worker-*.err"))

"""The loop: generate, judge, learn, send the weights on.

    roost run examples/grpo.yaml --cluster 2x2
    roost run examples/grpo.yaml --cluster 2x2 --set cluster.layout.mode=disaggregated --set cluster.layout.async_training=true

or, with fewer words, ``python examples/grpo --mode disaggregated --async``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from grpo import task
from grpo.curve import draw_curve
from grpo.learner import GrpoConfig
from grpo.model import TINY, TinyLM
from roost import DataBuffer, PerRank, RolloutManager, RunningJob, Sample, SampleGroup, TorchEngine, TrainGroup


@dataclass(frozen=True)
class Settings:
    """The ``grpo`` section of the job.

    Attributes:
        steps: Batches to learn from.
        seed: Everything random follows from it.
        prompts: Prompts per step.
        samples: Samples per prompt.
        learner: How a batch is learnt from.
        is_async: Generate the next batch while this one is learnt from: ``async_training`` of the layout.
        max_staleness: How many versions older than the trainer's a batch may then be.
        goal: Mean reward, over the last steps, that the run must reach; 0: none.
        model: A directory with a model of transformers, seen by all nodes; empty: a TinyLM.
        rollouts: A file: rollouts are saved there by debug_rollout_only, and read by debug_train_only.
    """

    steps: int = 100
    seed: int = 0
    prompts: int = 64
    samples: int = 16
    learner: GrpoConfig = field(default_factory=GrpoConfig)
    is_async: bool = False
    max_staleness: int = 1
    goal: float = 0.0
    model: str = ""
    rollouts: str = "rollouts.jsonl.gz"

    @staticmethod
    def read(config: Mapping[str, Any]) -> Settings:
        """From a job; a key that means nothing is an error."""
        section = dict(config.get("grpo") or {})
        section["learner"] = _made(GrpoConfig, section.get("learner") or {}, "grpo.learner")
        section["model"] = str(Path(section["model"]).expanduser().resolve()) if section.get("model") else ""
        section["is_async"] = bool(config["cluster"].get("layout", {}).get("async_training"))
        return _made(Settings, section, "grpo")


def _made(cls: type[Any], section: Mapping[str, Any], where: str) -> Any:
    known = [one.name for one in fields(cls)]
    unknown = sorted(set(section) - set(known))
    if unknown:
        raise SystemExit(f"{where}.{unknown[0]} means nothing; known are {', '.join(known)}")
    return cls(**section)


@dataclass
class Record:
    """What a run did.

    Attributes:
        rewards: Mean reward of each step.
        seconds: Time of each phase, over all steps.
        tokens: How many were generated.
        versions: Oldest weights in each batch that was learnt from.
        checksum: Of the model that came out.
    """

    rewards: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    versions: list[int] = field(default_factory=list)
    checksum: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def recent(self, count: int = 10) -> float:
        """Mean reward of the last steps."""
        last = self.rewards[-count:]
        return sum(last) / len(last) if last else 0.0


def main(job: RunningJob) -> int:
    """Run the job, whose trainer and engines have been started; return an exit code."""
    settings = Settings.read(job.config)
    console = Console()
    if not job.has_train:
        return only_generate(job, settings, console)
    if not job.has_rollout:
        return only_train(job, settings, console)
    record = learn(job, settings, console)
    show(record, settings, console)
    return verdict(record, settings, console)


def verdict(record: Record, settings: Settings, console: Console) -> int:
    """An exit code: whether the goal was reached."""
    if not settings.goal:
        return 0
    is_reached = record.recent() >= settings.goal
    comparison = "reaches" if is_reached else "is below"
    console.print(
        f"\nmean reward {record.recent():.2f} of the last steps {comparison} {settings.goal:g}", highlight=False
    )
    return 0 if is_reached else 1


def learn(job: RunningJob, settings: Settings, console: Console) -> Record:
    """Train; return what happened."""
    record = Record()
    train, rollout = job.train, job.rollout
    with record.phase("start"):
        init_trainer(train, settings)
        train.update_weights()
    console.print(f"{train.world_size} trainers, {len(rollout.engines)} engines behind {rollout.url}\n")
    batches = generated_ahead(rollout, settings, record) if settings.is_async else generated(rollout, settings, record)
    is_shared = job.plan.mode.value == "collocated"
    with Shown(console, settings.steps) as progress:
        for groups in batches:
            if is_shared:  # engines and trainers have the same accelerators, and take turns
                with record.phase("swap"):
                    rollout.offload()
                    train.onload()
            with record.phase("train"):
                train.train(PerRank(shares(groups, train.world_size)))
                rollout.buffer.confirm([group.id for group in groups])
            if is_shared:
                with record.phase("swap"):
                    rollout.onload()
            with record.phase("sync"):
                train.update_weights("keep" if settings.is_async else "wait")
            if is_shared:
                with record.phase("swap"):
                    train.offload()
            record.rewards.append(mean_reward(groups))
            record.versions.append(min(group.oldest_version or 0 for group in groups))
            progress.show(record)
        if is_shared:
            train.onload()
        record.checksum = train.workers.checksum().wait()[0]
    return record


def init_trainer(train: TrainGroup, settings: Settings) -> None:
    """Give all ranks the same model."""
    rows = settings.prompts * settings.samples // train.world_size
    train.init(settings.model, settings.learner, settings.seed, rows)


def make_engine(config: Mapping[str, Any]) -> TorchEngine:
    """Return an engine with a model that the trainer's weights replace; called in the processes of the engines."""
    settings = Settings.read(config)
    options: dict[str, Any] = {
        "context": task.TOKENS,
        "length_multiple": task.TOKENS,
        "batch_rows": settings.samples * 4,
    }
    if settings.model:
        return TorchEngine.from_pretrained(settings.model, dtype="float32", **options)
    return TorchEngine(partial(TinyLM, TINY, settings.seed), **options)


SAMPLING = {"max_new_tokens": task.OUTPUT_TOKENS, "temperature": 1.0, "stop_token_ids": [task.STOP]}


# Batches -------------------------------------------------------------------------------------


def new_groups(settings: Settings, step: int) -> list[SampleGroup]:
    """Prompts of a step. Their seeds depend on seed, step and place alone, so that a run can be repeated."""
    groups = []
    for number, prompt in enumerate(task.prompts_for(settings.seed, step, settings.prompts)):
        data = {"seed": (settings.seed * 1_000_003 + step) * 1_003 + number, "answer": prompt.answer}
        samples = [Sample(list(prompt.ids), index=index) for index in range(settings.samples)]
        groups.append(SampleGroup(f"{step:05}-{number:04}", data, samples))
    return groups


def fill(rollout: RolloutManager, settings: Settings, record: Record, step: int) -> None:
    """Generates and judges the groups of a step, and puts them into the buffer."""
    with record.phase("generate"):
        groups = rollout.generate(new_groups(settings, step), SAMPLING)
    with record.phase("reward"):
        for group in groups:
            for sample in group.samples:
                sample.reward = task.reward(
                    task.Prompt(tuple(sample.prompt_ids), group.data["answer"]), sample.output_ids
                )
                record.tokens += len(sample.output_ids)
    rollout.buffer.put(groups)


def generated(rollout: RolloutManager, settings: Settings, record: Record) -> Iterator[list[SampleGroup]]:
    """A batch per step, made when it is asked for."""
    for step in range(settings.steps):
        fill(rollout, settings, record, step)
        yield rollout.buffer.take(settings.prompts)


def generated_ahead(rollout: RolloutManager, settings: Settings, record: Record) -> Iterator[list[SampleGroup]]:
    """The same while the trainer works, never more than ``max_staleness`` versions behind it."""
    learnt = threading.Semaphore(settings.max_staleness + 1)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for step in range(settings.steps):
                learnt.acquire()
                fill(rollout, settings, record, step)
        except BaseException as error:
            failed.append(error)
            rollout.buffer.close()

    thread = threading.Thread(target=work, name="generator", daemon=True)
    thread.start()
    for _ in range(settings.steps):
        with record.phase("wait for rollouts"):
            try:
                groups = rollout.buffer.take(settings.prompts)
            except Exception:
                if failed:
                    raise failed[0] from None
                raise
        yield groups
        learnt.release()
    thread.join()


def shares(groups: list[SampleGroup], ranks: int) -> list[list[SampleGroup]]:
    """A batch in parts, one per rank."""
    return [groups[rank::ranks] for rank in range(ranks)]


def mean_reward(groups: list[SampleGroup]) -> float:
    """Over all samples."""
    rewards = [sample.reward or 0.0 for group in groups for sample in group.samples]
    return sum(rewards) / len(rewards)


# One half alone --------------------------------------------------------------------------------


def only_generate(job: RunningJob, settings: Settings, console: Console) -> int:
    """Without a trainer: generates with the first weights, and saves the rollouts."""
    record = Record()
    kept = DataBuffer(settings.steps * settings.prompts)
    rollout = job.rollout
    with Shown(console, settings.steps) as progress:
        for groups in generated(rollout, settings, record):
            kept.put(groups)
            rollout.buffer.confirm([group.id for group in groups])
            record.rewards.append(mean_reward(groups))
            progress.show(record)
    kept.save(settings.rollouts)
    console.print(f"\n{kept.stats()['waiting']} groups of rollouts are in {settings.rollouts}")
    return 0


def only_train(job: RunningJob, settings: Settings, console: Console) -> int:
    """Without engines: learns from rollouts that were saved."""
    record = Record()
    saved = DataBuffer(1_000_000)
    saved.load(settings.rollouts)
    steps = min(settings.steps, saved.stats()["waiting"] // settings.prompts)
    train = job.train
    init_trainer(train, settings)
    with Shown(console, steps) as progress:
        for _ in range(steps):
            groups = saved.take(settings.prompts)
            with record.phase("train"):
                train.train(PerRank(shares(groups, train.world_size)))
            saved.confirm([group.id for group in groups])
            record.rewards.append(mean_reward(groups))
            progress.show(record)
    console.print(f"\nlearnt from {steps} saved batches of {settings.rollouts}")
    return 0


# What is seen ------------------------------------------------------------------------------------


class Shown:
    """A progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._started = time.perf_counter()
        columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = self._bar.add_task("", total=steps) if self._bar else None

    def __enter__(self) -> Shown:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, record: Record) -> None:
        """Says where the run is."""
        done = len(record.rewards)
        passed = time.perf_counter() - self._started
        phases = ", ".join(
            f"{name} {1000 * seconds / done:.0f}" for name, seconds in record.seconds.items() if name != "start"
        )
        text = f"reward {record.rewards[-1]:.2f}, {record.tokens / passed:,.0f} tokens/s, ms per step: {phases}"
        if self._bar:
            self._bar.update(self._task, completed=done, description=text)
        elif done in (1, self._steps) or done % 10 == 0:
            self._console.print(f"step {done}/{self._steps}: {text}", soft_wrap=True, highlight=False)


def show(record: Record, settings: Settings, console: Console) -> None:
    """The curve of rewards, and where the time went."""
    console.print()
    console.print(draw_curve(record.rewards, label="mean reward"), highlight=False)
    console.print()
    total = sum(record.seconds.values())
    for name, seconds in record.seconds.items():
        console.print(f"{name:>20} {seconds:7.1f} s  {100 * seconds / total:3.0f} %", highlight=False)
    lag = max((step - version + 1 for step, version in enumerate(record.versions)), default=0)
    console.print(f"{'staleness':>20} {lag} versions at most", highlight=False)
    console.print(f"{'checksum':>20} {record.checksum & 0xFFFFFFFFFFFF:012x} (seed {settings.seed})", highlight=False)

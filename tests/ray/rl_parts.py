"""A tiny model, trainers and engines that tell what they have: for the tests of the RL roles."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roost.data.samples import Sample, SampleGroup
from roost.engines.engine import Engine, EngineOutput, EnginePlace
from roost.engines.handles import EngineHandle
from roost.engines.keys import VARIABLE, headers_of
from roost.engines.torch.engine import TorchEngine
from roost.plan import TensorShards
from roost.rl.rollout import RolloutManager
from roost.rl.train import TrainWorker

HERE = Path(__file__).parent
SERVED_KEY = "the-key-of-an-engine-elsewhere"
VOCABULARY = 32
BRAKED_S = 0.25
"""Seconds of a step of a model while its brake is on."""
CUT = {"embed.weight": 1, "head.weight": 1, "scale": 0}
"""Tensors that tensor-parallel ranks cut, and along which dimension."""


class Model(torch.nn.Module):
    """A language model that looks at one token. It has tensors of several kinds, also such as nobody uses.

    Its brake is a file. While it is there, each step takes long, and begins with a byte that is added to the file.
    """

    def __init__(self, width: int = 6, delay_s: float = 0.0, brake: str = "") -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.head = torch.nn.Linear(width, VOCABULARY)
        self.scale = torch.nn.Parameter(torch.ones(width, 3, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self._delay_s = delay_s
        self._brake = brake

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(self._delay_s)
        if self._brake and os.path.exists(self._brake):
            with suppress(FileNotFoundError):  # it was released just now
                file = os.open(self._brake, os.O_WRONLY | os.O_APPEND)
                os.write(file, b".")
                os.close(file)
            time.sleep(BRAKED_S)
        return self.head(self.embed(ids))


@contextmanager
def braked(brake: Path) -> Iterator[None]:
    """Put on the brake of all models that have this one: what is in flight then stays in flight for a while."""
    brake.touch()
    try:
        yield
    finally:
        brake.unlink()


def seeded(seed: int = 7, **arguments: Any) -> Model:
    """The same model everywhere."""
    torch.manual_seed(seed)
    return Model(**arguments)


def sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Shape, dtype and the bits of each tensor."""
    found: dict[str, list[Any]] = {}
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        bits = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        found[name] = [list(tensor.shape), str(tensor.dtype), hashlib.sha256(bits).hexdigest()]
    return found


def cut(tensors: Mapping[str, torch.Tensor], index: int, count: int) -> dict[str, torch.Tensor]:
    """The part of each tensor that one of so many tensor-parallel ranks has."""
    return {
        name: tensor.chunk(count, CUT[name])[index].contiguous() if name in CUT else tensor
        for name, tensor in tensors.items()
    }


def cut_shards(tensors: Mapping[str, torch.Tensor]) -> list[TensorShards]:
    return [
        TensorShards(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), CUT.get(name))
        for name, tensor in tensors.items()
    ]


# Trainers ---------------------------------------------------------------------------------------


class Trainer(TrainWorker):
    """Trains by adding numbers, the same on every rank."""

    hook: tuple[Any, ...] = ()
    stopped = ""
    names: Mapping[str, str] = {}

    def init(self, seed: int = 7, width: int = 6, **kinds: str) -> str:
        self.names = {}
        self.model = seeded(seed, width=width)
        for name, kind in kinds.items():
            setattr(self.model, name, torch.nn.Parameter(getattr(self.model, name).to(getattr(torch, kind))))
        return self.device.type

    def train(self, amount: float) -> float:
        """Changes every tensor; returns the sum over all ranks of what they were given."""
        assert self.model is not None
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.add_(torch.sin(torch.arange(parameter.numel()) + number).view_as(parameter) * 0.1)
            self.model.head.bias[0] = float("nan")  # bits, not numbers, are compared
            self.model.head.bias[0] = -1.5
            self.model.steps += 1
            self.model.mask[int(self.model.steps) % 5] ^= True
        total = torch.tensor([abs(amount)])
        dist.all_reduce(total)
        if amount < 0:
            raise ValueError(f"{amount} is too little")
        return total.item()

    def eval(self, name: str = "") -> tuple[int, str]:
        return self.rank, name

    def set_hook(self, rank: int, *hook: Any) -> None:
        """What happens the next time that this rank is asked for its weights."""
        if self.rank == rank:
            self.hook = hook

    def weights(self) -> Mapping[str, torch.Tensor]:
        hook, self.hook = self.hook, ()
        if hook and hook[0] == "raise":
            raise LookupError("no weights to be found")
        if hook and hook[0] == "kill":
            os.kill(hook[1] or os.getpid(), signal.SIGKILL)
            if hook[1]:
                time.sleep(0.5)
        return {self.names.get(name, name): tensor for name, tensor in super().weights().items()}

    def await_stop(self, flag: str) -> str:
        """Waits as a broadcast does; returns why that was given up."""
        Path(flag).touch()
        while not self.stopped:
            time.sleep(0.01)
        return self.stopped

    def stop_broadcasts(self, reason: str) -> None:
        super().stop_broadcasts(reason)
        self.stopped = reason

    def rename(self, name: str, other: str) -> None:
        self.names = {name: other}

    def sums(self) -> dict[str, list[Any]]:
        assert self.model is not None
        return sums(self.model.state_dict())

    def where(self) -> dict[str, Any]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
        return {
            "pid": os.getpid(),
            "address": self.address,
            "accelerator": (self.cluster_node_rank, self.local_accelerator_rank),
            **{name: os.environ.get(name) for name in names},
        }


class SlicedTrainer(Trainer):
    """Each rank has its slices of the tensors, and no others."""

    tensor_parallel = 2

    def init(self, seed: int = 7) -> str:
        whole = seeded(seed)
        own = cut(whole.state_dict(), self.rank % 2, 2)
        self.whole_shards = cut_shards(whole.state_dict())
        self.model = seeded(seed)
        for name in CUT:
            module, _, attribute = name.rpartition(".")
            target = self.model.get_submodule(module) if module else self.model
            setattr(target, attribute, torch.nn.Parameter(own[name].clone()))
        return self.device.type

    def shards(self) -> Sequence[TensorShards]:
        return self.whole_shards

    def parts(self) -> dict[str, torch.Tensor]:
        assert self.model is not None
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def whole_sums(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, list[Any]]:
    """The bits of what two tensor-parallel ranks have together."""
    return sums(
        {
            name: torch.cat([part[name] for part in parts[:2]], CUT[name]) if name in CUT else parts[0][name]
            for name in parts[0]
        }
    )


# Engines ----------------------------------------------------------------------------------------


class Telling:
    """What an engine tells of itself: through its log, and where it serves, ``/get_server_info``."""

    place: EnginePlace | None = None

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def told(self) -> dict[str, Any]:
        place = self.place
        return {
            "pid": os.getpid(),
            "version": self.version,
            "sums": sums(self.tensors()),
            "place": {
                "name": place.name, "engine": place.engine, "member": place.member, "host": place.host,
                "ports": [place.server_port, place.nccl_port, *place.ports], "accelerators": list(place.accelerators),
                "dist_init_addr": place.dist_init_addr, "run": len(place.ports),
            } if place else None,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }  # fmt: skip

    def logs(self) -> str:
        return json.dumps(self.told())


class Talker(Telling, TorchEngine):
    """Serves the model. It dies of a version, or does not start, where its folder says so."""

    def __init__(self, folder: str = "", **arguments: Any) -> None:
        super().__init__(lambda: seeded(**arguments), context=256, batch_rows=4)
        self._folder = folder

    def tensors(self) -> Mapping[str, torch.Tensor]:
        held = self._module.state_dict() if self._module is not None else {}
        return {name: held[name] for name in self.describe_weights()} if held else {}

    def start(self, place: EnginePlace) -> str:
        self.place = place
        if os.path.exists(f"{self._folder}/{place.name}-stays-down"):
            raise LookupError("no luck today")
        return super().start(place)

    def info(self) -> dict[str, Any]:
        return {**super().info(), **self.told()}

    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        if self.place is not None and os.path.exists(f"{self._folder}/{self.place.name}-dies-of-{version}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.place is not None and os.path.exists(f"{self._folder}/{self.place.name}-refuses-{version}"):
            raise LookupError(f"{version} is an unlucky number")
        super().load_weights(named, version)


class Pair(Telling, Engine):
    """An engine of several members, each with its slices; they meet, and add up what they have."""

    def __init__(self) -> None:
        self.total = 0.0
        self._tensors: dict[str, torch.Tensor] = {}

    def start(self, place: EnginePlace) -> str:
        self.place = place
        self.tensor_parallel = place.num_members
        self._whole = seeded().state_dict()
        self._tensors = cut(self._whole, place.member, place.num_members)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"tcp://{place.dist_init_addr}", rank=place.member, world_size=place.num_members
        )
        value = torch.tensor([10.0**place.member])
        dist.all_reduce(value)
        self.total = value.item()
        return super().start(place)

    def told(self) -> dict[str, Any]:
        return {**super().told(), "total": self.total}

    def describe_weights(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        }

    def shards(self) -> list[TensorShards]:
        return cut_shards(self._whole)

    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        with self.lock:
            assert set(named) == set(self._tensors)
            for name, tensor in named.items():
                assert tensor.shape == self._tensors[name].shape
                self._tensors[name].copy_(tensor)
            self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]) -> list[EngineOutput]:
        count = int(params.get("max_new_tokens", 1))
        one = EngineOutput([1] * count, [0.0] * count, [self.version] * count, "length")
        return [one for _ in prompts for _ in range(int(params.get("n") or 1))]


class Sick(Talker):
    """Starts, and never gets healthy."""

    def health(self) -> str:
        self.log.warning("the fever is %d", 41)
        return "it has a fever"

    def logs(self) -> str:
        return TorchEngine.logs(self)


class Polite(Talker):
    """Says in a file of its folder that it was stopped."""

    def stop(self) -> None:
        super().stop()
        Path(self._folder, "said").write_text("stopped")


class Stillborn(Talker):
    """Does not start on its last member; the others would wait for it."""

    def start(self, place: EnginePlace) -> str:
        if place.member == place.num_members - 1:
            raise LookupError("no model to be found")
        time.sleep(600)
        return ""


def told(engine: Any, member: int = 0) -> dict[str, Any]:
    """What a member of an engine tells of itself."""
    if isinstance(engine, EngineHandle):
        return dict(json.loads(engine.call(member, "logs")[0].wait(120)[0]))
    return asked(engine)


def asked(engine: Any) -> dict[str, Any]:
    """What an engine says where it serves."""
    request = urllib.request.Request(f"{engine.url}/get_server_info", headers=headers_of(engine.key))  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        return dict(json.loads(answer.read()))


def served() -> Engine:
    """For ``python -m roost.engines.serve rl_parts:served``."""
    return Talker()


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[str]:
    """An engine by itself, outside of any job, with the key ``SERVED_KEY``; its URL."""
    log = folder / "served.log"
    with log.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "roost.engines.serve", "rl_parts:served", "--port", str(port)],
            cwd=HERE,
            env={**os.environ, VARIABLE: SERVED_KEY},
            stderr=file,
            stdout=file,
        )
    try:
        deadline = time.monotonic() + 200
        while "ready" not in log.read_text():
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield next(line.split()[1] for line in log.read_text().splitlines() if line.startswith("ready"))
    finally:
        child.terminate()
        child.wait(60)


# Samples ----------------------------------------------------------------------------------------


def new_groups(count: int, samples: int = 2, first: int = 0, name: str = "g") -> list[SampleGroup]:
    return [
        SampleGroup(f"{name}{i}", {"seed": i}, [Sample([1, 2, i % VOCABULARY], index=j) for j in range(samples)])
        for i in range(first, first + count)
    ]


def tokens(groups: Sequence[SampleGroup]) -> list[list[list[int]]]:
    return [[sample.output_ids for sample in group.samples] for group in groups]


def check_complete(groups: Sequence[SampleGroup], ids: Sequence[str], samples: int, length: int) -> None:
    """None lost, none doubled, and every token says its version."""
    assert [group.id for group in groups] == list(ids)
    for group in groups:
        assert [sample.index for sample in group.samples] == list(range(samples))
        for sample in group.samples:
            assert sample.finish_reason == "length"
            assert len(sample.output_ids) == len(sample.logprobs) == len(sample.versions) == length


class Started:
    """Something that runs in a thread; ``result()`` waits for it."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._error: list[BaseException] = []

        def run() -> None:
            try:
                self._found.append(action())
            except BaseException as error:
                self._error.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self, timeout_s: float = 240.0) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "it did not end"
        if self._error:
            raise self._error[0]
        return self._found[0]


def running(engine: Any) -> int:
    """How many samples an engine computes just now."""
    return int(asked(engine)["num_running_samples"])


def routed(manager: RolloutManager) -> list[str]:
    """The engines that the router lists."""
    return sorted(worker.url for worker in manager._hub.router("workers").wait()[0])

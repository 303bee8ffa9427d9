"""What an inference engine must be able to do to serve a job.

Three methods are enough: ``generate``, ``describe_weights`` and ``load_weights``. Everything else has a
default: an HTTP server in SGLang's format in front of ``generate``, a gate that pauses, and logs.
"""

from __future__ import annotations

import abc
import collections
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from roost.engines.keys import make_key
from roost.errors import Finding, RolloutError, counted

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from roost.engines.server import EngineServer
    from roost.plan import TensorShards
    from roost.weights.aliasing import MemoryOwner
    from roost.weights.streams import WeightStream

__all__ = ["Engine", "EngineOutput", "EnginePlace", "WeightIntake"]

ENGINE_HEADER = "X-Roost-Engine"
"""The header in which an engine's server says its name; the router passes it on."""
LOG_LINES = 200
"""How many lines of its log an engine remembers."""


Prompts: TypeAlias = Sequence[Sequence[int]]


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine lives, or one of its members where it spans several nodes.

    Attributes:
        name: Name of the engine group.
        engine: Index of the engine in the group.
        member: Index of this member; member 0 serves HTTP and takes the weights.
        num_members: How many there are.
        host: Address of this node.
        server_port: A leased port for its server; 0: the engine leases one itself.
        nccl_port: A leased port for its collectives.
        dist_init_addr: ``host:port`` on the node of member 0, where all members meet.
        ports: The consecutive run of leased ports for distributed initialisation.
        accelerators: Ids of the accelerators that it sees.
        device: ``cpu``, or its first accelerator, such as ``cuda:0``.
        gpu_share: The part of each of its accelerators that the plan gives it; 1.0 where it does not say.
        transport: How the plan wants its weights to come, such as ``ipc``; empty where it does not say.
        key: What its server asks every request for, except ``/health``; by default a new one.
    """

    name: str = "engine"
    engine: int = 0
    member: int = 0
    num_members: int = 1
    host: str = "127.0.0.1"
    server_port: int = 0
    nccl_port: int = 0
    dist_init_addr: str = ""
    ports: range = range(0)
    accelerators: tuple[int | str, ...] = ()
    device: str = "cpu"
    gpu_share: float = 1.0
    transport: str = ""
    key: str = field(default_factory=make_key, repr=False, compare=False)

    @property
    def log_name(self) -> str:
        """What the log of its server is called after."""
        member = f"-{self.member}" if self.num_members > 1 else ""
        return f"{self.name}-{self.engine}{member}"

    def share_text(self) -> str:
        """What the plan gives it of each GPU, for errors."""
        text = f"the plan gives it {self.gpu_share:.0%} of {counted(max(1, len(self.accelerators)), 'GPU')}"
        if self.device != "cpu":
            import torch

            total = torch.cuda.get_device_properties(0).total_memory / 2**30
            text += f", {total * self.gpu_share:.1f} of {total:.1f} GiB each"
        return text


class WeightIntake(Protocol):
    """How the processes of an engine take weights by themselves; see :meth:`Engine.intake`."""

    def receive(self, version: int) -> None:
        """Makes ready for a version; what is served does not change."""

    def commit(self, version: int) -> None:
        """Changes over to it."""

    def close(self) -> None:
        """Lets go of everything that belongs to the trainer."""


@dataclass
class EngineOutput:
    """One sample.

    Attributes:
        output_ids: The tokens that were generated; a stop token is among them.
        logprobs: Log probability of each, in the distribution that it was drawn from.
        versions: Version of the weights that made each.
        finish_reason: ``stop``, ``length`` or ``abort``.
        prompt_tokens: Length of its prompt.
    """

    output_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    prompt_tokens: int = 0

    def to_wire(self, rid: str, version: int, return_logprob: bool = True) -> dict[str, Any]:
        """The object that SGLang's servers answer with; ``version`` stands where no token was made."""
        finish: dict[str, Any] = {"type": self.finish_reason}
        if self.finish_reason == "length":
            finish["length"] = len(self.output_ids)
        elif self.finish_reason == "stop" and self.output_ids:
            finish["matched"] = self.output_ids[-1]
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.output_ids),
            "weight_version": str(self.versions[-1] if self.versions else version),
            "weight_versions": self.versions,
        }
        if return_logprob:
            pairs = zip(self.logprobs, self.output_ids, strict=False)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        return {"output_ids": self.output_ids, "meta_info": meta}

    @classmethod
    def from_wire(cls, answer: Mapping[str, Any]) -> EngineOutput:
        """Reads such an object; also of a server that knows one version for all tokens only."""
        meta = answer.get("meta_info") or {}
        tokens = [int(token) for token in answer.get("output_ids") or ()]
        finish = meta.get("finish_reason") or {}
        reason = finish.get("type", "") if isinstance(finish, Mapping) else str(finish)
        versions = meta.get("weight_versions")
        if versions is None:
            said = str(meta.get("weight_version", "0"))
            versions = [int(said) if said.isdigit() else 0] * len(tokens)
        logprobs = [float(row[0]) for row in meta.get("output_token_logprobs") or ()]
        return cls(tokens, logprobs, list(versions), reason, int(meta.get("prompt_tokens") or 0))


class Engine(abc.ABC):
    """An inference engine; one object per member, in a process of its own.

    Attributes:
        version: Of the weights that it serves; 0 is what it started with.
        tensor_parallel: How many of its ranks share each tensor that :meth:`shards` says is cut.
        broadcast: The backend with which its own processes join the trainer's broadcast, ``nccl`` or ``gloo``; empty
            if they do not, and the weights come to :meth:`load_weights`.
        broadcast_sender: ``module:Class`` of the trainer's end of that broadcast, a
            :class:`roost.weights.endpoints.Sender`; the trainer's processes import it.
        broadcast_ranks: How many of its processes join.
        aliases_weights: Whether it uses :meth:`alias_weights` where it can.
        takes_pieces: Whether :meth:`intake` reads tensors of which each stream has a part; those that do not
            join no broadcast of parts, and get none by CUDA IPC.
    """

    version: int = 0
    tensor_parallel: int = 1
    broadcast: str = ""
    broadcast_sender: str = ""
    broadcast_ranks: int = 1
    takes_pieces: bool = True
    aliases_weights: bool = False

    _parts: _Parts

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        engine = super().__new__(cls)
        engine._parts = _Parts()  # here, so that subclasses need not call super().__init__()
        return engine

    # What every engine has to say ------------------------------------------------------------

    @abc.abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]) -> list[EngineOutput]:
        """Samples for prompts: ``params["n"]`` (or one) for the first, then for the second, and so on.

        The default server calls it from one thread at a time, and holds :attr:`lock` meanwhile.

        Args:
            prompts: Token ids.
            params: SGLang's sampling parameters. A seed stands under ``sampling_seed`` or ``seed``.
        """

    @abc.abstractmethod
    def describe_weights(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype name (such as ``float32``) of each tensor that :meth:`load_weights` wants."""

    @abc.abstractmethod
    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        """Takes new weights, all at once between two generation steps, and sets :attr:`version`.

        Copy what you keep: the tensors may be memory that is used for something else afterwards. As long as
        the trainer sends the same tensors, the same mapping comes again, with new values in its tensors.
        ``with self.lock:`` keeps :meth:`generate` out.
        """

    # What has a default ------------------------------------------------------------------------

    def start(self, place: EnginePlace) -> str:
        """Starts serving. Returns the base URL for member 0, and nothing for the others.

        It may return before the engine is healthy. By default: an HTTP server in this process.
        """
        if place.member:
            return ""
        from roost.engines.server import EngineServer

        name = f"{place.name}/{place.engine}"
        self._parts.server = EngineServer(self, place.host, place.server_port, name, key=place.key)
        return self._parts.server.start()

    def shards(self) -> list[TensorShards]:
        """How its ranks have cut the tensors; by default each is whole."""
        from roost.plan import TensorShards

        return [TensorShards(name, shape, dtype) for name, (shape, dtype) in self.describe_weights().items()]

    def intake(
        self, streams: Sequence[WeightStream], addresses: Mapping[str, Any], rank: int, host: str, timeout_s: float
    ) -> WeightIntake | None:
        """For engines whose own processes read what trainers send; by default :meth:`load_weights` gets it.

        Args:
            streams: What this member reads.
            addresses: Where each is found, by its id.
            rank: Rank of this member among all receivers.
            host: Address of this node.
            timeout_s: How long the other ends are waited for.
        """
        return None

    def read_weights(self, folder: str | Path) -> Mapping[str, torch.Tensor]:
        """The weights of a folder, by the names of :meth:`load_weights`; by default of safetensors files."""
        from roost.weights.checkpoint import read_checkpoint

        return read_checkpoint(folder)

    def alias_weights(self, named: Mapping[str, torch.Tensor], version: int, owner: MemoryOwner) -> None:
        """As :meth:`load_weights`, for engines that compute with these tensors themselves, and copy nothing.

        The memory is the trainer's, on the same GPU: it is not to be used where ``owner.is_alive()`` is not
        true, nor after :meth:`forget_sources`. After that the same version may come again.
        """
        if version != self.version:
            self.load_weights(named, version)

    def forget_sources(self) -> None:  # noqa: B027
        """Lets go of every tensor that :meth:`load_weights` or :meth:`alias_weights` was given."""

    def health(self) -> str:
        """Nothing when healthy, else what is missing. A paused engine is healthy: it holds requests."""
        return ""

    def ended(self) -> str:
        """Why it can never serve again, such as that its own server died; nothing while it may.

        The process that it lives in ends then, so that it is found dead and can be started again.
        """
        return ""

    def submit(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any], rid: str = ""
    ) -> Future[list[EngineOutput]]:
        """Starts :meth:`generate`; the server's way in. Cancelling the future drops the request.

        Engines that batch requests themselves override it.

        Raises:
            RolloutError: Where the request cannot be served.
        """
        return self._parts.pool().submit(self._parts.run, self.generate, prompts, params)

    def pause(self, mode: str = "wait") -> None:
        """Holds new requests, and returns when nothing is generated any more.

        Args:
            mode: ``wait`` finishes what runs. ``abort`` returns what there is of it, with the finish
                reason ``abort``, where the engine can; by default it waits too.
        """
        check_mode(mode)
        self._parts.may_run.clear()
        with self.lock:
            pass

    def resume(self) -> None:
        """Lets requests go on."""
        self._parts.may_run.set()

    def abort(self, rid: str = "") -> None:  # noqa: B027
        """Ends a request, or with no name all of them, with what there is of it; by default nothing."""

    def offload(self) -> None:  # noqa: B027
        """Frees the memory of the accelerators; requests are held until :meth:`onload`."""

    def onload(self) -> None:  # noqa: B027
        """Takes that memory again."""

    def info(self) -> dict[str, Any]:
        """More for ``/get_server_info``: sizes, limits, load."""
        return {}

    def logs(self) -> str:
        """The last lines of its log, for errors."""
        return "\n".join(_ring.lines)

    def stop(self) -> None:
        """Ends everything that was started. Safe to call twice."""
        self._parts.stop()

    @property
    def lock(self) -> threading.RLock:
        """Held by the default server while :meth:`generate` runs."""
        return self._parts.lock

    @property
    def log(self) -> logging.Logger:
        """Where to log: :meth:`logs` shows it."""
        return _logger


Generate: TypeAlias = Callable[[Prompts, Mapping[str, Any]], list[EngineOutput]]


class _Parts:
    """What the defaults of an engine need."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.may_run = threading.Event()
        self.may_run.set()
        self.server: EngineServer | None = None
        self.is_stopped = False
        self._pool: ThreadPoolExecutor | None = None
        self._making = threading.Lock()

    def pool(self) -> ThreadPoolExecutor:
        with self._making:
            if self.is_stopped:
                raise stopped()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")
            return self._pool

    def run(self, generate: Generate, prompts: Prompts, params: Mapping[str, Any]) -> list[EngineOutput]:
        while True:
            self.may_run.wait()
            with self.lock:
                if self.is_stopped:
                    raise stopped()
                if self.may_run.is_set():  # not paused since
                    return generate(prompts, params)

    def stop(self) -> None:
        with self._making:
            self.is_stopped = True
            pool, self._pool = self._pool, None
        self.may_run.set()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        if self.server is not None:
            self.server.stop()
            self.server = None


def check_mode(mode: str) -> None:
    """Refuses a mode of pausing that there is not."""
    if mode not in ("wait", "abort"):
        message = f"{mode!r} is no way to pause an engine"
        raise RolloutError([Finding("E101", message, rule="known modes: wait, abort")])


def url_of(host: str, port: int) -> str:
    """The base URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def stopped() -> RolloutError:
    """The error of requests that an engine leaves behind when it is stopped."""
    return RolloutError([Finding("E105", "the engine was stopped")])


class _Ring(logging.Handler):
    """Remembers the last lines, beside whatever else happens to them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        if not logging.getLogger().handlers and logging.lastResort and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)  # as if this handler were not there


_logger = logging.getLogger("roost.engines.engine")
_ring = _Ring()
_logger.addHandler(_ring)
_logger.setLevel(logging.INFO)

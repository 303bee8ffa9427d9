"""The contract of inference engines: the methods that an engine implements to serve a job.

Three methods are enough: ``generate``, ``describe_weights`` and ``load_weights``. Everything else has a
default: an HTTP server in SGLang's format in front of ``generate``, pausing, and logs.
"""

from __future__ import annotations

import abc
import collections
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

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
"""The response header with the engine's name; the router passes it on."""
LOG_LINES = 200
"""Number of recent log lines that an engine keeps."""


Prompts: TypeAlias = Sequence[Sequence[int]]


@dataclass(frozen=True)
class EnginePlace:
    """The node, ports and accelerators of an engine, or of one member of an engine that spans several nodes.

    Attributes:
        name: Name of the engine's component.
        engine: Index of the engine in the component.
        member: Index of this member; member 0 serves HTTP and receives the weights.
        num_members: Number of members of the engine.
        host: Address of this node.
        server_port: Leased port for the HTTP server; 0: the engine leases one itself.
        nccl_port: Leased port for the engine's collectives.
        dist_init_addr: ``host:port`` on the node of member 0, for the rendezvous of all members.
        ports: Consecutive leased ports for distributed initialisation.
        accelerators: Ids of the accelerators that are visible to this member.
        device: ``cpu``, or the first visible accelerator, such as ``cuda:0``.
        gpu_share: Share of each accelerator that the plan assigns to the engine; 1.0 if the plan has no share.
        transport: The plan's transport for weights, such as ``ipc``; empty if the plan has none.
        key: The server's key, which every request except ``GET /health`` must present; by default a new one.
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
        """Base name of the server's log file."""
        member = f"-{self.member}" if self.num_members > 1 else ""
        return f"{self.name}-{self.engine}{member}"

    def share_text(self) -> str:
        """Return the share of each GPU that the plan assigns, as text for errors."""
        text = f"the plan gives it {self.gpu_share:.0%} of {counted(max(1, len(self.accelerators)), 'GPU')}"
        if self.device != "cpu":
            import torch

            total = torch.cuda.get_device_properties(0).total_memory / 2**30
            text += f", {total * self.gpu_share:.1f} of {total:.1f} GiB each"
        return text


class WeightIntake(Protocol):
    """Reads weights in the engine's own processes; see :meth:`Engine.intake`."""

    def receive(self, version: int) -> None:
        """Prepare a version; the engine keeps serving the version before."""

    def commit(self, version: int) -> None:
        """Switch the engine to the version."""

    def close(self) -> None:
        """Release all memory and connections of the trainer."""


@dataclass
class EngineOutput:
    """One generated sample.

    Attributes:
        output_ids: The generated tokens, including the stop token.
        logprobs: Log probability of each token in the distribution from which it was drawn.
        versions: Version of the weights that generated each token.
        finish_reason: ``stop``, ``length`` or ``abort``.
        prompt_tokens: Number of tokens of the prompt.
    """

    output_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    prompt_tokens: int = 0

    def to_wire(self, rid: str, version: int, return_logprob: bool = True) -> dict[str, Any]:
        """Return the JSON object of SGLang's ``/generate``; ``version`` is used if no token was generated."""
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
        """Read such an object; a server may also give one version for all tokens."""
        meta = answer.get("meta_info") or {}
        tokens = [int(token) for token in answer.get("output_ids") or ()]
        finish = meta.get("finish_reason") or {}
        reason = finish.get("type", "") if isinstance(finish, Mapping) else str(finish)
        versions = meta.get("weight_versions")
        if versions is None:
            text = str(meta.get("weight_version", "0"))
            versions = [int(text) if text.isdigit() else 0] * len(tokens)
        logprobs = [float(row[0]) for row in meta.get("output_token_logprobs") or ()]
        return cls(tokens, logprobs, list(versions), reason, int(meta.get("prompt_tokens") or 0))


EngineType = TypeVar("EngineType", bound="Engine")


class Engine(abc.ABC):
    """An inference engine; one object per member, each in its own process.

    Attributes:
        version: Version of the weights that the engine serves; 0 for those that it started with.
        tensor_parallel: Number of ranks over which each sharded tensor of :meth:`shards` is split.
        broadcast: Backend with which the engine's own processes join the trainer's broadcast, ``nccl`` or ``gloo``;
            empty if they do not join, and :meth:`load_weights` gets the weights.
        broadcast_sender: ``module:Class`` of the trainer's side of that broadcast, a
            :class:`roost.weights.endpoints.Sender`; the trainer's processes import it.
        broadcast_ranks: Number of the engine's processes that join.
        aliases_weights: Whether updates use :meth:`alias_weights` where possible.
        takes_pieces: Whether :meth:`intake` reads tensors that are split over several streams. If not, the engine's
            processes join no broadcast of split tensors, and get none by CUDA IPC.
    """

    version: int = 0
    tensor_parallel: int = 1
    broadcast: str = ""
    broadcast_sender: str = ""
    broadcast_ranks: int = 1
    takes_pieces: bool = True
    aliases_weights: bool = False

    _defaults: _DefaultState

    def __new__(cls: type[EngineType], *args: object, **kwargs: object) -> EngineType:  # noqa: D102
        engine = super().__new__(cls)
        engine._defaults = _DefaultState()  # here, so that subclasses need not call super().__init__()
        return engine

    # Every engine implements these -------------------------------------------------------------

    @abc.abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]) -> list[EngineOutput]:
        """Return samples for prompts: ``params["n"]`` (default 1) for the first prompt, then for the second, and so on.

        The default server calls it from one thread at a time, which holds :attr:`lock` during the call.

        Args:
            prompts: Token ids of each prompt.
            params: SGLang's sampling parameters. The key of the seed is ``sampling_seed`` or ``seed``.
        """

    @abc.abstractmethod
    def describe_weights(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and the dtype name (such as ``float32``) of each tensor that :meth:`load_weights` expects."""

    @abc.abstractmethod
    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new weights, all between the same two generation steps, and set :attr:`version`.

        Copy every tensor that you keep: its memory may be reused after the call. As long as the trainer sends the
        same tensors, each call gets the same mapping, with new values in its tensors. Use ``with self.lock:`` so that
        :meth:`generate` does not run meanwhile.
        """

    # These have a default ----------------------------------------------------------------------

    def start(self, place: EnginePlace) -> str:
        """Start serving. Return the base URL for member 0, and an empty string for the other members.

        May return before the engine is healthy. The default starts an HTTP server in this process.
        """
        if place.member:
            return ""
        from roost.engines.server import EngineServer

        name = f"{place.name}/{place.engine}"
        self._defaults.server = EngineServer(self, place.host, place.server_port, name, key=place.key)
        return self._defaults.server.start()

    def shards(self) -> list[TensorShards]:
        """Return how the engine's ranks have sharded the tensors; by default each tensor is whole."""
        from roost.plan import TensorShards

        return [TensorShards(name, shape, dtype) for name, (shape, dtype) in self.describe_weights().items()]

    def intake(
        self, streams: Sequence[WeightStream], addresses: Mapping[str, Any], rank: int, host: str, timeout_s: float
    ) -> WeightIntake | None:
        """Return how the engine's own processes read weights, or ``None``: then :meth:`load_weights` gets them.

        Args:
            streams: The streams that this member reads.
            addresses: Stream id → address of the sender.
            rank: Rank of this member among all receivers.
            host: Address of this node.
            timeout_s: Seconds to wait for the senders.
        """
        return None

    def read_weights(self, folder: str | Path) -> Mapping[str, torch.Tensor]:
        """Return the weights in a folder, by the names of :meth:`load_weights`; by default from safetensors files."""
        from roost.weights.checkpoint import read_checkpoint

        return read_checkpoint(folder)

    def alias_weights(self, named: Mapping[str, torch.Tensor], version: int, owner: MemoryOwner) -> None:
        """Compute with these tensors in place, without a copy; otherwise as :meth:`load_weights`.

        The memory belongs to the trainer, on the same GPU. Do not use it once ``owner.is_alive()`` is false, nor
        after :meth:`forget_sources`. After that call the same version may be sent again.
        """
        if version != self.version:
            self.load_weights(named, version)

    def forget_sources(self) -> None:  # noqa: B027
        """Drop all references to tensors that :meth:`load_weights` or :meth:`alias_weights` got."""

    def health(self) -> str:
        """Return why the engine cannot serve; empty if it is healthy. A paused engine, which holds requests, is healthy."""
        return ""

    def ended(self) -> str:
        """Return why the engine can never serve again, such as that its server died; empty while it still may.

        With a reason, the engine's worker process exits, so that the failure is detected and the engine restarted.
        """
        return ""

    def submit(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any], rid: str = ""
    ) -> Future[list[EngineOutput]]:
        """Start :meth:`generate` and return a future at once; the server calls this for each request.

        Cancelling the future drops the request. Engines that batch requests themselves override this method.

        Raises:
            RolloutError: The request cannot be served.
        """
        return self._defaults.pool().submit(self._defaults.run, self.generate, prompts, params)

    def pause(self, mode: str = "wait") -> None:
        """Hold new requests, and return when no request is running.

        Args:
            mode: ``wait`` lets running requests finish. ``abort`` ends them with the tokens so far and the finish
                reason ``abort``, if the engine can; the default implementation waits in both modes.
        """
        check_mode(mode)
        self._defaults.may_run.clear()
        with self.lock:
            pass

    def resume(self) -> None:
        """Let held requests run."""
        self._defaults.may_run.set()

    def abort(self, rid: str = "") -> None:  # noqa: B027
        """End a request with the tokens so far; with an empty ``rid`` end all requests. By default do nothing."""

    def offload(self) -> None:  # noqa: B027
        """Free the memory of the accelerators, and hold requests until :meth:`onload`."""

    def onload(self) -> None:  # noqa: B027
        """Take the memory of the accelerators again."""

    def info(self) -> dict[str, Any]:
        """Return further entries for ``/get_server_info``: sizes, limits, load."""
        return {}

    def logs(self) -> str:
        """Return the last lines of the engine's log, for errors."""
        return "\n".join(_recent.lines)

    def stop(self) -> None:
        """Stop everything that :meth:`start` started. Safe to call twice."""
        self._defaults.stop()

    @property
    def lock(self) -> threading.RLock:
        """Held by the default server while :meth:`generate` runs."""
        return self._defaults.lock

    @property
    def log(self) -> logging.Logger:
        """The engine's logger; :meth:`logs` returns its last lines."""
        return _logger


Generate: TypeAlias = Callable[[Prompts, Mapping[str, Any]], list[EngineOutput]]


class _DefaultState:
    """State of an engine's default methods: lock, pause, server and thread."""

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
                if self.may_run.is_set():  # no pause() came between the two lines above
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
    """Raise E101 for an unknown mode of :meth:`Engine.pause`."""
    if mode not in ("wait", "abort"):
        message = f"an engine cannot be paused with mode {mode!r}"
        raise RolloutError([Finding("E101", message, rule="known modes: wait, abort")])


def url_of(host: str, port: int) -> str:
    """Return the base URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def stopped() -> RolloutError:
    """Return the error of requests that an engine has not answered when it is stopped."""
    return RolloutError([Finding("E105", "the engine was stopped")])


class _RecentLines(logging.Handler):
    """Keeps the last log lines, and passes every record on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        if not logging.getLogger().handlers and logging.lastResort and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)  # Python skips it where any handler is installed, and this is one


_logger = logging.getLogger("roost.engines.engine")
_recent = _RecentLines()
_logger.addHandler(_recent)
_logger.setLevel(logging.INFO)

"""An engine for any causal language model that is a torch module.

One thread computes; requests join and leave its batch between two tokens. There is no cache of keys
and values: each token costs a forward pass over its whole sequence. That is slow for long texts, and
right for small models, for tests, and as the reference that other engines are compared with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from roost.errors import Finding, RolloutError, counted
from roost.rl.batching import Batcher, Request, Row
from roost.rl.engine import Engine, EngineOutput, EnginePlace, stopped
from roost.rl.sampling import check_request, uniform

__all__ = ["TorchEngine"]

DEFAULT_CONTEXT = 512


class TorchEngine(Engine):
    """Serves a causal language model given as a torch module.

    Args:
        factory: Makes the module. It takes token ids [rows, length], and returns logits [rows, length,
            vocabulary], or an object that has them as ``logits``. Positions see only those before them.
        device: Where it computes; by default where its place says.
        context: Longest sequence, prompt included; by default the ``max_position_embeddings`` of the
            module's ``config``, else 512.
        batch_rows: How many sequences are computed at once.
        length_multiple: Sequences are padded to multiples of it.
        is_invariant: Whether a sample must not depend on what else is computed. Then every forward pass
            has ``batch_rows`` rows, and only sequences of the same padded length share one. Otherwise
            there is one pass per token, as large as needed: faster, and a last bit may differ.
        threads: CPU threads of the computing thread; ``None`` leaves them as they are.
        version: Of the weights that the factory gives.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        device: str | None = None,
        context: int | None = None,
        batch_rows: int = 8,
        length_multiple: int = 64,
        is_invariant: bool = True,
        threads: int | None = 1,
        version: int = 0,
    ) -> None:
        for name, value in (
            ("batch_rows", batch_rows),
            ("length_multiple", length_multiple),
            ("context", context or 2),
        ):
            if value < (2 if name == "context" else 1):
                raise RolloutError([Finding("E109", f"TorchEngine: {name} cannot be {value}")])
        self._factory = factory
        self._device = torch.device(device) if device else None
        self._context = context
        self._rows = batch_rows
        self._multiple = length_multiple
        self._is_invariant = is_invariant
        self._threads = threads
        self.version = version

        self._batcher = Batcher(batch_rows)
        self._module: torch.nn.Module | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._loading = threading.Lock()

    # Starting and ending -------------------------------------------------------------------

    def start(self, place: EnginePlace) -> str:
        """Makes the module, tries it, and serves; see :meth:`Engine.start`."""
        if self._device is None:
            self._device = torch.device(place.device)
        self._load()
        return super().start(place)

    def _load(self) -> torch.nn.Module:
        """The module; the first call makes it and starts the thread that computes."""
        with self._loading:
            if self._batcher.is_closed:
                raise stopped()
            if self._module is None:
                self._device = self._device or torch.device("cpu")
                module = self._factory()
                if not isinstance(module, torch.nn.Module):
                    message = f"the factory of a TorchEngine returned {type(module).__name__}, not a torch module"
                    raise RolloutError([Finding("E109", message)])
                module = module.to(self._device).eval().requires_grad_(False)
                config = getattr(module, "config", None)
                if hasattr(config, "use_cache"):
                    config.use_cache = False  # nobody would look at it
                self._context = self._context or int(
                    getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT
                )
                self._tensors, self._aliases = _tensors_of(module)
                self._vocabulary = _try_out(module, self._device)
                self._module = module
                self._thread = threading.Thread(target=self._compute, name="torch-engine", daemon=True)
                self._thread.start()
                self.log.info(
                    "%s with %s on %s, context %d", type(module).__name__, counted(len(self._tensors), "tensor"),
                    self._device, self._context,
                )  # fmt: skip
            return self._module

    def stop(self) -> None:
        """Ends the thread and the server; requests that are left get an error."""
        self._batcher.close()
        if self._thread is not None:
            self._thread.join()
        super().stop()

    def health(self) -> str:
        """Nothing when the last step went well, else why not."""
        if self._batcher.is_closed:
            return "it was stopped"
        if self._module is None:
            return "its module is not loaded yet"
        if self._failure and not self._batcher.is_held:
            try:
                self._batcher.do(self._recover)
            except RolloutError as error:
                return str(error.findings[0])
        return self._failure

    def _recover(self) -> None:
        """After a step that failed: whether the module works at all, so that requests may come again."""
        if self._failure:
            _try_out(self._module, self._device)
            self._failure = ""

    def info(self) -> dict[str, Any]:
        """Sizes and load."""
        running, waiting = self._batcher.counts()
        return {
            "context_length": self._context,
            "max_running_requests": self._rows,
            "num_running_samples": running,
            "num_waiting_samples": waiting,
            "is_paused": self._batcher.is_paused,
            "is_offloaded": self._batcher.is_held,
        }

    # Requests ------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]) -> list[EngineOutput]:
        """Samples for prompts; see :meth:`Engine.generate`."""
        return self.submit(prompts, params).result()

    def submit(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any], rid: str = ""
    ) -> Future[list[EngineOutput]]:
        """Queues a request; see :meth:`Engine.submit`."""
        self._load()
        context = self._context or DEFAULT_CONTEXT
        read = check_request(prompts, params, self._vocabulary, context)
        request = Request(rid)
        for prompt in prompts:
            for _ in range(read.n):
                request.add(prompt, read, min(len(prompt) + read.max_new_tokens, context))
        return self._batcher.submit(request)

    def pause(self, mode: str = "wait") -> None:
        """Holds new requests, and returns when nothing runs.

        ``wait`` finishes the requests that have begun, and holds those that have not. ``abort`` answers
        everything that was accepted before, with what there is of it.
        """
        self._batcher.pause(mode)

    def resume(self) -> None:
        """Lets requests go on."""
        self._batcher.resume()

    def abort(self, rid: str = "") -> None:
        """Answers a request, or all, with what there is of it."""
        self._batcher.abort(rid)

    # Weights and memory --------------------------------------------------------------------

    def describe_weights(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Parameters and buffers as ``state_dict`` names them; of tied tensors the first name."""
        self._load()
        return {name: (tuple(tensor.shape), _dtype(tensor)) for name, tensor in self._tensors.items()}

    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        """Takes new weights between two tokens; everything is checked before anything is written.

        Raises:
            RolloutError: Where names, shapes or dtypes differ (E102), or the version is not greater than
                the one that is served (E103).
        """
        self._load()
        given = self._check_weights(named)

        def copy() -> None:
            if version <= self.version:
                message = f"version {version} of the weights comes after version {self.version}"
                raise RolloutError([Finding("E103", message, rule="versions only grow")])
            for name, tensor in given.items():
                self._tensors[name].copy_(tensor)
            self.version = version

        self._batcher.do(copy)
        self.log.info("version %d", version)

    def _check_weights(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        problems: list[Finding] = []
        given: dict[str, torch.Tensor] = {}
        for name, tensor in named.items():
            canonical = self._aliases.get(name)
            if canonical is None:
                problems.append(Finding("E102", f"weights: the engine has no tensor {name!r}"))
                continue
            own = self._tensors[canonical]
            if tuple(tensor.shape) != tuple(own.shape):
                message = f"weights: {name} has shape {list(tensor.shape)}, and the engine's has {list(own.shape)}"
                problems.append(Finding("E102", message))
            elif tensor.dtype != own.dtype:
                message = f"weights: {name} is {_dtype(tensor)}, and the engine's is {_dtype(own)}"
                problems.append(Finding("E102", message))
            elif canonical in given and not torch.equal(given[canonical], tensor):
                message = (
                    f"weights: {name} and {canonical} are one tensor of the engine, and came with different values"
                )
                problems.append(Finding("E102", message))
            given[canonical] = tensor
        problems += [Finding("E102", f"weights: {name} is missing") for name in self._tensors if name not in given]
        if problems:
            raise RolloutError(problems)
        return given

    def offload(self) -> None:
        """Moves the module to the host; what runs goes on after :meth:`onload`."""
        self._move(is_offloaded=True)

    def onload(self) -> None:
        """Moves the module back."""
        self._move(is_offloaded=False)

    def _move(self, is_offloaded: bool) -> None:
        module = self._load()

        def move() -> None:
            if is_offloaded == self._batcher.is_held:
                return
            module.to("cpu" if is_offloaded else self._device)
            self._tensors, self._aliases = _tensors_of(module)
            self._batcher.hold(is_offloaded)
            if is_offloaded and self._device is not None and self._device.type == "cuda":
                torch.cuda.empty_cache()

        self._batcher.do(move)

    # The thread that computes --------------------------------------------------------------

    def _compute(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.no_grad():
            while (rows := self._batcher.next()) is not None:
                try:
                    drawn = [found for shared in self._passes(rows) for found in self._forward(shared)]
                except Exception as error:
                    self._failure = f"generating failed: {type(error).__name__}: {error}"
                    self.log.exception("generating failed")
                    self._batcher.fail(rows, RolloutError([Finding("E104", self._failure)]))
                else:
                    self._failure = ""
                    self._batcher.settle(drawn, self.version)

    def _passes(self, rows: list[Row]) -> list[list[Row]]:
        """The rows that share a forward pass."""
        if not self._is_invariant:
            return [rows]
        by_length: dict[int, list[Row]] = {}
        for row in rows:
            by_length.setdefault(self._padded(len(row.tokens)), []).append(row)
        return list(by_length.values())

    def _padded(self, length: int) -> int:
        return min(-(-length // self._multiple) * self._multiple, self._context or length)

    def _forward(self, rows: list[Row]) -> list[tuple[Row, int, float]]:
        """One token for each row."""
        height = self._rows if self._is_invariant else len(rows)
        ids = torch.zeros((height, self._padded(max(len(row.tokens) for row in rows))), dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row.tokens)] = torch.tensor(row.tokens)
        logits = _logits(self._module(ids.to(self._device)))
        last = torch.tensor([len(row.tokens) - 1 for row in rows], device=logits.device)
        return _draw(rows, logits[torch.arange(len(rows), device=logits.device), last].double())


def _draw(rows: list[Row], logits: torch.Tensor) -> list[tuple[Row, int, float]]:
    """A token for each row, by the inverse of its cumulative distribution at the row's own number.

    The log probability is that of the distribution that was drawn from, temperature included; at
    temperature 0 that of temperature 1.
    """
    device = logits.device
    heat = torch.tensor([row.params.temperature or 1.0 for row in rows], dtype=torch.float64, device=device)
    logprobs = torch.log_softmax(logits / heat[:, None], dim=-1)
    numbers = [uniform(row.params.seed, row.index, len(row.tokens)) for row in rows]
    reached = logprobs.exp().cumsum(dim=-1)
    # The last entry is 1 but for rounding.
    points = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None] * reached[:, -1:]
    sampled = torch.searchsorted(reached, points, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    is_greedy = torch.tensor([row.params.temperature == 0 for row in rows], device=device)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1), sampled)
    picked = logprobs.gather(1, tokens[:, None])[:, 0]
    if not bool(torch.isfinite(picked).all()):
        raise FloatingPointError("the module's logits are not finite")
    return list(zip(rows, tokens.tolist(), picked.tolist(), strict=True))


def _try_out(module: Any, device: torch.device | None) -> int:
    """Size of the vocabulary: what a module says of two tokens."""
    rule = "it must return logits [rows, length, vocabulary], or an object that has them as `logits`"
    try:
        with torch.no_grad():
            found = _logits(module(torch.zeros((1, 2), dtype=torch.long, device=device)))
    except Exception as error:
        message = f"the module of a TorchEngine fails on two tokens: {type(error).__name__}: {error}"
        raise RolloutError([Finding("E109", message, rule=rule)]) from error
    if not isinstance(found, torch.Tensor) or found.ndim != 3 or tuple(found.shape[:2]) != (1, 2):
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise RolloutError([Finding("E109", f"the module of a TorchEngine returned {shape} for [1, 2]", rule=rule)])
    return int(found.shape[-1])


def _logits(output: Any) -> Any:
    return output if isinstance(output, torch.Tensor) else getattr(output, "logits", output)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensors_of(module: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Its tensors by name, tied ones once; and for every name the one under which its tensor stands."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):  # and not something that a module keeps beside them
            key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())) if tensor.numel() else (name,)
            aliases[name] = seen.setdefault(key, name)
            if aliases[name] == name:
                tensors[name] = tensor.detach()
    return tensors, aliases

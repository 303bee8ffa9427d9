"""An engine for any causal language model that is a torch module.

One thread computes; requests join and leave its batch between two tokens. There is no KV cache: each token costs a
forward pass over its whole sequence. That is slow for long texts. The engine is meant for small models, for tests, and
as the reference with which other engines are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from roost.engines.engine import Engine, EngineOutput, EnginePlace, stopped
from roost.engines.sampling import check_request, uniform
from roost.engines.torch.batching import Batcher, GenerationRequest, Row
from roost.engines.torch.pretrained import Pretrained, is_pretrained, read_pretrained
from roost.engines.torch.weights import ModuleWeights
from roost.errors import Finding, RolloutError, counted
from roost.weights.aliasing import MemoryOwner

__all__ = ["TorchEngine"]

DEFAULT_CONTEXT = 512


class TorchEngine(Engine):
    """Serves a causal language model given as a torch module.

    Args:
        factory: Returns the module. The module takes token ids [rows, length] and returns logits [rows, length,
            vocabulary], or an object with such ``logits``. It must be causal.
        device: Device of the module; by default that of the engine's place.
        context: Maximum length of a sequence, prompt included; by default the ``max_position_embeddings`` of the
            module's ``config``, else 512.
        batch_rows: Number of sequences in a batch at most.
        length_multiple: Sequences are padded to multiples of this length.
        is_invariant: Make samples independent of other requests, bit by bit. Then every forward pass has
            ``batch_rows`` rows, and only sequences of the same padded length share one. Otherwise there is one pass
            per token, as large as needed: faster, but the last bits of log probabilities may differ.
        threads: CPU threads of the computing thread; ``None`` keeps torch's setting.
        version: Version of the weights that the factory returns.
        aliases_weights: Compute with the trainer's memory where trainer and engine share a GPU. An update then copies
            nothing, and the engine needs no memory for weights. Generate only while the trainer does not write them.
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
        aliases_weights: bool = False,
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
        self.aliases_weights = aliases_weights

        self._batcher = Batcher(batch_rows)
        self._module: torch.nn.Module | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._loading = threading.Lock()
        self._weights: ModuleWeights | None = None

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: str | torch.dtype | None = None, random_weights: bool = False, **options: Any
    ) -> TorchEngine:
        """Return an engine for a causal language model of transformers.

        Args:
            path: A directory as ``save_pretrained`` writes it. It is read when the engine starts, on the engine's
                node. Nothing is downloaded, and no code of the directory is run.
            dtype: dtype of the weights, such as ``bfloat16``; must be that of the trainer. By default that of the
                directory.
            random_weights: Serve random weights, the same on every engine. ``config.json`` is enough then.
            options: Further arguments of :class:`TorchEngine`.
        """
        return cls(Pretrained(str(path), dtype, random_weights), **options)

    # Starting and ending -------------------------------------------------------------------

    def start(self, place: EnginePlace) -> str:
        """Create the module, try it on two tokens, and serve; see :meth:`Engine.start`."""
        if self._device is None:
            self._device = torch.device(place.device)
        self._load()
        return super().start(place)

    def _load(self) -> torch.nn.Module:
        """Return the module. The first call creates it and starts the computing thread."""
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
                config: Any = getattr(module, "config", None)
                if hasattr(config, "get_text_config"):
                    config = config.get_text_config()  # of a multimodal model
                if hasattr(config, "use_cache"):
                    config.use_cache = False  # this engine would not use it
                self._context = self._context or int(
                    getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT
                )
                self._weights = ModuleWeights(module, self._device)
                self._vocabulary = _try_out(module, self._device)
                self._module = module
                self._thread = threading.Thread(target=self._compute, name="torch-engine", daemon=True)
                self._thread.start()
                self.log.info(
                    "%s with %s on %s, context %d", type(module).__name__, counted(len(self._weights.described), "tensor"),
                    self._device, self._context,
                )  # fmt: skip
            return self._module

    def _loaded(self) -> ModuleWeights:
        """Return the module's weights; create the module first if necessary."""
        self._load()
        if self._weights is None:
            raise stopped()
        return self._weights

    def stop(self) -> None:
        """Stop the thread and the server; unanswered requests get an error (E105)."""
        self._batcher.close()
        if self._thread is not None:
            self._thread.join()
        super().stop()

    def health(self) -> str:
        """Return why the last step failed; empty if it succeeded. After a failure, try the module again first."""
        if self._batcher.is_closed:
            return "it was stopped"
        if self._module is None:
            return "its module is not loaded yet"
        try:
            self._loaded().check_owner()
        except RolloutError as error:
            return error.findings[0].message
        if self._failure and not self._batcher.is_held:
            try:
                self._batcher.do(self._recover)
            except RolloutError as error:
                return str(error.findings[0])
        return self._failure

    def _recover(self) -> None:
        """Clear the failure of an earlier step if the module works on two tokens."""
        if self._failure:
            _try_out(self._module, self._device)
            self._failure = ""

    def info(self) -> dict[str, Any]:
        """Return sizes and load."""
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
        """Return samples for prompts; see :meth:`Engine.generate`."""
        return self.submit(prompts, params).result()

    def submit(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any], rid: str = ""
    ) -> Future[list[EngineOutput]]:
        """Queue a request; see :meth:`Engine.submit`."""
        self._loaded().check_owner()
        context = self._context or DEFAULT_CONTEXT
        read = check_request(prompts, params, self._vocabulary, context)
        request = GenerationRequest(rid)
        for prompt in prompts:
            for _ in range(read.n):
                request.add(prompt, read, min(len(prompt) + read.max_new_tokens, context))
        return self._batcher.submit(request)

    def pause(self, mode: str = "wait") -> None:
        """Hold new requests, and return when no request is running.

        ``wait`` finishes the requests that have begun, and holds the others. ``abort`` answers all requests that
        were accepted before, with their tokens so far.
        """
        self._batcher.pause(mode)

    def resume(self) -> None:
        """Let held requests run."""
        self._batcher.resume()

    def abort(self, rid: str = "") -> None:
        """Answer a request, or with an empty ``rid`` all requests, with the tokens so far."""
        self._batcher.abort(rid)

    # Weights and memory --------------------------------------------------------------------

    def describe_weights(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the parameters and buffers by their names in ``state_dict``; of tied tensors by the first name."""
        return dict(self._loaded().described)

    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new weights between two tokens. All tensors are checked before any is written.

        Raises:
            RolloutError: Names, shapes or dtypes differ (E102), or the version is not greater than the current
                one (E103).
        """
        weights = self._loaded()
        self._change(lambda: weights.copies(named).run(), version)

    def alias_weights(self, named: Mapping[str, torch.Tensor], version: int, owner: MemoryOwner) -> None:
        """Compute with these tensors in place from now on; see :meth:`Engine.alias_weights`."""
        weights = self._loaded()
        self._change(lambda: weights.alias(named, owner), version, may_be_same=True)  # after forget_sources()

    def _change(self, action: Callable[[], None], version: int, may_be_same: bool = False) -> None:
        """Change the weights between two tokens, and set the version."""

        def change() -> None:
            if version < self.version or (version == self.version and not may_be_same):
                message = f"version {version} of the weights comes after version {self.version}"
                raise RolloutError([Finding("E103", message, rule="versions only grow")])
            action()
            self.version = version

        self._do(change)
        self.log.info("version %d", version)

    def forget_sources(self) -> None:
        """Drop the trainer's memory. An engine that computed with it holds requests until the next update."""
        weights = self._weights
        if weights is not None and not self._batcher.is_closed:
            self._do(weights.drop_aliases)

    def _do(self, action: Callable[[], None]) -> None:
        """Change the weights between two tokens; hold requests afterwards if the module cannot compute."""

        def act() -> None:
            action()
            self._batcher.hold(self._weights is not None and not self._weights.can_compute)

        self._batcher.do(act)

    def read_weights(self, folder: str | Path) -> Mapping[str, torch.Tensor]:
        """Return the weights of a folder, with transformers if it has a ``config.json``; see :meth:`Engine.read_weights`."""
        module: Any = self._load()
        if isinstance(self._factory, Pretrained) and is_pretrained(folder):
            return read_pretrained(folder, module.config.dtype)
        return super().read_weights(folder)

    def offload(self) -> None:
        """Move the weights to host memory. Running requests continue after :meth:`onload`."""
        self._do(self._loaded().offload)

    def onload(self) -> None:
        """Move the weights back to the device."""
        self._do(self._loaded().onload)

    # The computing thread ------------------------------------------------------------------

    def _compute(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.no_grad():
            while (rows := self._batcher.next()) is not None:
                try:
                    self._loaded().check_owner()
                    drawn = [found for shared in self._passes(rows) for found in self._forward(shared)]
                    self._loaded().check_owner()  # the trainer may have died during the step
                except RolloutError as error:
                    self._batcher.fail(rows, error)
                except Exception as error:
                    self._failure = f"generating failed: {type(error).__name__}: {error}"
                    self.log.exception("generating failed")
                    self._batcher.fail(rows, RolloutError([Finding("E104", self._failure)]))
                else:
                    self._failure = ""
                    self._batcher.settle(drawn, self.version)

    def _passes(self, rows: list[Row]) -> list[list[Row]]:
        """Group the rows into forward passes."""
        if not self._is_invariant:
            return [rows]
        by_length: dict[int, list[Row]] = {}
        for row in rows:
            by_length.setdefault(self._padded(len(row.tokens)), []).append(row)
        return list(by_length.values())

    def _padded(self, length: int) -> int:
        return min(-(-length // self._multiple) * self._multiple, self._context or length)

    def _forward(self, rows: list[Row]) -> list[tuple[Row, int, float]]:
        """Run one forward pass; return a token and its log probability for each row."""
        height = self._rows if self._is_invariant else len(rows)
        ids = torch.zeros((height, self._padded(max(len(row.tokens) for row in rows))), dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row.tokens)] = torch.tensor(row.tokens)
        logits = _logits(self._load()(ids.to(self._device)))
        last = torch.tensor([len(row.tokens) - 1 for row in rows], device=logits.device)
        return _draw(rows, logits[torch.arange(len(rows), device=logits.device), last].double())


def _draw(rows: list[Row], logits: torch.Tensor) -> list[tuple[Row, int, float]]:
    """Draw a token for each row: the inverse of the cumulative distribution at the row's random number.

    The log probability is that of the distribution from which the token was drawn, temperature included; at
    temperature 0 that of temperature 1.
    """
    device = logits.device
    heat = torch.tensor([row.params.temperature or 1.0 for row in rows], dtype=torch.float64, device=device)
    logprobs = torch.log_softmax(logits / heat[:, None], dim=-1)
    numbers = [uniform(row.params.seed, row.index, len(row.tokens)) for row in rows]
    reached = logprobs.exp().cumsum(dim=-1)
    # The last entry is 1, except for rounding.
    points = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None] * reached[:, -1:]
    sampled = torch.searchsorted(reached, points, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    is_greedy = torch.tensor([row.params.temperature == 0 for row in rows], device=device)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1), sampled)
    picked = logprobs.gather(1, tokens[:, None])[:, 0]
    if not bool(torch.isfinite(picked).all()):
        raise FloatingPointError("the module's logits are not finite")
    return list(zip(rows, tokens.tolist(), picked.tolist(), strict=True))


def _try_out(module: Any, device: torch.device | None) -> int:
    """Run the module on two tokens and return the size of the vocabulary.

    Raises:
        RolloutError: The module fails, or returns no logits (E109).
    """
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

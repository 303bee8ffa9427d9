"""vLLM as an engine: vLLM's own server in a child process, behind Roost's engine server.

Roost's server has the same routes as with all engines. It passes requests on to vLLM's server on the same node:
generation over vLLM's "tokens in, tokens out" API; pausing, sleeping and weight updates over vLLM's own routes. vLLM
reports for each token the version of the weights that generated it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from roost.cluster.private_folder import PrivateFolder
from roost.engines.engine import Engine, EngineOutput, EnginePlace, WeightIntake, check_mode, stopped
from roost.engines.http_calls import ask
from roost.engines.server_process import LOG_LINES, ServerProcess, socket_folder
from roost.engines.vllm.command import (
    check_options,
    check_vllm,
    command_of,
    environment_of,
    error_in_log,
    ranks_of,
)
from roost.engines.vllm.generating import VllmClient, bodies_of
from roost.engines.vllm.intake import NODE_LOCAL, StagingMemory, VllmIntake
from roost.errors import Finding, RolloutError, RoostError
from roost.weights.checkpoint_shapes import checkpoint_tensors
from roost.weights.streams import WeightStream

__all__ = ["VllmEngine"]

URL = "http://vllm"
"""Base URL in requests and errors; the requests go to a Unix socket."""
SOCKET_NAME_BYTES = len("00000000-0000-0000-0000-000000000000")
"""vLLM names its sockets by UUIDs."""
PERIOD_S = 0.2
COMMAND_S = 600.0
"""Seconds that a command may take."""
DRAIN_S = 7200.0
"""Seconds that running requests may take to finish."""
SEARCHED_LINES = 1000
"""Number of log lines in which the cause of vLLM's end is searched."""
HEAD = "lm_head.weight"


class VllmEngine(Engine):
    """Serves a model with vLLM.

    Args:
        model: The model's folder, as ``save_pretrained`` writes it; every node must see it.
        python: The interpreter that has vLLM and Roost; by default that of the worker.
        options: More options of ``vllm serve``, such as ``["--max-model-len", "4096"]``.
        env: More environment variables for vLLM's processes.
        weights_dtype: dtype in which trainers send weights; by default that of the folder. vLLM converts them to the
            dtype in which it computes.
        version: Version of the weights in the folder.

    Attributes:
        weight_source: The intake from which vLLM's workers read weights now; ``None`` without one.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        python: str | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        weights_dtype: str | None = None,
        version: int = 0,
    ) -> None:
        self.version = version
        self.weight_source: object = None
        self._first_version = version
        self._model = Path(model)
        self._python = python or sys.executable
        self._options = [str(option) for option in options]
        self._env = {name: str(value) for name, value in (env or {}).items()}
        self._weights_dtype = weights_dtype

        self._place = EnginePlace()
        self._vllm_version = ""
        self._folder = PrivateFolder("vllm")
        self._socket_path = ""
        self._server: ServerProcess | None = None
        self._client: VllmClient | None = None
        self._vocabulary = 0
        self._context = 0
        self._eos: list[int] = []
        self._is_tied = False
        self._is_stopped = False
        self._is_paused = False
        self._is_asleep = False
        self._failure = ""
        self._staging: tuple[StagingMemory, VllmIntake] | None = None
        self._changing = threading.RLock()

    # Starting and ending -------------------------------------------------------------------

    def start(self, place: EnginePlace) -> str:
        """Start vLLM and wait until it serves; see :meth:`Engine.start`.

        Raises:
            RolloutError: The settings are wrong (E123), vLLM is missing or lacks a feature (E122), or vLLM ended
                (E121, with the error from its log).
        """
        self._place = place
        self._read_config()
        self._vllm_version = check_vllm(self._python, self._env)
        if place.device != "cpu":
            self.broadcast, self.broadcast_ranks = "nccl", ranks_of(place)
            self.broadcast_sender = "roost.engines.vllm.sender:DirectSender"
        # vLLM's server accepts commands from everybody who reaches it, and unpickles data. Its API key would protect
        # only the routes for generation, so it listens on a socket in a folder that no other user can enter.
        folder = socket_folder(self._folder, SOCKET_NAME_BYTES)
        self._socket_path = f"{folder}/http"
        command = command_of(place, str(self._model), self._python, self._socket_path, self._options)
        env = environment_of(place, folder, self._env)
        self._server = ServerProcess(command, env=env, name="vLLM", log_name=place.log_name)
        self._server.start()
        if place.member:
            return ""
        self._wait_until_it_serves()
        self._client = VllmClient(URL, self._socket_path, self._first_version)
        self.log.info("vLLM %s serves %s, context %d", self._vllm_version, self._model, self._context)
        return super().start(place)

    def _read_config(self) -> None:
        """Read the vocabulary size, the stop tokens and tied weights from the model's folder.

        Raises:
            RolloutError: The folder has no usable ``config.json``, or options are wrong; with all problems (E123).
        """
        problems = check_options(self._options)
        config: dict[str, Any] = {}
        try:
            config = json.loads((self._model / "config.json").read_text(encoding="utf-8"))
            config = {**config, **(config.get("text_config") or {})}
            self._vocabulary = int(config["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            rule = "a model is a folder that every engine sees under this path; nothing is downloaded"
            message = f"VllmEngine: {self._model} has no config.json with a vocab_size: {error!r}"
            problems.append(Finding("E123", message, rule=rule))
        if problems:
            raise RolloutError(problems)
        try:
            config.update(json.loads((self._model / "generation_config.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            pass  # the file is optional
        except (OSError, ValueError, TypeError) as error:
            self.log.warning("generation_config.json of %s is ignored: %s", self._model, error)
        eos = config.get("eos_token_id")
        self._eos = [int(token) for token in (eos if isinstance(eos, list) else [eos]) if token is not None]
        self._is_tied = bool(config.get("tie_word_embeddings"))

    def _wait_until_it_serves(self) -> None:
        while self._server is not None and not self._is_stopped:
            with contextlib.suppress(RolloutError):  # not yet: ask again, unless the process has ended
                self._ask("health", timeout_s=5)
                self._context = int(self._ask("v1/models")["data"][0]["max_model_len"])
                return
            if not self._server.is_alive():
                raise RolloutError([self._died(self._server, "vLLM ended before it served")])
            time.sleep(PERIOD_S)
        raise stopped()

    def _died(self, server: ServerProcess, what: str) -> Finding:
        """Return a finding with the error from vLLM's log, its last lines and its command."""
        log = server.logs(SEARCHED_LINES)
        cause = error_in_log(log)
        message = f"{what} (exit code {server.exit_code}; {self._place.share_text()})"
        context = (f"command: {' '.join(server.command)}", *log.splitlines()[-LOG_LINES:])
        return Finding("E121", f"{message}: {cause}" if cause else message, context=context, fixes=(server.log_fix,))

    def stop(self) -> None:
        """Stop vLLM and Roost's server. Safe to call twice."""
        self._is_stopped = True
        if self._client is not None:
            self._client.close()
        super().stop()
        if self._server is not None:
            self._server.stop()
        self.forget_sources()
        self._folder.close()

    def ended(self) -> str:
        """Return why the engine can never serve again: vLLM ended, or loaded only a part of a version; else empty."""
        if self._is_stopped or self._server is None:
            return ""
        if self._failure:
            return self._failure
        return "" if self._server.is_alive() else self._died(self._server, "vLLM has ended").message

    def health(self) -> str:
        """Return why vLLM cannot serve; empty if it is healthy."""
        if self._is_stopped or self._server is None:
            return "it does not run"
        reason = self.ended()
        if reason or self._place.member:
            return reason
        try:
            self._ask("health", timeout_s=10)
        except RolloutError as error:
            return error.findings[0].message
        return ""

    def logs(self) -> str:
        """Return the last lines of vLLM's log."""
        return self._server.described_logs() if self._server is not None else super().logs()

    def info(self) -> dict[str, Any]:
        """Return sizes and load."""
        return {
            "context_length": self._context,
            "num_running_samples": self._client.count if self._client is not None else 0,
            "is_paused": self._is_paused,
            "is_offloaded": self._is_asleep,
            "vllm_version": self._vllm_version,
            "vllm_workers": ranks_of(self._place),
        }

    # Requests ------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]) -> list[EngineOutput]:
        """Return samples for prompts; see :meth:`Engine.generate`."""
        return self.submit(prompts, params).result()

    def submit(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any], rid: str = ""
    ) -> Future[list[EngineOutput]]:
        """Pass a request on to vLLM; see :meth:`Engine.submit`."""
        if self._client is None:
            raise stopped()
        return self._client.submit(bodies_of(prompts, params, self._vocabulary, self._context, self._eos), rid)

    def command(self, route: str, body: Mapping[str, Any] | None = None, timeout_s: float = COMMAND_S) -> Any:
        """Send vLLM a command and return the answer.

        Raises:
            RolloutError: vLLM refuses or does not answer; with its message (E111).
        """
        return self._ask(route, "POST", body or {}, timeout_s)

    def _ask(
        self, route: str, method: str = "GET", body: Mapping[str, Any] | None = None, timeout_s: float = 60.0
    ) -> Any:
        return ask(f"{URL}/{route}", method, body, timeout_s, socket_path=self._socket_path)

    def pause(self, mode: str = "wait") -> None:
        """Hold new requests, and return when no request is running, or after two hours with an error.

        ``wait`` finishes running requests. ``abort`` answers all requests that were accepted before, with their
        tokens so far. vLLM clears its KV cache.
        """
        check_mode(mode)
        self._is_paused = True
        if not self._is_asleep:
            self.command(f"pause?mode={mode}", timeout_s=DRAIN_S)
        elif mode == "abort":
            self.abort()

    def resume(self) -> None:
        """Let held requests run; those of an offloaded engine after :meth:`onload`."""
        self._is_paused = False
        if not self._is_asleep:
            self.command("resume")

    def abort(self, rid: str = "") -> None:
        """Answer a request, or with an empty ``rid`` all requests, with the tokens so far."""
        names = self._client.names(rid) if rid and self._client is not None else []
        if names or not rid:
            self.command("abort_requests", {"request_ids": names})

    # Memory --------------------------------------------------------------------------------

    def offload(self) -> None:
        """Put vLLM to sleep. Running requests continue after :meth:`onload`, and compute their KV cache again."""
        with self._changing:
            if not self._is_asleep:
                self.command("sleep?level=1&mode=keep")
                self._is_asleep = True

    def onload(self) -> None:
        """Wake vLLM up."""
        with self._changing:
            if self._is_asleep:
                self.command("wake_up")
                self._is_asleep = False
                if self._is_paused:
                    self.command("pause?mode=keep")

    # Weights -------------------------------------------------------------------------------

    def describe_weights(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the tensors by their names in the checkpoint, which vLLM uses to load; of tied tensors the first."""
        found = checkpoint_tensors(self._model)
        if self._is_tied and len(found) > 1:
            found.pop(HEAD, None)
        own = self._weights_dtype
        return {name: (shape, own if own and "float" in kind else kind) for name, (shape, kind) in found.items()}

    def intake(
        self, streams: Sequence[WeightStream], addresses: Mapping[str, Any], rank: int, host: str, timeout_s: float
    ) -> WeightIntake | None:
        """Let vLLM's workers read memory of their node and join broadcasts; the rest goes to :meth:`load_weights`."""
        if all(stream.transport in NODE_LOCAL or stream.is_direct for stream in streams):
            if not all(stream.is_direct for stream in streams):
                self._check_one_node()
            return VllmIntake(self, streams, addresses, rank, timeout_s)
        return None

    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new weights from tensors of this process; see :meth:`Engine.load_weights`.

        Raises:
            RolloutError: Names or shapes differ (E102), or the version is not greater than the current one (E103).
        """
        self._check_one_node()
        wanted = self.describe_weights()
        given = {name: tensor for name, tensor in named.items() if name != HEAD or HEAD in wanted}
        problems = [Finding("E102", f"weights: the engine has no tensor {name!r}") for name in given.keys() - wanted]
        problems += [Finding("E102", f"weights: {name} is missing") for name in wanted.keys() - given]
        for name in wanted.keys() & given:
            has, wants = list(given[name].shape), list(wanted[name][0])
            if has != wants:
                problems.append(Finding("E102", f"weights: {name} has shape {has}, and the engine's has {wants}"))
        if problems:
            raise RolloutError(sorted(problems, key=lambda problem: problem.message))
        if self._staging is None or not self._staging[0].fits(given):
            self.forget_sources()
            memory = StagingMemory(given)
            self._staging = memory, VllmIntake(self, [memory.stream], memory.addresses, 0, COMMAND_S)
        memory, intake = self._staging
        memory.write(given, version)
        intake.commit(version)

    def forget_sources(self) -> None:
        """Release the staging memory of :meth:`load_weights`."""
        staging, self._staging = self._staging, None
        for part in reversed(staging or ()):
            part.close()

    def _check_one_node(self) -> None:
        if self._place.num_members > 1:
            message = f"{self._place.name}: vLLM over several nodes takes weights by NCCL broadcast alone"
            rule = "a trainer sends by NCCL broadcast if it has no tensor or pipeline parallelism, and GPUs of its own"
            raise RolloutError([Finding("E123", message, rule=rule)])

    def load_version(self, version: int, updates: Sequence[Mapping[str, Any]]) -> None:
        """Have the workers load a version while nothing is generated.

        If the engine is not paused, running requests are kept and continue with the new weights, after their KV cache
        was computed again. An offloaded engine takes the memory of its weights again for the load.

        Raises:
            RolloutError: The version is not greater than the current one (E103), or it was loaded only in part, so
                that the engine must end (E124).
        """
        with self._changing:
            if version <= self.version:
                message = f"version {version} of the weights comes after version {self.version}"
                raise RolloutError([Finding("E103", message, rule="versions only grow")])
            is_held = self._is_paused or self._is_asleep
            if self._is_asleep:
                self.command("wake_up?tags=weights")
            elif not is_held:
                self.command("pause?mode=keep")
            try:
                self.command("start_weight_update")
                try:
                    for update in updates:
                        self.command("update_weights", {"update_info": update})
                    self.command("finish_weight_update", {"weight_version": str(version)})
                except RoostError as error:  # a mix of two versions must not serve requests
                    self._failure = f"version {version} was loaded in part: {error.findings[0].message}"
                    raise RolloutError([Finding("E124", self._failure)]) from error
                self.version = version
            finally:
                if not is_held and not self._failure:
                    self.command("resume")

"""SGLang as an engine: SGLang's own server in a child process.

SGLang's server has the router's format, so requests go to it directly. Roost controls it by its documented routes.
"""

from __future__ import annotations

import getpass
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roost.cluster.ports import PortLease, is_own_server, lease_ports
from roost.cluster.private_folder import PrivateFolder
from roost.engines.client import EngineClient
from roost.engines.engine import Engine, EngineOutput, EnginePlace, WeightIntake, check_mode, stopped, url_of
from roost.engines.http_calls import ask, send
from roost.engines.keys import VARIABLE, make_key
from roost.engines.requests import params_of_samples
from roost.engines.server_process import ServerProcess, socket_folder
from roost.engines.sglang.command import NEEDED, ROUTES, check_options, check_version, command_of, ranks_of
from roost.engines.sglang.exit_report import explain_exit
from roost.engines.sglang.memory import FreeMemory, measure_free
from roost.engines.sglang.staging import saved
from roost.errors import Finding, Fix, RolloutError, counted
from roost.weights.checkpoint_shapes import checkpoint_tensors

if TYPE_CHECKING:
    import torch

    from roost.weights.streams import WeightStream

__all__ = ["SglangEngine"]

HEALTH_S = 30.0
"""Seconds that a health check may take; SGLang gives up after 20 s."""
IDLE_PERIOD_S = 0.1
"""Seconds between two checks whether SGLang is idle."""
REPORT_EXIT_S = 40.0
"""Seconds that the worker of an engine that ends during its start stays alive, so that a health check gets the reason."""
REPLY_S = 1.0
"""Seconds that the worker stays alive after a failed update, so that the call that sent the weights gets the reason."""
SOCKET_NAME_BYTES = len("torch-shm-dir-XXXXXX/manager.sock")
"""The longest path of a socket that SGLang's processes create in their folder for temporary files; this one is torch's."""
BUCKET_BYTES = 2**29
"""Bytes of a broadcast that SGLang receives at once while it is paused."""


class SglangEngine(Engine):
    """Serves a model with SGLang, in a process of its own: ``functools.partial(SglangEngine, "/models/mine")``.

    Args:
        model: The model's folder, as each of the engine's nodes sees it.
        options: More options of ``sglang.launch_server``, such as ``["--context-length", "8192"]``.
        env: More environment variables for SGLang.
        python: The interpreter that has SGLang; by default this one.
        seed: Seed of SGLang's random numbers; the engine's index is added.
        offload: Whether its GPU memory can be freed and taken again; by default true on GPUs.
        folder: Folder for weights that reach SGLang through files; all members must see it. By default memory of the
            node.
        timeout_s: Seconds that a command may take.
        version: Version of the weights in the model's folder.
    """

    takes_pieces = False

    def __init__(
        self,
        model: str,
        *,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        seed: int = 0,
        offload: bool | None = None,
        folder: str | None = None,
        timeout_s: float = 1800.0,
        version: int = 0,
    ) -> None:
        check_options(options)
        self.model = model
        self.version = version
        self.timeout_s = timeout_s
        self._options = tuple(options)
        self._env = {str(name): str(value) for name, value in (env or {}).items()}
        self._python = python or sys.executable
        self._seed = seed
        self._can_offload = offload
        self._folder = folder
        self._place = EnginePlace()
        self._url = ""
        self._temporary = PrivateFolder("sglang")
        self._child: ServerProcess | None = None
        self._client: EngineClient | None = None
        self._lease: PortLease | None = None
        self._is_ready = self._is_paused = self._is_offloaded = self._is_stopped = False
        self._was_exit_reported = False
        self._memory: FreeMemory | None = None
        self._health_asked_s = self._failed_s = 0.0
        self._failure = ""

    # Starting and ending -------------------------------------------------------------------

    def start(self, place: EnginePlace) -> str:
        """Start SGLang and return its base URL before it serves; see :meth:`Engine.start` and :meth:`health`.

        Raises:
            RolloutError: SGLang is missing or too old (E122), or the path of the private runtime folder is too long
                (E123).
        """
        if self._is_stopped:
            raise stopped()
        if not place.server_port:
            self._lease = lease_ports()
            place = replace(place, server_port=self._lease.port)
        if not place.key:
            place = replace(place, key=make_key())
        self._place = place
        is_cpu = place.device == "cpu"
        if self._can_offload is None:
            self._can_offload = not is_cpu
        self.broadcast = "gloo" if is_cpu else "nccl"
        self.broadcast_sender = "roost.engines.sglang.sender:DirectSender"
        self.broadcast_ranks = ranks_of(place)
        # A health check that generates would hang while the engine is paused, and the router would drop the engine.
        env = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
        if place.host.startswith("127."):
            env["GLOO_SOCKET_IFNAME"] = "lo"
        env |= self._temporary_files()
        env |= self._env
        found = check_version(self._python, env)
        is_given = any(str(option).startswith("--mem-fraction-static") for option in self._options)
        if place.gpu_share < 1.0 and not is_cpu and not is_given:
            self._memory = measure_free(self._python, env)
            self._log_memory()
        command = command_of(
            place, self.model, self._python, self._seed, self.version, self._can_offload, self._options, self._memory
        )
        self._child = ServerProcess(command, env={**env, VARIABLE: place.key}, name="SGLang", log_name=place.log_name)
        self._child.start()
        self._health_asked_s = time.monotonic()
        self.log.info("SGLang %s on %s: %s", found, place.host, " ".join(command))
        if place.member:
            return ""
        self._url = url_of(place.host, place.server_port)
        self._client = EngineClient(self._url, attempts=1, timeout_s=self.timeout_s, key=place.key)
        return self._url

    def _temporary_files(self) -> dict[str, str]:
        """Return the variables that move SGLang's temporary files to a private folder.

        SGLang's processes unpickle messages from ZMQ sockets among its temporary files. In ``/tmp`` only the umask
        would keep other users from connecting to them. Compiled kernels stay in torch's default folder, so that the
        next engine can reuse them.
        """
        variables = {"TMPDIR": socket_folder(self._temporary, SOCKET_NAME_BYTES)}
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            try:
                user = getpass.getuser()
            except (KeyError, OSError):  # a user id without a name, as in some containers
                user = str(os.getuid())
            variables["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
        return variables

    def _log_memory(self) -> None:
        if self._memory is None:
            self.log.warning(
                "the free memory of the engine's GPUs is unknown; all of their memory is assumed to be free"
            )
            return
        given_gib = self._place.gpu_share * self._memory.total_gib
        if self._memory.free_gib < given_gib:
            text = "the plan gives the engine %.1f GiB of each GPU, but only %.1f GiB are free: its KV cache will be smaller"
            self.log.warning(text, given_gib, self._memory.free_gib)

    def _exit_finding(self, child: ServerProcess) -> Finding:
        return explain_exit(child, self._place, self._memory)

    def health(self) -> str:
        """Return why SGLang cannot serve; empty if it is healthy.

        Raises:
            RolloutError: It will never serve: it has ended (E121), lacks a route or accepts requests without its key
                (E122), or failed to load weights (E124).
        """
        if self._is_stopped:
            return "it was stopped"
        if self._child is None:
            return "it was not started"
        if self._failure:
            raise RolloutError([Finding("E124", self._failure)])
        self._health_asked_s = time.monotonic()
        if not self._child.is_alive():
            self._was_exit_reported = True
            raise RolloutError([self._exit_finding(self._child)])
        if self._place.member:
            return ""
        # Another process may listen on the port; do not show it the key.
        if not self._is_ready and not is_own_server(self._place.server_port):
            return f"it does not listen on port {self._place.server_port} yet"
        try:
            self._get("health" if self._is_ready else "health_generate")
        except RolloutError as error:
            return error.findings[0].message
        if not self._is_ready:
            self._check_key()
            self._check_routes()
            self._is_ready = True
        return ""

    def _check_key(self) -> None:
        """Raise E122 unless the server rejects requests without its key."""
        try:
            ask(f"{self._url}/server_info", timeout_s=HEALTH_S)
        except RolloutError as error:
            if "E113" in error.codes:
                return
            reason = error.findings[0].message
        else:
            reason = "GET /server_info was answered"
        message = f"this SGLang does not refuse requests without its key: {reason}"
        rule = "SGLang checks its key where uvicorn serves it and one process takes requests"
        raise RolloutError([Finding("E122", message, rule=rule)])

    def _check_routes(self) -> None:
        """Raise E122 if the server lacks a route that Roost needs. Skip the check if it does not list its routes."""
        try:
            paths = self._get("openapi.json")["paths"]
        except (RolloutError, KeyError, TypeError) as error:
            self.log.info("SGLang does not list its routes, so they are not checked: %s", error)
            return
        missing = [route for route in ROUTES if route not in paths]
        if missing:
            first = ".".join(str(number) for number in NEEDED)
            message = f"this SGLang has no {', '.join(missing)}"
            raise RolloutError([Finding("E122", message, rule=f"SGLang {first} and newer have them")])

    def ended(self) -> str:
        """Return why SGLang can never serve again, else an empty string; see :meth:`Engine.ended`."""
        if self._failure:  # first let the call that sent the weights get its answer
            return self._failure if time.monotonic() - self._failed_s > REPLY_S else ""
        if self._is_stopped or self._child is None or self._child.is_alive():
            return ""
        is_awaited = (
            not self._is_ready
            and not self._was_exit_reported
            and time.monotonic() - self._health_asked_s < REPORT_EXIT_S
        )
        return "" if is_awaited else self._exit_finding(self._child).message

    def stop(self) -> None:
        """Stop SGLang with all its processes."""
        self._is_stopped = True
        if self._client is not None:
            self._client.close()
        if self._child is not None:
            self._child.stop()
        self._temporary.close()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        super().stop()

    def logs(self) -> str:
        """Return the last lines of SGLang's log."""
        return self._child.described_logs(200) if self._child is not None else ""

    def info(self) -> dict[str, Any]:
        """Return SGLang's ``/server_info`` without keys."""
        found: dict[str, Any] = self._get("server_info") if self._url else {}
        return {name: value for name, value in found.items() if not name.endswith("api_key")}

    # Work ----------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]) -> list[EngineOutput]:
        """Return samples for prompts; see :meth:`Engine.generate`."""
        if self._is_stopped or self._client is None:
            raise stopped()
        requests = [
            {"input_ids": list(prompt), "sampling_params": one}
            for prompt in prompts
            for one in params_of_samples(params)
        ]
        return [output for outputs in self._client.generate_all(requests) for output in outputs]

    def pause(self, mode: str = "wait") -> None:
        """Hold new requests, and return when no request is running.

        SGLang cannot hold new requests while it finishes running ones: ``wait`` waits until it has no request at all.
        A request that arrives at this moment is answered with its tokens so far.

        Raises:
            RolloutError: SGLang still had requests after ``timeout_s`` of the engine (E111).
        """
        check_mode(mode)
        if not self._url:
            return
        with self.lock:
            self._halt(mode)
            self._is_paused = True

    def _halt(self, mode: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while mode == "wait" and not self._is_halted and not self._is_idle():
            if time.monotonic() > deadline:
                message = f"SGLang still had running requests after {self.timeout_s:g} s of waiting"
                fixes = (Fix("end them", 'pause("abort")'), Fix("or wait longer", "SglangEngine(…, timeout_s=7200)"))
                raise RolloutError([Finding("E111", message, fixes=fixes)])
            time.sleep(IDLE_PERIOD_S)
        self.post("pause_generation", {"mode": "abort"})

    @property
    def _is_halted(self) -> bool:
        return self._is_paused or self._is_offloaded

    def resume(self) -> None:
        """Let held requests run, unless the engine is offloaded."""
        with self.lock:
            self._is_paused = False
            if self._url and not self._is_halted and not self._failure:
                self.post("continue_generation", {})

    def abort(self, rid: str = "") -> None:
        """End a request, or with an empty ``rid`` all requests, with the tokens so far."""
        if self._url:
            self.post("abort_request", {"rid": rid, "abort_all": not rid})

    def offload(self) -> None:
        """Let running requests finish, hold new ones, and free the memory of the GPUs."""
        if not self._url or not self._can_offload:
            return
        with self.lock:
            if not self._is_offloaded:
                self._halt("wait")
                self.post("release_memory_occupation", {})
                self._is_offloaded = True

    def onload(self) -> None:
        """Take the memory of the GPUs again, with the same weights."""
        with self.lock:
            if self._is_offloaded:
                self.post("resume_memory_occupation", {})
                self._is_offloaded = False
                if not self._is_paused:
                    self.post("continue_generation", {})

    # Weights -------------------------------------------------------------------------------

    def describe_weights(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the tensors of the model's folder: SGLang loads whole tensors, by their names there."""
        return checkpoint_tensors(self.model)

    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new weights through a file; see :meth:`Engine.load_weights`.

        Raises:
            RolloutError: The engine has several nodes and no ``folder`` (E123), or SGLang did not load them (E124).
        """
        if self._folder is None and self._place.num_members > 1:
            message = f"an engine on {counted(self._place.num_members, 'node')} cannot get weights from memory of one"
            fixes = (Fix("a folder that all of them see", 'SglangEngine(…, folder="/shared/weights")'),)
            raise RolloutError([Finding("E123", message, fixes=fixes)])
        with saved(named, self._folder) as folder:
            self.load_folder(folder, version)

    def load_folder(self, folder: str, version: int) -> None:
        """Load the weights of a folder of safetensors files."""
        # Without the format, a server that was started with random weights would load random weights again.
        self.update([("update_weights_from_disk", {"model_path": folder, "load_format": "auto"})], version)

    @property
    def bucket_bytes(self) -> float:
        """Maximum bytes of one broadcast command; SGLang needs this much memory beside its weights.

        Unlimited while requests run: between two commands they would compute with a mix of two versions.
        """
        return BUCKET_BYTES if self._is_halted else math.inf

    def update(self, commands: Sequence[tuple[str, dict[str, Any]]], version: int) -> None:
        """Send SGLang the commands that together load a version. Several commands are allowed only while it is paused.

        Raises:
            RolloutError: A command failed; with SGLang's message (E124). SGLang was stopped, because its weights are
                undefined.
        """
        with self.lock:
            try:
                if self._is_offloaded:
                    self.post("resume_memory_occupation", {"tags": ["weights"]})
                for number, (route, body) in enumerate(commands):
                    is_last = number == len(commands) - 1
                    # An offloaded engine has no KV cache to flush.
                    body = {**body, "flush_cache": is_last and not self._is_offloaded}
                    if is_last:
                        body["weight_version"] = str(version)
                    answer = self.post(route, body)
                    if not (isinstance(answer, dict) and answer.get("success")):
                        raise RolloutError([Finding("E111", f"{route}: {answer}")])
                if self._is_offloaded:
                    self.post("release_memory_occupation", {"tags": ["weights"]})
            except RolloutError as error:
                reason = error.findings[0].message
                self._failure = f"version {version} of the weights was not loaded, and the engine was stopped: {reason}"
                self._failed_s = time.monotonic()
                if self._child is not None:
                    self._child.stop()
                raise RolloutError([Finding("E124", self._failure)]) from error
            self.version = version

    def intake(
        self, streams: Sequence[WeightStream], addresses: Mapping[str, Any], rank: int, host: str, timeout_s: float
    ) -> WeightIntake | None:
        """Return how SGLang's processes read the streams themselves; ``None`` if they cannot."""
        from roost.engines.sglang.intake import make_intake

        return make_intake(self, self._place, streams, addresses, rank, timeout_s)

    # Requests to SGLang --------------------------------------------------------------------

    def post(self, route: str, body: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        """Send SGLang a command and return the answer.

        Raises:
            RolloutError: SGLang refuses or does not answer (E111), or has ended (E121).
        """
        try:
            return ask(f"{self._url}/{route}", "POST", body, timeout_s or self.timeout_s, key=self._place.key)
        except RolloutError as error:
            if self._child is not None and not self._child.is_alive() and not self._is_stopped:
                raise RolloutError([self._exit_finding(self._child)]) from error
            raise

    def _get(self, route: str) -> Any:
        return ask(f"{self._url}/{route}", timeout_s=HEALTH_S, key=self._place.key)

    def _is_idle(self) -> bool:
        """Return whether SGLang has no request: it flushes its cache only then, and answers 400 otherwise."""
        url = f"{self._url}/flush_cache"
        try:
            reply = send(url, "POST", timeout_s=HEALTH_S, key=self._place.key)
        except OSError as error:
            if self._child is not None and not self._child.is_alive():
                raise RolloutError([self._exit_finding(self._child)]) from error
            raise RolloutError([Finding("E111", f"POST {url} does not answer: {error}")]) from error
        if reply.is_error and reply.status != 400:
            raise RolloutError([Finding("E111", f"POST {url} answered {reply.status}")])
        return not reply.is_error

"""An engine that is an SGLang server.

SGLang speaks the router's format itself, so requests go to it directly. What Roost asks of it are its
documented commands; which processes take part in them is SGLang's own business.
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
"""How long a health check may take; SGLang gives one up after 20 s."""
IDLE_PERIOD_S = 0.1
REPORT_EXIT_S = 40.0
"""How long an engine that ends while it starts stays for whoever asks for its health, and is told why."""
REPLY_S = 1.0
SOCKET_NAME_BYTES = len("torch-shm-dir-XXXXXX/manager.sock")
"""The longest name of a socket that SGLang's processes make in their folder for temporary files: one of torch."""
BUCKET_BYTES = 2**29


class SglangEngine(Engine):
    """Serves a model with SGLang, in a process of its own: ``functools.partial(SglangEngine, "/models/mine")``.

    Args:
        model: The model's folder, as each of its nodes sees it.
        options: More options of ``sglang.launch_server``, such as ``["--context-length", "8192"]``.
        env: More variables of its environment.
        python: The interpreter that has SGLang; by default this one.
        seed: Of its random numbers; engines count on from it.
        offload: Whether its memory can be taken away and given back; by default on GPUs.
        folder: Where weights are put that reach it through files. All its members must see it. By default
            memory of its node.
        timeout_s: How long it may take to obey a command.
        version: Of the weights in the model's folder.
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
        """Starts SGLang here; see :meth:`Engine.start`. :meth:`health` says when it serves.

        Raises:
            RolloutError: Where there is no SGLang, or one that is too old (E122), or where the path of the private
                runtime folder is too long (E123).
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
        # A health check that generates would wait for as long as the engine is paused, and the router would drop it.
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

        SGLang's processes unpickle what comes over ZMQ sockets among its temporary files. In ``/tmp`` only the umask
        would keep other users from connecting to them. Compiled kernels stay where torch has them by default: the
        next engine can use them again.
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
            self.log.warning("the free memory of its GPUs cannot be measured; all of it is taken to be free")
            return
        given_gib = self._place.gpu_share * self._memory.total_gib
        if self._memory.free_gib < given_gib:
            text = "the plan gives it %.1f GiB of each GPU, and only %.1f GiB are free: it will have less memory for its cache"
            self.log.warning(text, given_gib, self._memory.free_gib)

    def _exit_finding(self, child: ServerProcess) -> Finding:
        return explain_exit(child, self._place, self._memory)

    def health(self) -> str:
        """Nothing when it serves, else what is missing.

        Raises:
            RolloutError: Where it will never serve: it has ended (E121), lacks what is needed, or obeys requests
                without its key (E122).
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
        if not self._is_ready and not is_own_server(self._place.server_port):  # nobody else gets to see the key
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
        """Raise E122 unless the server refuses who does not present its key."""
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
        """Whether it has all commands; servers that do not list them are believed."""
        try:
            paths = self._get("openapi.json")["paths"]
        except (RolloutError, KeyError, TypeError):
            return
        missing = [route for route in ROUTES if route not in paths]
        if missing:
            first = ".".join(str(number) for number in NEEDED)
            message = f"this SGLang has no {', '.join(missing)}"
            raise RolloutError([Finding("E122", message, rule=f"SGLang {first} and newer have them")])

    def ended(self) -> str:
        """Why it can never serve again; see :meth:`Engine.ended`."""
        if self._failure:  # the answer to who sent the weights goes first
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
        """Ends SGLang, with all its processes."""
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
        """SGLang's last lines."""
        return self._child.described_logs(200) if self._child is not None else ""

    def info(self) -> dict[str, Any]:
        """What SGLang says of itself, its keys left out."""
        found: dict[str, Any] = self._get("server_info") if self._url else {}
        return {name: value for name, value in found.items() if not name.endswith("api_key")}

    # Work ----------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]) -> list[EngineOutput]:
        """Samples for prompts; see :meth:`Engine.generate`."""
        if self._is_stopped or self._client is None:
            raise stopped()
        requests = [
            {"input_ids": list(prompt), "sampling_params": one}
            for prompt in prompts
            for one in params_of_samples(params)
        ]
        return [output for outputs in self._client.generate_all(requests) for output in outputs]

    def pause(self, mode: str = "wait") -> None:
        """Holds new requests, and returns when nothing is generated.

        SGLang has no way to finish what runs and hold what comes: ``wait`` waits for a moment in which it
        has no request. One that comes in that very moment is answered with what there is of it.
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
                message = f"SGLang still had requests after {self.timeout_s:g} s, and was waited for to finish them"
                fixes = (Fix("end them", 'pause("abort")'), Fix("or wait longer", "SglangEngine(…, timeout_s=7200)"))
                raise RolloutError([Finding("E111", message, fixes=fixes)])
            time.sleep(IDLE_PERIOD_S)
        self.post("pause_generation", {"mode": "abort"})

    @property
    def _is_halted(self) -> bool:
        return self._is_paused or self._is_offloaded

    def resume(self) -> None:
        """Lets requests go on, unless its memory is away."""
        with self.lock:
            self._is_paused = False
            if self._url and not self._is_halted and not self._failure:
                self.post("continue_generation", {})

    def abort(self, rid: str = "") -> None:
        """Ends a request, or all, with what there is of it."""
        if self._url:
            self.post("abort_request", {"rid": rid, "abort_all": not rid})

    def offload(self) -> None:
        """Finishes what runs, holds what comes, and frees the memory of the GPUs."""
        if not self._url or not self._can_offload:
            return
        with self.lock:
            if not self._is_offloaded:
                self._halt("wait")
                self.post("release_memory_occupation", {})
                self._is_offloaded = True

    def onload(self) -> None:
        """Takes that memory again; the weights are those that it had."""
        with self.lock:
            if self._is_offloaded:
                self.post("resume_memory_occupation", {})
                self._is_offloaded = False
                if not self._is_paused:
                    self.post("continue_generation", {})

    # Weights -------------------------------------------------------------------------------

    def describe_weights(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The tensors of the model's folder: SGLang takes them whole, by their names there."""
        return checkpoint_tensors(self.model)

    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        """Takes new weights through a file; see :meth:`Engine.load_weights`."""
        if self._folder is None and self._place.num_members > 1:
            message = f"an engine on {counted(self._place.num_members, 'node')} cannot get weights from memory of one"
            fixes = (Fix("a folder that all of them see", 'SglangEngine(…, folder="/shared/weights")'),)
            raise RolloutError([Finding("E123", message, fixes=fixes)])
        with saved(named, self._folder) as folder:
            self.load_folder(folder, version)

    def load_folder(self, folder: str, version: int) -> None:
        """Takes the weights of a folder of safetensors files."""
        # The format is said, since a server that began with random weights would go on with such.
        self.update([("update_weights_from_disk", {"model_path": folder, "load_format": "auto"})], version)

    @property
    def bucket_bytes(self) -> float:
        """How much a broadcast may bring: SGLang has a copy of that beside its weights.

        While requests run it is all at once, since they would compute with half of it between two commands.
        """
        return BUCKET_BYTES if self._is_halted else math.inf

    def update(self, commands: Sequence[tuple[str, dict[str, Any]]], version: int) -> None:
        """Has SGLang obey commands that together bring a version: several only while it is paused.

        Raises:
            RolloutError: What SGLang said. It was ended: nobody knows what it would serve (E124).
        """
        with self.lock:
            try:
                if self._is_offloaded:
                    self.post("resume_memory_occupation", {"tags": ["weights"]})
                for number, (route, body) in enumerate(commands):
                    is_last = number == len(commands) - 1
                    # Its cache was emptied when its memory went, and is not there to be emptied again.
                    body = {**body, "flush_cache": is_last and not self._is_offloaded}
                    if is_last:
                        body["weight_version"] = str(version)
                    answer = self.post(route, body)
                    if not (isinstance(answer, dict) and answer.get("success")):
                        raise RolloutError([Finding("E111", f"{route}: {answer}")])
                if self._is_offloaded:
                    self.post("release_memory_occupation", {"tags": ["weights"]})
            except RolloutError as error:
                said = error.findings[0].message
                self._failure = f"version {version} of the weights was not taken, and the engine was ended: {said}"
                self._failed_s = time.monotonic()
                if self._child is not None:
                    self._child.stop()
                raise RolloutError([Finding("E124", self._failure)]) from error
            self.version = version

    def intake(
        self, streams: Sequence[WeightStream], addresses: Mapping[str, Any], rank: int, host: str, timeout_s: float
    ) -> WeightIntake | None:
        """How SGLang's processes read what trainers send, where they can."""
        from roost.engines.sglang.intake import make_intake

        return make_intake(self, self._place, streams, addresses, rank, timeout_s)

    # Asking it -----------------------------------------------------------------------------

    def post(self, route: str, body: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        """Gives SGLang a command.

        Raises:
            RolloutError: What it said (E111), or why it ended (E121).
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
        """Whether it has no request: only then it empties its cache."""
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

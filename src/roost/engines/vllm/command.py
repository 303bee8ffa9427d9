"""vLLM's command line and environment, and checks of the installed vLLM and of its log."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from roost.engines.engine import EnginePlace
from roost.engines.vllm import inside
from roost.engines.vllm.plugin import NAME
from roost.errors import Finding, Fix, RolloutError

__all__ = ["check_options", "check_vllm", "command_of", "environment_of", "error_in_log", "ranks_of"]

TRIED = "0.32"
"""The vLLM version with which Roost was tested."""
OWN = (
    "--distributed-executor-backend", "--headless", "--host", "--master-addr", "--master-port", "--model", "--nnodes",
    "--node-rank", "--port", "--tensor-parallel-size", "--tokens-only", "--uds", "--weight-transfer-config", "-n", "-r", "-tp",
)  # fmt: skip
"""Options that Roost sets itself, from the plan or for its own connection to vLLM."""
MEMORY_PART = 0.9
"""The part of the engine's GPU share that vLLM may fill; the rest is for memory that vLLM does not count."""
CPU_CACHE_BYTES = 1 << 30
"""Size of the KV cache on the CPU."""
CHECK_S = 60.0
"""Seconds that the check of the installed vLLM may take."""
_CAUSE = re.compile(r"^(?:(?:\([^)]*\) )?ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception|Exit)): (.+)", re.MULTILINE)
"""The last line of a Python traceback, by itself or as a line of vLLM's log."""
_CONSEQUENCES = ("Engine core initialization failed", "WorkerProc initialization failed", "EngineCore encountered")


def ranks_of(place: EnginePlace) -> int:
    """Return the number of vLLM's workers: one for each accelerator of all members."""
    return max(1, len(place.accelerators)) * place.num_members


def check_options(options: Sequence[str]) -> list[Finding]:
    """Return the problems of the user's options."""
    names = [option.split("=", 1)[0].replace("_", "-") for option in options]
    return [
        Finding("E123", f"VllmEngine: {name} follows from the plan, and cannot be among the options")
        for name in names
        if name in OWN
    ]


def command_of(place: EnginePlace, model: str, python: str, socket_path: str, options: Sequence[str]) -> list[str]:
    """Return the command that starts a member of an engine.

    Args:
        place: The member's place.
        model: The model's folder.
        python: The interpreter that has vLLM.
        socket_path: The Unix socket of vLLM's own server, to which only this process connects.
        options: The user's options; they come last, so that they take precedence.
    """
    words = [
        python, str(inside.__file__), "serve", model,
        "--tensor-parallel-size", str(ranks_of(place)),
        "--distributed-executor-backend", "mp",
        "--weight-transfer-config", json.dumps({"backend": NAME}),
        "--tokens-only",
        # Log probabilities of the distribution from which a token was drawn, temperature included, as in all engines.
        "--logprobs-mode", "processed_logprobs",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if place.num_members > 1:
        host, _, meeting = place.dist_init_addr.rpartition(":")
        words += ["--nnodes", str(place.num_members), "--node-rank", str(place.member)]
        words += ["--master-addr", host.strip("[]"), "--master-port", meeting]
    words += ["--headless"] if place.member else ["--uds", socket_path]
    if place.device != "cpu":
        words += ["--enable-sleep-mode", "--gpu-memory-utilization", f"{place.gpu_share * MEMORY_PART:.3f}"]
    else:  # by default each engine on the node would take nearly all of its memory
        words += ["--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)]
    return [*words, *options]


def environment_of(place: EnginePlace, folder: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for vLLM; the user's take precedence.

    Args:
        place: The member's place.
        folder: A private folder for sockets.
        env: The user's variables.
    """
    own = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for weights, pausing and sleeping
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # handles of GPU memory are pickled
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": folder,  # for sockets between its processes, which unpickle all that they receive
        "VLLM_HOST_IP": place.host,
        # Longer than the client's keep-alive, so that the client never sends into a connection that is closing.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    }
    if place.device == "cpu":
        own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default each engine on the node would bind to the same cores
    return {**own, **env}


def check_vllm(python: str, env: Mapping[str, str]) -> str:
    """Return the version of the vLLM that an interpreter has.

    Raises:
        RolloutError: The interpreter has no vLLM, or one without a feature that Roost needs (E122).
    """
    fixes = (
        Fix("install it there", f"{python} -m pip install 'vllm>={TRIED}' roost"),
        Fix("or name an interpreter that has it", 'VllmEngine(…, python="/path/to/bin/python")'),
    )

    def problem(message: str, context: Sequence[str] = ()) -> RolloutError:
        rule = f"vLLM {TRIED} has all that is needed"
        return RolloutError([Finding("E122", message, context=tuple(context), rule=rule, fixes=fixes)])

    try:
        done = subprocess.run(  # noqa: S603
            [python, str(inside.__file__), "check"],
            env={**os.environ, **env}, capture_output=True, text=True, timeout=CHECK_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise problem(f"{python} cannot be asked for its vLLM: {error}") from error
    if done.returncode:
        raise problem(f"{python} cannot be asked for its vLLM", done.stderr.splitlines()[-10:])
    found: dict[str, Any] = json.loads(done.stdout)
    if not found["version"]:
        raise problem(f"{python} has no vLLM")
    if found["missing"]:
        lacks = [f"it lacks: {what}" for what in found["missing"]]
        raise problem(f"vLLM {found['version']} of {python} cannot serve a job", lacks)
    if not found["has_plugin"]:
        raise problem(f"{python} has vLLM {found['version']} but not Roost, whose plugin loads weights in its workers")
    return str(found["version"])


def error_in_log(log: str) -> str:
    """Return the error in vLLM's log that ended it: the first that is not a consequence of another; empty if none."""
    for match in _CAUSE.finditer(log):
        if not any(text in match[2] for text in _CONSEQUENCES):
            return f"{match[1].rpartition('.')[2]}: {match[2].strip()}"
    return ""

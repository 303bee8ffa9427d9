"""vLLM's command line for a place, and whether the vLLM there has what is needed."""

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
"""The version that all of this was run with."""
OWN = (
    "--distributed-executor-backend", "--headless", "--host", "--master-addr", "--master-port", "--model", "--nnodes",
    "--node-rank", "--port", "--tensor-parallel-size", "--tokens-only", "--uds", "--weight-transfer-config", "-n", "-r", "-tp",
)  # fmt: skip
"""Options that follow from where the plan puts an engine, or from how it is commanded."""
MEMORY_PART = 0.9
"""How much of its share of a GPU vLLM may fill; the rest is for what it does not count."""
CPU_CACHE_BYTES = 1 << 30
CHECK_S = 60.0
_CAUSE = re.compile(r"^(?:(?:\([^)]*\) )?ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception|Exit)): (.+)", re.MULTILINE)
"""An error as Python says it last, by itself or as a line of vLLM's log."""
_AFTERMATH = ("Engine core initialization failed", "WorkerProc initialization failed", "EngineCore encountered")


def ranks_of(place: EnginePlace) -> int:
    """How many workers compute: one per accelerator, over all members."""
    return max(1, len(place.accelerators)) * place.num_members


def check_options(options: Sequence[str]) -> list[Finding]:
    """What is wrong with a user's options."""
    names = [option.split("=", 1)[0].replace("_", "-") for option in options]
    return [
        Finding("E123", f"VllmEngine: {name} follows from the plan, and cannot be among the options")
        for name in names
        if name in OWN
    ]


def command_of(place: EnginePlace, model: str, python: str, socket_path: str, options: Sequence[str]) -> list[str]:
    """What starts a member of an engine.

    Args:
        place: Where.
        model: The model's folder.
        python: The interpreter that has vLLM.
        socket_path: The Unix socket of vLLM's own server, which only this process talks to.
        options: The user's; they come last, so that they win.
    """
    words = [
        python, str(inside.__file__), "serve", model,
        "--tensor-parallel-size", str(ranks_of(place)),
        "--distributed-executor-backend", "mp",
        "--weight-transfer-config", json.dumps({"backend": NAME}),
        "--tokens-only",
        # As everywhere in Roost: of the distribution that a token was drawn from, temperature included.
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
    else:  # by itself it takes nearly all memory, and so does the next engine
        words += ["--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)]
    return [*words, *options]


def environment_of(place: EnginePlace, folder: str, env: Mapping[str, str]) -> dict[str, str]:
    """Its variables; the user's win.

    Args:
        place: Where.
        folder: A private folder for its sockets.
        env: The user's variables.
    """
    own = {
        "VLLM_SERVER_DEV_MODE": "1",  # the commands for weights, pausing and sleeping
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # handles of GPU memory are pickled
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": folder,  # sockets between its processes, which unpickle what comes
        "VLLM_HOST_IP": place.host,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # longer than the client's: nothing is sent into a closing connection
    }
    if place.device == "cpu":
        own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by itself it binds to all cores, and so does the next engine
    return {**own, **env}


def check_vllm(python: str, env: Mapping[str, str]) -> str:
    """The version of the vLLM that an interpreter has.

    Raises:
        RolloutError: Where it has none, or lacks something that is needed (E122).
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
    said: dict[str, Any] = json.loads(done.stdout)
    if not said["version"]:
        raise problem(f"{python} has no vLLM")
    if said["missing"]:
        lacks = [f"it lacks: {what}" for what in said["missing"]]
        raise problem(f"vLLM {said['version']} of {python} cannot serve a job", lacks)
    if not said["has_plugin"]:
        raise problem(f"{python} has vLLM {said['version']} and not Roost, by which weights reach it")
    return str(said["version"])


def error_in_log(log: str) -> str:
    """Why vLLM ended, in its own words: the first error that is no consequence of another."""
    for match in _CAUSE.finditer(log):
        if not any(text in match[2] for text in _AFTERMATH):
            return f"{match[1].rpartition('.')[2]}: {match[2].strip()}"
    return ""

"""SGLang's command line, and checks of the options and of the installed SGLang."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from roost.engines.engine import EnginePlace
from roost.engines.sglang import inside
from roost.engines.sglang.memory import FreeMemory, static_fraction
from roost.errors import Finding, Fix, RolloutError

__all__ = ["NEEDED", "ROUTES", "check_options", "check_version", "command_of", "ranks_of"]

NEEDED = (0, 5, 6)
"""The first version that updates weights while it is paused, and that backs them up on the host (from 0.5.4 on)."""
ROUTES = (
    "/abort_request", "/continue_generation", "/destroy_weights_update_group", "/flush_cache", "/generate",
    "/health_generate", "/init_weights_update_group", "/pause_generation", "/release_memory_occupation",
    "/resume_memory_occupation", "/server_info", "/update_weights_from_disk", "/update_weights_from_distributed",
    "/update_weights_from_tensor",
)  # fmt: skip
"""The routes of SGLang that Roost uses."""
OWN = (
    "--admin-api-key", "--api-key", "--base-gpu-id", "--device", "--dist-init-addr", "--gpu-id-step", "--host", "--model", "--model-path", "--nccl-init-addr",
    "--nccl-port", "--nnodes", "--node-rank", "--pipeline-parallel-size", "--port", "--pp", "--pp-size",
    "--skip-tokenizer-init", "--tensor-parallel-size", "--tp", "--tp-size",
)  # fmt: skip
"""Options that Roost sets itself, from the plan or for its own connection to SGLang."""
WORKERS = "--tokenizer-worker-num"
VERSION_S = 120.0
"""Seconds that the interpreter may take to print the version of SGLang."""
_PRINT_VERSION = """
from importlib.metadata import PackageNotFoundError, version
try:
    print(version("sglang"))
except PackageNotFoundError:
    import sglang
    print(sglang.__version__)
"""


def ranks_of(place: EnginePlace) -> int:
    """Return the number of SGLang's computing processes: one for each GPU of all members."""
    return max(1, len(place.accelerators)) * place.num_members


def check_options(options: Sequence[str]) -> None:
    """Reject options that Roost sets itself, and several tokenizer processes, with which SGLang checks no key.

    Raises:
        RolloutError: Some options are not allowed; names all of them (E123).
    """
    words = [str(option) for option in options]
    names = [word.split("=", 1)[0].replace("_", "-") for word in words]
    problems = [
        Finding("E123", f"SglangEngine: {name} {_source_of(name)}, and cannot be among the options")
        for name in names
        if name in OWN
    ]
    rule = "SGLang checks its key only where one process takes requests"
    for index, name in enumerate(names):
        value = words[index].partition("=")[2] or "".join(words[index + 1 : index + 2])
        if name == WORKERS and value.strip() != "1":
            problems.append(Finding("E123", f"SglangEngine: {name} is {value}, and must be 1", rule=rule))
    if problems:
        raise RolloutError(problems)


def _source_of(name: str) -> str:
    return "is made by Roost" if name.endswith("-key") else "follows from the plan"


def command_of(
    place: EnginePlace,
    model: str,
    python: str,
    seed: int,
    version: int,
    can_offload: bool,
    options: Sequence[str],
    memory: FreeMemory | None = None,
) -> list[str]:
    """Return the command that starts a member of an engine.

    Args:
        place: The member's place.
        model: The model's folder.
        python: The interpreter that has SGLang.
        seed: Seed of SGLang's own random numbers; the engine's index is added.
        version: Version of the weights in the folder.
        can_offload: Whether the engine can free its GPU memory for a while.
        options: The user's options; they come last, so that they take precedence.
        memory: Free memory of the member's GPUs; ``None`` if unknown.
    """
    words = [
        python, str(inside.__file__),
        "--model-path", model,
        "--host", place.host, "--port", str(place.server_port),
        "--tp-size", str(ranks_of(place)),
        # SGLang numbers its visible GPUs from 0, and only those of this member are visible.
        "--base-gpu-id", "0",
        "--nnodes", str(place.num_members), "--node-rank", str(place.member),
        "--skip-tokenizer-init",
        "--weight-version", str(version),
        "--random-seed", str(seed + place.engine),
    ]  # fmt: skip
    if place.dist_init_addr:
        words += ["--dist-init-addr", place.dist_init_addr]
    if place.nccl_port:
        words += ["--nccl-port", str(place.nccl_port)]
    if place.device == "cpu":
        words += ["--device", "cpu"]
    if place.gpu_share < 1.0:
        words += ["--mem-fraction-static", f"{static_fraction(place.gpu_share, memory):.3f}"]
    if can_offload:
        # Without the backup, weights are lost when memory is released, and must be sent before SGLang can serve again.
        words += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    return [*words, *(str(option) for option in options)]


def check_version(python: str, env: Mapping[str, str]) -> str:
    """Return the version of the SGLang that an interpreter has.

    Raises:
        RolloutError: The interpreter has no SGLang, or one that is too old (E122).
    """
    first = ".".join(str(number) for number in NEEDED)
    fixes = (Fix("where it is installed", 'SglangEngine(…, python="/path/to/bin/python")'),)
    upgrade = Fix("upgrade it", f"{python} -m pip install 'sglang>={first}'")
    try:
        done = subprocess.run(  # noqa: S603
            [python, "-c", _PRINT_VERSION], env={**os.environ, **env}, capture_output=True, text=True, timeout=VERSION_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RolloutError([Finding("E122", f"{python} cannot be asked for SGLang: {error}", fixes=fixes)]) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        message = f"{python} has no SGLang that can be imported: {lines[-1] if lines else 'it says nothing'}"
        raise RolloutError([Finding("E122", message, context=tuple(lines[-10:-1]), fixes=(*fixes, upgrade))])
    found = done.stdout.strip().splitlines()[-1]
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", found)
    version = tuple(int(number) for number in numbers.groups()) if numbers else NEEDED
    if (0, 0, 0) < version < NEEDED:  # 0.0.0: built from a checkout without tags, of unknown age
        message = f"SGLang {found} is too old: it cannot take weights while it is paused"
        rule = f"SGLang {first} and newer have pause_generation with a mode, and updates of weights under it"
        raise RolloutError([Finding("E122", message, context=(f"interpreter: {python}",), rule=rule, fixes=(upgrade,))])
    return found

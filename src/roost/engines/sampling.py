"""Sampling parameters of a request, and the random numbers with which its tokens are drawn."""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roost.errors import Finding, Fix, RolloutError, counted, did_you_mean, shown

__all__ = ["MAX_SEED", "SamplingParams", "check_request", "check_seeds", "sample_seed", "seed_problems", "uniform"]

MASK = (1 << 64) - 1
MAX_SEED = (1 << 63) - 1
"""The largest seed of a request. SGLang and vLLM keep seeds as signed 64-bit integers; SGLang crashes on a larger one."""
MAX_NAMED = 10
"""Number of requests with bad seeds that an error names at most."""
MAX_SAMPLES = 4096
"""Number of samples that one request may ask for at most."""

SEED_RULE = "seed and sampling_seed are two names of one number, a signed 64-bit integer that is not negative"

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "ebnf": (None,),
    "frequency_penalty": (None, 0),
    "json_schema": (None,),
    "min_new_tokens": (None, 0),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "regex": (None,),
    "repetition_penalty": (None, 1),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "structural_tag": (None,),
    "top_k": (None, -1, 0),
    "top_p": (None, 1),
}
"""Parameters of SGLang that this engine does not support → the values that are accepted, as they have no effect."""

IGNORED = ("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval")
"""Parameters without meaning for an engine that has no tokenizer; they are ignored."""

KNOWN = ("max_new_tokens", "n", "sampling_seed", "seed", "stop_token_ids", "temperature")


@dataclass(frozen=True)
class SamplingParams:
    """Checked sampling parameters of a request.

    Attributes:
        max_new_tokens: Maximum number of generated tokens; the engine's context is a limit too.
        temperature: Sampling temperature; 0 takes the most likely token.
        n: Samples per prompt.
        seed: Seed of the random numbers; a random one if the request has none.
        stop_token_ids: Tokens that end a sample.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    n: int = 1
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()


def _splitmix64(number: int) -> int:
    """Return a well-mixed 64-bit hash of a number: one step of the generator splitmix64."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample ``index`` of a request: a request for one sample with this seed generates the same.

    Seeds are in the range 0 to :data:`MAX_SEED`. Sample 0 has the seed of its request.
    """
    return _splitmix64(seed ^ _splitmix64(index)) & MAX_SEED if index else seed & MAX_SEED


def seed_problems(params: Mapping[str, Any]) -> list[str]:
    """Return the problems of the seed in sampling parameters, where it may have two names."""
    given = {name: params[name] for name in ("seed", "sampling_seed") if params.get(name) is not None}
    problems = [
        f"{name} must be a whole number from 0 to 2**63 - 1, not {shown(value)}"
        for name, value in given.items()
        if not _is_int(value) or value > MAX_SEED
    ]
    if not problems and len(set(given.values())) == 2:
        problems = [f"seed is {given['seed']}, and sampling_seed is {given['sampling_seed']}"]
    return problems


def check_seeds(requests: Sequence[Mapping[str, Any]]) -> None:
    """Check the seeds of requests before any request is sent: an engine may crash on a seed that is too large.

    Raises:
        RolloutError: Some requests have a bad seed; names the first ten (E101).
    """
    problems = [
        f"request {index}: {problem}"
        for index, request in enumerate(requests)
        for problem in seed_problems(request.get("sampling_params") or {})
    ]
    if problems:
        raise RolloutError([Finding("E101", problem, rule=SEED_RULE) for problem in problems[:MAX_NAMED]])


def uniform(seed: int, index: int, position: int) -> float:
    """Return the random number in [0, 1) with which a token is drawn.

    It depends only on the request's seed, the index of the sample in the request, and the position of the token in
    its sequence, prompt included. The engine and its other requests do not matter. An aborted sample can therefore
    be continued without a difference: send its prompt and its tokens so far as the prompt of a request whose seed is
    :func:`sample_seed`.
    """
    return (_splitmix64(_splitmix64(sample_seed(seed, index)) ^ position) >> 11) / (1 << 53)


def _is_int(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_request(
    prompts: Sequence[Sequence[int]], params: Mapping[str, Any], vocabulary: int, context: int
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Raises:
        RolloutError: The request is invalid; with all of its problems (E101).
    """
    problems: list[Finding] = []

    def complain(message: str, rule: str = "", fixes: tuple[Fix, ...] = ()) -> None:
        problems.append(Finding("E101", message, rule=rule, fixes=fixes))

    if not prompts:
        complain("the request has no prompt")
    for index, prompt in enumerate(prompts):
        name = "the prompt" if len(prompts) == 1 else f"prompt {index}"
        foreign = [token for token in prompt if not _is_int(token) or token >= vocabulary]
        if not prompt:
            complain(f"{name} is empty")
        if len(prompt) >= context:
            complain(
                f"{name} has {counted(len(prompt), 'token')}, and the engine's context is {context:,}",
                "at least one token must fit behind the prompt",
            )
        if foreign:
            some = ", ".join(shown(token, 20) for token in foreign[:3]) + (", …" if len(foreign) > 3 else "")
            complain(
                f"{name} has {counted(len(foreign), 'token id')} out of range: {some}", f"ids are 0 to {vocabulary - 1}"
            )

    wanted = {name: value for name, value in params.items() if name in KNOWN and value is not None}
    for name, value in params.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                complain(f"sampling parameter {name}={shown(value)} is not supported by this engine")
        elif name not in KNOWN and name not in IGNORED:
            near = did_you_mean(str(name), [*KNOWN, *NEUTRAL])
            fixes = (Fix(f"did you mean {near!r}?"),) if near else ()
            complain(f"unknown sampling parameter {shown(name)}", f"known: {', '.join(KNOWN)}", fixes)

    for name, least in (("max_new_tokens", 1), ("n", 1)):
        if name in wanted and not _is_int(wanted[name], least):
            complain(f"{name} must be a whole number from {least} up, not {shown(wanted[name])}")
            del wanted[name]
    for problem in seed_problems(wanted):
        complain(problem, SEED_RULE)
    if wanted.get("n", 1) > MAX_SAMPLES:
        complain(f"n must be at most {MAX_SAMPLES:,}, not {shown(wanted['n'])}")
    temperature = wanted.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or isinstance(temperature, bool) or not 0 <= temperature < math.inf:
        complain(f"temperature must be a number from 0 up, not {shown(temperature)}")
        temperature = 1.0
    stop = wanted.get("stop_token_ids", ())
    if not isinstance(stop, list | tuple) or not all(_is_int(token) for token in stop):
        complain(f"stop_token_ids must be a list of token ids, not {shown(stop)}")
        stop = ()
    if problems:
        raise RolloutError(problems)

    seed = wanted.get("sampling_seed", wanted.get("seed"))
    return SamplingParams(
        wanted.get("max_new_tokens", 128),
        # The router rounds temperatures to 32 bits. Without the same rounding, samples would depend on the router.
        struct.unpack("f", struct.pack("f", min(float(temperature), 3e38)))[0],
        wanted.get("n", 1),
        secrets.randbits(63) if seed is None else seed,
        frozenset(stop),
    )

"""Requests to engines for the unfinished samples of sample groups."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from roost.data.samples import Sample, SampleGroup
from roost.engines.sampling import MAX_SAMPLES, MAX_SEED, SEED_RULE, sample_seed, seed_problems
from roost.errors import Finding, RolloutError, shown

__all__ = ["make_requests", "params_of_samples"]

MAX_NAMED = 10
"""Number of groups with bad seeds that an error names at most."""


def make_requests(
    groups: Sequence[SampleGroup], params: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[list[Sample]]]:
    """Return the requests for all unfinished samples, and the samples that each request is for.

    Every unfinished sample becomes one request with its own seed: with deterministic inference, SGLang draws all
    samples of one request with the same numbers, whether the request has a seed or not. The seed follows from the
    seed of the group and the sample's index, so that an interrupted sample continues without a difference. A group
    without a seed gets a random one in each call. A sample that already has the maximum number of tokens is marked as
    finished here.

    Raises:
        RolloutError: Some groups have seeds that are invalid for engines; names the first ten (E101).
    """
    requests: list[dict[str, Any]] = []
    owners: list[list[Sample]] = []
    longest = params.get("max_new_tokens")
    common = _without_seed(params)
    for group, seed in zip(groups, _seeds(groups, params), strict=True):
        indices = [sample.index for sample in group.samples]
        if len(set(indices)) < len(indices):  # samples that were created without an index
            indices = list(range(len(indices)))
        for index, sample in zip(indices, group.samples, strict=True):
            if sample.is_finished:
                continue
            sampling = {**common, "n": 1, "sampling_seed": sample_seed(seed, index)}
            if longest is not None and sample.output_ids:
                sampling["max_new_tokens"] = int(longest) - len(sample.output_ids)
                if sampling["max_new_tokens"] <= 0:
                    sample.finish_reason = "length"
                    continue
            requests.append({"input_ids": [*sample.prompt_ids, *sample.output_ids], "sampling_params": sampling})
            owners.append([sample])
    return requests, owners


def params_of_samples(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split the parameters of a request for ``n`` samples into those of ``n`` requests for one sample each.

    Raises:
        RolloutError: ``n`` or the seed is out of range (E101).
    """
    count = 1 if params.get("n") is None else params["n"]
    problems = [Finding("E101", problem, rule=SEED_RULE) for problem in seed_problems(params)]
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_SAMPLES:
        problems.append(Finding("E101", f"n must be a whole number from 1 to {MAX_SAMPLES:,}, not {shown(count)}"))
    if problems:
        raise RolloutError(problems)
    seed = _seed_of(params)
    return [{**_without_seed(params), "n": 1, "sampling_seed": sample_seed(seed, index)} for index in range(count)]


def _without_seed(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in ("seed", "sampling_seed")}


def _seed_of(*sources: Mapping[str, Any]) -> int:
    """Return the first seed in the sources; a random one if none has a seed."""
    for source in sources:
        for name in ("sampling_seed", "seed"):
            if source.get(name) is not None:
                return int(source[name])
    return secrets.randbelow(MAX_SEED + 1)


def _seeds(groups: Sequence[SampleGroup], params: Mapping[str, Any]) -> list[int]:
    """Return the seed of each group: its own, else that of ``params``, else a random one."""
    own = [{"seed": group.data.get("seed")} for group in groups]
    problems = seed_problems(params)
    for group, data in zip(groups, own, strict=True):
        problems += [f"group {group.id}: {problem}" for problem in seed_problems(data)]
    if problems:
        raise RolloutError([Finding("E101", problem, rule=SEED_RULE) for problem in problems[:MAX_NAMED]])
    return [_seed_of(data, params) for data in own]

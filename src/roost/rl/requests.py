"""What is missing of groups of samples, as requests to engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roost.rl.samples import Sample, SampleGroup
from roost.rl.sampling import sample_seed

__all__ = ["make_requests"]


def make_requests(
    groups: Sequence[SampleGroup], params: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[list[Sample]]]:
    """The requests for what is missing, and the samples that each answers.

    A new group is one request. Of a group that was begun, every sample that is not finished is one of
    its own, with a seed that makes it go on as if it had never been interrupted.
    A sample that is as long as may be already is finished here.
    """
    requests: list[dict[str, Any]] = []
    owners: list[list[Sample]] = []

    def ask(prompt: Sequence[int], samples: list[Sample], sampling: dict[str, Any], seed: int | None) -> None:
        if seed is not None:
            sampling["seed"] = seed
        requests.append({"input_ids": list(prompt), "sampling_params": sampling})
        owners.append(samples)

    longest = params.get("max_new_tokens")
    for group in groups:
        seed = group.data.get("seed")
        if all(not sample.output_ids and not sample.is_finished for sample in group.samples):
            if group.samples:
                ask(group.samples[0].prompt_ids, list(group.samples), {**params, "n": len(group.samples)}, seed)
            continue
        for sample in group.samples:
            if sample.is_finished:
                continue
            done = len(sample.output_ids)
            sampling = {**params, "n": 1}
            if longest is not None:
                sampling["max_new_tokens"] = int(longest) - done
                if sampling["max_new_tokens"] <= 0:
                    sample.finish_reason = "length"
                    continue
            own = None if seed is None else sample_seed(int(seed), sample.index)
            ask([*sample.prompt_ids, *sample.output_ids], [sample], sampling, own)
    return requests, owners

"""Samples: the answers that engines generate and trainers learn from, grouped by prompt."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Sample", "SampleGroup"]

_FINISHED = frozenset(("stop", "length"))


@dataclass(slots=True)
class Sample:
    """One answer to a prompt.

    Attributes:
        prompt_ids: Tokens of the prompt.
        output_ids: Tokens of the answer that were generated so far.
        logprobs: Log probability of each output token, as computed by the engine.
        versions: Version of the weights that generated each output token.
        index: Index of the sample in its group.
        finish_reason: ``stop`` or ``length`` when the answer is complete, ``abort`` when a weight update interrupted
            it, empty while it is unfinished.
        reward: The reward; ``None`` until one is assigned.
        extra: Further data of the user. It must be JSON-serializable where the sample is saved.
    """

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    index: int = 0
    finish_reason: str = ""
    reward: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete (``stop`` or ``length``)."""
        return self.finish_reason in _FINISHED

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that generated a token; ``None`` where no token has a version."""
        return min(self.versions, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict of JSON values."""
        return dict(zip(_SAMPLE_FIELDS, _sample_values(self), strict=True))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Sample:
        """Return the sample that :meth:`to_json` described."""
        return cls(**fields)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (Sample, _sample_values(self)) if type(self) is Sample else object.__reduce_ex__(self, protocol)


_SAMPLE_FIELDS = tuple(Sample.__dataclass_fields__)


def _sample_values(sample: Sample) -> tuple[Any, ...]:
    return (
        sample.prompt_ids, sample.output_ids, sample.logprobs, sample.versions,
        sample.index, sample.finish_reason, sample.reward, sample.extra,
    )  # fmt: skip


@dataclass(slots=True)
class SampleGroup:
    """All samples of one prompt.

    Attributes:
        id: Unique among all groups of a run: buffers treat a second group with the same id as a duplicate.
        data: Data of the prompt, such as its text and the right answer. It must be JSON-serializable where the group
            is saved.
        samples: The samples.
    """

    id: str
    data: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether every sample is complete."""
        return all(sample.finish_reason in _FINISHED for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that generated a token; ``None`` where no token has a version."""
        return min([min(sample.versions) for sample in self.samples if sample.versions], default=None)

    def copy(self) -> SampleGroup:
        """Return a deep copy."""
        if type(self) is not SampleGroup or any(type(sample) is not Sample for sample in self.samples):
            return copy.deepcopy(self)
        samples = [
            Sample(
                list(one.prompt_ids), list(one.output_ids), list(one.logprobs), list(one.versions),
                one.index, one.finish_reason, one.reward, copy.deepcopy(one.extra),
            )
            for one in self.samples
        ]  # fmt: skip
        return SampleGroup(self.id, copy.deepcopy(self.data), samples)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict of JSON values."""
        return {"id": self.id, "data": self.data, "samples": [sample.to_json() for sample in self.samples]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SampleGroup:
        """Return the group that :meth:`to_json` described."""
        return cls(fields["id"], fields["data"], [Sample.from_json(sample) for sample in fields["samples"]])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as plain tuples, which is several times as fast as one object per sample."""
        if type(self) is not SampleGroup or any(type(sample) is not Sample for sample in self.samples):
            return object.__reduce_ex__(self, protocol)
        return (_group_of, (self.id, self.data, [_sample_values(sample) for sample in self.samples]))


def _group_of(key: str, data: dict[str, Any], samples: list[tuple[Any, ...]]) -> SampleGroup:
    return SampleGroup(key, data, [Sample(*values) for values in samples])

"""What a generator makes and a trainer uses: samples, kept together per prompt."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Sample", "SampleGroup"]

_FINISHED = frozenset(("stop", "length"))


@dataclass(slots=True)
class Sample:
    """One answer to a prompt, token by token.

    Attributes:
        prompt_ids: Tokens of the prompt.
        output_ids: Tokens of the answer, so far.
        logprobs: Log probability of each of them, as the engine saw it.
        versions: Weight version that made each of them.
        index: Index in its group.
        finish_reason: ``stop`` or ``length`` when it is complete, ``abort`` when a weight update cut it
            off, empty when nothing ended it yet.
        reward: Its reward, once there is one.
        extra: Whatever else belongs to it; what is saved must be JSON.
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
        """Whether the answer is complete."""
        return self.finish_reason in _FINISHED

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that made a token of it; ``None`` where no token is marked."""
        return min(self.versions, default=None)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain values."""
        return dict(zip(_SAMPLE_FIELDS, _sample_values(self), strict=True))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Sample:
        """The sample that :meth:`to_json` described."""
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
        id: Unique among all groups of a run; a second group of the same id is taken for the same one.
        data: Whatever belongs to the prompt (its text, the right answer); what is saved must be JSON.
        samples: Its samples.
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
        """The oldest weights that made a token of it; ``None`` where no token is marked."""
        return min([min(sample.versions) for sample in self.samples if sample.versions], default=None)

    def copy(self) -> SampleGroup:
        """Return a copy that shares nothing that can change."""
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
        """A mapping of plain values."""
        return {"id": self.id, "data": self.data, "samples": [sample.to_json() for sample in self.samples]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SampleGroup:
        """The group that :meth:`to_json` described."""
        return cls(fields["id"], fields["data"], [Sample.from_json(sample) for sample in fields["samples"]])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As plain tuples, which pickle several times as fast as one object per sample."""
        if type(self) is not SampleGroup or any(type(sample) is not Sample for sample in self.samples):
            return object.__reduce_ex__(self, protocol)
        return (_group_of, (self.id, self.data, [_sample_values(sample) for sample in self.samples]))


def _group_of(key: str, data: dict[str, Any], samples: list[tuple[Any, ...]]) -> SampleGroup:
    return SampleGroup(key, data, [Sample(*values) for values in samples])

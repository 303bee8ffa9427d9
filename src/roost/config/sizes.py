"""Reading the few values outside the ``cluster`` section that planning looks at."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from roost.config import keys
from roost.config.components import Component
from roost.errors import Finding
from roost.source import Fields, Tree

__all__ = ["Algorithm", "ParallelSizes", "read_algorithm", "read_sizes"]


@dataclass(frozen=True)
class ParallelSizes:
    """Parallel sizes in the section of a component; ``None`` where a size is not given.

    Attributes:
        model_tensor: GPUs that share each tensor of a model that is trained or scored.
        model_context: GPUs that share each of its sequences.
        model_pipeline: Its pipeline stages.
        engine_tensor: GPUs that share each tensor of an engine.
        engine_pipeline: Pipeline stages of an engine.
        engine_tensor_tree: The value of ``engine_tensor``, for the places of errors.
        problems: Wrong sizes. They matter only if the component is placed.
    """

    model_tensor: int | None = None
    model_context: int | None = None
    model_pipeline: int | None = None
    engine_tensor: int | None = None
    engine_pipeline: int | None = None
    engine_tensor_tree: Tree | None = None
    problems: tuple[Finding, ...] = ()

    @property
    def tensor(self) -> int:
        """The larger of both tensor-parallel sizes."""
        return max(self.model_tensor or 1, self.engine_tensor or 1)

    @property
    def pipeline(self) -> int:
        """The larger of both numbers of pipeline stages."""
        return max(self.model_pipeline or 1, self.engine_pipeline or 1)


@dataclass(frozen=True)
class Algorithm:
    """Settings of the algorithm that planning looks at.

    Attributes:
        recompute_logprobs: Whether inference recomputes log-probabilities.
        problems: Wrong values. They matter only if the setting does.
    """

    recompute_logprobs: bool = False
    problems: tuple[Finding, ...] = ()


def read_sizes(tree: Tree, components: Iterable[Component]) -> dict[str, ParallelSizes]:
    """Return the sizes of each section that a component or a role has."""
    names = dict.fromkeys(["rollout", *keys.MODEL_ROLES])
    for component in components:
        names[component.name] = names[component.role] = None
    names |= dict.fromkeys(key for key, _ in tree.items() if re.match(r"rollout-[0-9]+\Z", key))  # groups of a layout
    return {name: _sizes_in(section) for name in names if (section := tree.get(name)) is not None}


def _sizes_in(section: Tree) -> ParallelSizes:
    if not section.is_mapping:
        return ParallelSizes()
    findings: list[Finding] = []
    engine = Fields(section, findings, section.key)
    model_tree = engine.read(keys.MODEL)
    sizes = ParallelSizes(
        engine_tensor=engine.read(keys.ENGINE_TP),
        engine_pipeline=engine.read(keys.ENGINE_PP),
        engine_tensor_tree=section.get(keys.ENGINE_TP.name),
    )
    if model_tree is not None and model_tree.is_mapping:
        model = Fields(model_tree, findings, "model")
        sizes = replace(
            sizes,
            model_tensor=model.read(keys.MODEL_TP),
            model_context=model.read(keys.MODEL_CP),
            model_pipeline=model.read(keys.MODEL_PP),
        )
    return replace(sizes, problems=tuple(findings))


def read_algorithm(tree: Tree) -> Algorithm:
    """Return the settings of the algorithm."""
    section = tree.get("algorithm")
    if section is None or not section.is_mapping:
        return Algorithm()
    findings: list[Finding] = []
    value = Fields(section, findings, keys.ALGORITHM.what).read(keys.RECOMPUTE_LOGPROBS)
    return Algorithm(value, tuple(findings))

"""The ``cluster.layout`` section of a job: numbers instead of placements."""

from __future__ import annotations

from dataclasses import dataclass

from roost.config import keys
from roost.errors import Finding
from roost.source import Fields, Tree

__all__ = ["LayoutSection", "RolloutGroup", "read_layout"]


@dataclass(frozen=True)
class RolloutGroup:
    """Engines of one size, as written.

    Attributes:
        num_gpus: GPUs of all its engines together.
        num_gpus_per_engine: GPUs of one engine; ``None``: as the layout says for all groups.
        placeholder: The GPUs are reserved, and nothing is started on them.
    """

    num_gpus: int
    num_gpus_per_engine: int | None = None
    placeholder: bool = False


@dataclass(frozen=True)
class LayoutSection:
    """A layout as written. The numbers are described in ``config.keys``.

    Attributes:
        tree: The section, for the places of errors.
        mode: How trainer and engines share GPUs; empty if only ``colocate`` says so.
        colocate: Whether trainer and engines share GPUs.
        rollout_groups: Groups of engines; ``None`` for a single group.
    """

    tree: Tree
    mode: str = ""
    colocate: bool = False
    actor_num_nodes: int = 1
    actor_num_gpus_per_node: int = 0
    rollout_num_gpus: int = 0
    rollout_num_gpus_per_engine: int = 1
    num_gpus_per_node: int | None = None
    num_gpus_per_actor: float | None = None
    num_gpus_per_critic: float | None = None
    num_gpus_per_rollout_engine: float | None = None
    debug_train_only: bool = False
    debug_rollout_only: bool = False
    external_engines: bool = False
    async_training: bool = False
    use_critic: bool = False
    rollout_groups: tuple[RolloutGroup, ...] | None = None

    def at(self, path: str) -> Tree:
        """Return the value at a dotted path of keys, or the innermost one around it that is written."""
        tree = self.tree
        for key in path.split("."):
            if tree.is_list and key.isdigit() and int(key) < len(tree.value):
                tree = tree.value[int(key)]
            else:
                tree = tree.get(key) or tree
        return tree


def read_layout(tree: Tree | None, findings: list[Finding]) -> LayoutSection | None:
    """Return the layout of a ``cluster`` section; ``None`` if it is missing or not a mapping."""
    if tree is None or tree.value is None:
        return None
    fields = keys.LAYOUT.open(tree, findings)
    if not fields.ok:
        return None
    numbers = fields.read_all(keys.LAYOUT_NUMBERS)
    if keys.ACTOR_GPUS_PER_NODE.name not in numbers and not numbers[keys.DEBUG_ROLLOUT_ONLY.name]:
        fields.require(keys.ACTOR_GPUS_PER_NODE)
    groups = None
    if tree.get(keys.ROLLOUT_GROUPS.name) is not None:
        groups = tuple(_read_group(entry, findings) for entry in fields.read(keys.ROLLOUT_GROUPS))
    mode, colocate = _read_mode(fields)
    return LayoutSection(tree, mode, colocate, **numbers, rollout_groups=groups)


def _read_mode(fields: Fields) -> tuple[str, bool]:
    """Return the mode as written, and whether trainer and engines share GPUs."""
    mode = fields.read(keys.LAYOUT_MODE)
    is_shared = mode in ("collocated", "hybrid")
    colocate = fields.boolean(keys.COLOCATE.name, is_shared)
    if mode and colocate != is_shared:
        at = fields.tree.value[keys.COLOCATE.name]
        fields.complain("204", f"mode is {mode}, and colocate is {str(colocate).lower()}", at)
    return mode, colocate


def _read_group(tree: Tree, findings: list[Finding]) -> RolloutGroup:
    fields = keys.ROLLOUT_GROUP.open(tree, findings)
    fields.require(keys.GROUP_GPUS)
    return RolloutGroup(
        fields.read(keys.GROUP_GPUS) or 0,
        fields.read(keys.GROUP_GPUS_PER_ENGINE),
        fields.read(keys.GROUP_PLACEHOLDER),
    )

"""The ``cluster.layout`` section of a job: numbers instead of placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roost.errors import Finding
from roost.source import Fields, Tree

__all__ = ["LayoutSection", "read_layout"]

MODES = ("collocated", "disaggregated", "hybrid")
COUNTS = {
    "actor_num_nodes": 0,
    "actor_num_gpus_per_node": 0,
    "rollout_num_gpus": 0,
    "rollout_num_gpus_per_engine": 1,
    "num_gpus_per_node": 1,
}
"""Counts, and the least that each may be."""
SHARES = ("num_gpus_per_actor", "num_gpus_per_critic", "num_gpus_per_rollout_engine")
SWITCHES = ("debug_train_only", "debug_rollout_only", "external_engines", "async_training", "use_critic")
KEYS = ("mode", "colocate", *COUNTS, *SHARES, *SWITCHES, "rollout_groups")
GROUP_KEYS = ("num_gpus", "num_gpus_per_engine", "placeholder")


@dataclass(frozen=True)
class LayoutSection:
    """A layout as written.

    Attributes:
        tree: The section.
        mode: What it says of how trainer and engines share; empty: only ``colocate`` does.
        arguments: What ``resolve_layout`` takes, without ``num_gpus_per_node``.
        num_gpus_per_node: What the job believes of the nodes, if it says it.
    """

    tree: Tree
    mode: str
    arguments: Mapping[str, Any]
    num_gpus_per_node: int | None = None

    def at(self, path: str) -> Tree:
        """The value that an argument comes from; what is around it where it is not written."""
        tree = self.tree
        for key in path.split("."):
            if tree.is_list and key.isdigit() and int(key) < len(tree.value):
                tree = tree.value[int(key)]
            else:
                tree = tree.get(key) or tree
        return tree


def read_layout(section: Tree, findings: list[Finding]) -> LayoutSection | None:
    """The layout of a ``cluster`` section; ``None`` where there is none, or it is no mapping."""
    tree = section.get("layout")
    if tree is None or tree.value is None:
        return None
    fields = Fields(tree, findings, "the layout")
    if not fields.ok:
        return None
    fields.only(KEYS)
    arguments: dict[str, Any] = {}
    for key, minimum in COUNTS.items():
        value = fields.integer(key, minimum)
        if value is not None:
            arguments[key] = value
    for key in SHARES:
        share = fields.number(key, maximum=1.0)
        if share is not None:
            arguments[key] = share
    for key in SWITCHES:
        arguments[key] = fields.boolean(key)
    if "actor_num_gpus_per_node" not in arguments and not arguments["debug_rollout_only"]:
        fields.require("actor_num_gpus_per_node", "actor_num_gpus_per_node: 8")
    arguments.setdefault("actor_num_nodes", 1)
    arguments.setdefault("actor_num_gpus_per_node", 0)
    if tree.get("rollout_groups") is not None:
        arguments["rollout_groups"] = [_read_group(entry, findings) for entry in fields.entries("rollout_groups")]
    mode, arguments["colocate"] = _read_mode(fields)
    return LayoutSection(tree, mode, arguments, arguments.pop("num_gpus_per_node", None))


def _read_mode(fields: Fields) -> tuple[str, bool]:
    """The mode as written, and whether trainer and engines share accelerators."""
    tree = fields.tree.get("mode")
    mode = ""
    if tree is not None and tree.value is not None:
        if tree.value in MODES:
            mode = str(tree.value)
        else:
            fields.wrong(tree, "mode is one of " + ", ".join(MODES))
    is_shared = mode in ("collocated", "hybrid")
    colocate = fields.boolean("colocate", is_shared)
    if mode and colocate != is_shared:
        at = fields.tree.value["colocate"]
        fields.complain("204", f"mode is {mode}, and colocate is {str(colocate).lower()}", at)
    return mode, colocate


def _read_group(tree: Tree, findings: list[Finding]) -> dict[str, Any]:
    fields = Fields(tree, findings, "a rollout group")
    fields.only(GROUP_KEYS)
    fields.require("num_gpus", "num_gpus: 8")
    count, size = fields.integer("num_gpus", 0, 0), fields.integer("num_gpus_per_engine", 1)
    return {"num_gpus": count, "num_gpus_per_engine": size, "placeholder": fields.boolean("placeholder")}

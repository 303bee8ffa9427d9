"""``Placement``: the node and the hardware of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar

from roost.errors import Finding, Fix, PlacementError
from roost.hardware import AcceleratorType

__all__ = ["Placement", "accept_older_names"]

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, init=False)
class Placement:
    """The node and the hardware of one process of a component.

    Aliases for code written for older launchers: ``node_id``, ``node_rank``, ``local_gpu_id``,
    ``cuda_visible_devices``, ``isolate_gpu``.

    Attributes:
        rank: Rank of the process in its component.
        cluster_node_rank: Rank of its node in the cluster.
        placement_node_rank: Index of its node among the nodes that the component uses.
        local_accelerator_rank: Node-local rank of the first accelerator of the process; -1 if it has none.
        accelerator_type: Vendor of the node's accelerators.
        local_rank: Index of the process among the processes of the component on the same node.
        local_world_size: Number of processes of the component on the same node.
        visible_accelerators: Accelerator ids for the vendor's visible-devices variable.
        isolate_accelerator: Whether the process sees only its own accelerators.
        local_hardware_ranks: Node-local ranks of the hardware given to the process.
        node_group_label: Node group in which that hardware was counted.
    """

    rank: int
    cluster_node_rank: int
    placement_node_rank: int
    local_accelerator_rank: int
    accelerator_type: AcceleratorType
    local_rank: int
    local_world_size: int
    visible_accelerators: tuple[str, ...]
    isolate_accelerator: bool
    local_hardware_ranks: tuple[int, ...]
    node_group_label: str

    # A plan of 100,000 processes makes as many placements. The constructor that the decorator writes for a frozen
    # class takes twice the time of this one.
    def __init__(
        self,
        rank: int,
        cluster_node_rank: int,
        placement_node_rank: int,
        local_accelerator_rank: int,
        accelerator_type: AcceleratorType,
        local_rank: int,
        local_world_size: int,
        visible_accelerators: tuple[str, ...],
        isolate_accelerator: bool,
        local_hardware_ranks: tuple[int, ...],
        node_group_label: str,
    ) -> None:
        _set_rank(self, rank)
        _set_cluster_node_rank(self, cluster_node_rank)
        _set_placement_node_rank(self, placement_node_rank)
        _set_local_accelerator_rank(self, local_accelerator_rank)
        _set_accelerator_type(self, accelerator_type)
        _set_local_rank(self, local_rank)
        _set_local_world_size(self, local_world_size)
        _set_visible_accelerators(self, visible_accelerators)
        _set_isolate_accelerator(self, isolate_accelerator)
        _set_local_hardware_ranks(self, local_hardware_ranks)
        _set_node_group_label(self, node_group_label)

    @property
    def accelerators(self) -> tuple[int, ...]:
        """Node-local ranks of the accelerators given to the process; empty for robots and bare nodes."""
        return self.local_hardware_ranks if self.local_accelerator_rank >= 0 else ()


# Setters of the slots; ``__setattr__`` of a frozen class refuses.
(
    _set_rank,
    _set_cluster_node_rank,
    _set_placement_node_rank,
    _set_local_accelerator_rank,
    _set_accelerator_type,
    _set_local_rank,
    _set_local_world_size,
    _set_visible_accelerators,
    _set_isolate_accelerator,
    _set_local_hardware_ranks,
    _set_node_group_label,
) = (getattr(Placement, field.name).__set__ for field in fields(Placement))

_ALIASES = {
    "node_id": "cluster_node_rank",
    "node_rank": "placement_node_rank",
    "local_gpu_id": "local_accelerator_rank",
    "cuda_visible_devices": "visible_accelerators",
    "isolate_gpu": "isolate_accelerator",
}
for _old, _new in _ALIASES.items():
    setattr(Placement, _old, property(attrgetter(_new), doc=f"Alias of ``{_new}``."))


def accept_older_names(names: Mapping[str, str]) -> Callable[[_F], _F]:
    """Return a decorator that lets a function accept older names of keyword arguments.

    Args:
        names: Older name → current name, such as ``{"start_gpu_id": "start_hardware_rank"}``.
    """

    def decorate(function: _F) -> _F:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    message = f"{old!r} is the older name of {new!r}: give one of the two"
                    raise PlacementError([Finding("P201", message, fixes=(Fix("keep", f"{new}=…"),))])
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate

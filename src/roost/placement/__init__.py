"""Resolve a job on a topology: the node and hardware of every process. Pure, and linear in the number of processes."""

from roost.placement.component import ComponentPlacement, HybridComponentPlacement, PlacementMode
from roost.placement.model_parallel import ModelParallelComponentPlacement
from roost.placement.placement import Placement
from roost.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
)

__all__ = [
    "ComponentPlacement",
    "FlexiblePlacementStrategy",
    "HybridComponentPlacement",
    "ModelParallelComponentPlacement",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "Placement",
    "PlacementMode",
    "PlacementStrategy",
]

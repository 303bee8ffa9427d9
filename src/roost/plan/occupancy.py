"""The components on each accelerator, in a few bytes per accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roost.plan.plan import ComponentPlan
    from roost.topology import Topology

__all__ = ["Occupancy"]


class Occupancy:
    """For every accelerator, the number of processes of each component.

    Accelerators with the same numbers share one small integer, their *crowd*; crowd 0 has no process. A cluster of
    100,000 accelerators has a handful of crowds, so checks and maps work on crowds instead of accelerators.

    A crowd is stored as an earlier crowd plus one component with its number of processes. Its size in
    memory therefore does not depend on how many processes or components share an accelerator.

    Attributes:
        crowds: The crowd of each accelerator, node by node.
        starts: Index in ``crowds`` of each node's first accelerator, and the end.
    """

    def __init__(self, topology: Topology, components: Sequence[ComponentPlan]) -> None:
        self.starts = [0, *accumulate(len(node.accelerator_ids) for node in topology.nodes)]
        self.crowds = [0] * self.starts[-1]
        self._made_of: list[tuple[int, int, int]] = [(0, 0, 0)]  # earlier crowd, component index, its processes
        for index, component in enumerate(components):
            self._add(index, component)

    def _add(self, index: int, component: ComponentPlan) -> None:
        starts, crowds, made_of = self.starts, self.crowds, self._made_of
        processes: dict[int, int] = {}  # accelerator → processes of this component on it
        for placement in component.placements:
            if placement.local_accelerator_rank < 0:
                continue
            start = starts[placement.cluster_node_rank]
            for local in placement.local_hardware_ranks:
                processes[start + local] = processes.get(start + local, 0) + 1
        grown: dict[tuple[int, int], int] = {}
        for accelerator, count in processes.items():
            key = (crowds[accelerator], count)
            crowd = grown.get(key)
            if crowd is None:
                crowd = grown[key] = len(made_of)
                made_of.append((key[0], index, count))
            crowds[accelerator] = crowd

    def members(self, crowd: int) -> dict[int, int]:
        """Return by component index the number of its processes on an accelerator of a crowd."""
        found: list[tuple[int, int]] = []
        while crowd:
            crowd, index, count = self._made_of[crowd]
            found.append((index, count))
        return dict(reversed(found))

    def of_node(self, node_rank: int) -> tuple[int, ...]:
        """Return the crowds of a node's accelerators."""
        return tuple(self.crowds[self.starts[node_rank] : self.starts[node_rank + 1]])

    def where(self) -> dict[int, list[tuple[int, int]]]:
        """Return by crowd its accelerators as (node rank, local rank), in order."""
        found: dict[int, list[tuple[int, int]]] = {}
        for node_rank, start in enumerate(self.starts[:-1]):
            for local, crowd in enumerate(self.crowds[start : self.starts[node_rank + 1]]):
                found.setdefault(crowd, []).append((node_rank, local))
        return found

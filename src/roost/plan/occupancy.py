"""Who is on each accelerator, at a few bytes per accelerator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roost.plan.plan import ComponentPlan
    from roost.topology import Topology

__all__ = ["Occupancy"]


class Occupancy:
    """For every accelerator, which components have how many processes on it.

    Accelerators with the same company share one small number, their *crowd*; crowd 0 is nobody.
    A cluster of 100,000 accelerators has a handful of crowds, so that checks and maps look at
    crowds, not at accelerators.

    Attributes:
        crowds: The crowd of each accelerator, node by node.
        starts: Index in ``crowds`` of each node's first accelerator, and the end.
    """

    def __init__(self, topology: Topology, components: Sequence[ComponentPlan]) -> None:
        self.starts = [0, *accumulate(len(node.accelerator_ids) for node in topology.nodes)]
        self.crowds = [0] * self.starts[-1]
        self._grown: dict[tuple[int, int], int] = {}
        self._members: list[tuple[int, ...]] = [()]
        for index, component in enumerate(components):
            self._add(index, component)

    def _add(self, index: int, component: ComponentPlan) -> None:
        starts, crowds, grown = self.starts, self.crowds, self._grown
        for placement in component.placements:
            if placement.local_accelerator_rank < 0:
                continue
            start = starts[placement.cluster_node_rank]
            for local in placement.local_hardware_ranks:
                key = (crowds[start + local], index)
                crowd = grown.get(key)
                if crowd is None:
                    crowd = grown[key] = len(self._members)
                    self._members.append((*self._members[key[0]], index))
                crowds[start + local] = crowd

    def members(self, crowd: int) -> dict[int, int]:
        """Index of each component in a crowd → how many of its processes are on the accelerator."""
        return dict(Counter(self._members[crowd]))

    def of_node(self, node_rank: int) -> tuple[int, ...]:
        """The crowds of a node's accelerators."""
        return tuple(self.crowds[self.starts[node_rank] : self.starts[node_rank + 1]])

    def where(self) -> dict[int, list[tuple[int, int]]]:
        """Crowd → its accelerators as (node rank, local rank), in order."""
        found: dict[int, list[tuple[int, int]]] = {}
        for node_rank, start in enumerate(self.starts[:-1]):
            for local, crowd in enumerate(self.crowds[start : self.starts[node_rank + 1]]):
                found.setdefault(crowd, []).append((node_rank, local))
        return found

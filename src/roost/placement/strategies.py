"""Placement strategies: turn a few numbers into a ``Placement`` for each process."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from roost.errors import Finding, Fix, PlacementError, shown
from roost.placement.placement import Placement, accept_older_names
from roost.placement.resources import NodeHardware, Resources, place
from roost.ranks import MAX_RANK
from roost.topology import NodeGroup, Topology

__all__ = [
    "FlexiblePlacementStrategy",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "PlacementStrategy",
]

_OLDER = {"isolate_gpu": "isolate_accelerator"}
MAX_PROCESSES = 2**24
"""Largest number of processes of one component: a larger number is a typing error."""


class PlacementStrategy(ABC):
    """Base class of strategies, which decide where the processes of one worker group live.

    A strategy of your own is a subclass with a :meth:`get_placement`; a launch needs nothing else.

    Attributes:
        node_group_labels: Groups in which resource ranks are counted; empty for the whole cluster.
        node_groups: The definitions of these groups, if a job file has them.
    """

    def __init__(self, node_group: str | Sequence[str] | None = None) -> None:
        self.node_group_labels = _labels(node_group)
        self.node_groups: tuple[NodeGroup, ...] = ()
        self._counted: Resources | None = None

    @abstractmethod
    def get_placement(self, cluster: Any, isolate_accelerator: bool = True) -> list[Placement]:
        """Return the placement of every process, in rank order.

        Args:
            cluster: A live cluster or a topology.
            isolate_accelerator: Whether a process sees only its own accelerators.
        """

    def _resources(self, cluster: Any, as_nodes: bool = False) -> Resources:
        topology = Topology.of(cluster)
        if self._counted is not None and self._counted.topology is topology and self._counted.as_nodes == as_nodes:
            return self._counted
        missing = [group for group in self.node_groups if not topology.has_group(group.label)]
        return Resources(topology.adding(missing) if missing else topology, self.node_group_labels, as_nodes)

    def _remembering(self, resources: Resources) -> PlacementStrategy:
        """Keep the node groups of a job, which another cluster may lack, and the resources counted in them.

        Counting the resources once for each component would take n² steps for n components on n nodes.
        """
        self.node_groups = tuple(resources.topology.group(label) for label in self.node_group_labels)
        self._counted = resources
        return self

    def __repr__(self) -> str:
        fields = {key: value for key, value in vars(self).items() if not key.startswith("_") and value != ()}
        return f"{type(self).__name__}({', '.join(f'{k}={shown(v)}' for k, v in fields.items())})"


class PackedPlacementStrategy(PlacementStrategy):
    """Fills a range of resources block by block.

    A block of ``num_hardware_per_process * stride`` consecutive resources serves ``stride``
    processes; process j takes ``block[j], block[j + stride], …``. With two resources per process,
    ``stride=1`` gives ``0,1 · 2,3`` and ``stride=2`` gives ``0,2 · 1,3``. All resources of a process are
    on one node.

    Args:
        start_hardware_rank: First resource.
        end_hardware_rank: Last resource, included.
        num_hardware_per_process: Resources per process.
        stride: Distance between the resources of one process.
        node_group: Label or labels of the groups to count in; ``None`` for the whole cluster.

    Raises:
        PlacementError: With every problem of these numbers.
    """

    @accept_older_names(
        {
            "start_gpu_id": "start_hardware_rank",
            "end_gpu_id": "end_hardware_rank",
            "num_gpus_per_process": "num_hardware_per_process",
        }
    )
    def __init__(
        self,
        start_hardware_rank: int,
        end_hardware_rank: int,
        num_hardware_per_process: int = 1,
        stride: int = 1,
        node_group: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(node_group)
        findings: list[Finding] = []
        start = _integer("start_hardware_rank", start_hardware_rank, 0, findings)
        end = _integer("end_hardware_rank", end_hardware_rank, 0, findings)
        per_process = _integer("num_hardware_per_process", num_hardware_per_process, 1, findings)
        step = _integer("stride", stride, 1, findings)
        if not findings:
            findings.extend(_check_packed(start, end, per_process, step))
        if findings:
            raise PlacementError(findings)
        self.start_hardware_rank = start
        self.end_hardware_rank = end
        self.num_hardware_per_process = per_process
        self.stride = step

    @accept_older_names(_OLDER)
    def get_placement(self, cluster: Any, isolate_accelerator: bool = True) -> list[Placement]:
        """Return the placement of every process, in rank order.

        Raises:
            PlacementError: A rank is out of range, or a process would span nodes.
        """
        resources = self._resources(cluster)
        outside = resources.outside(range(self.start_hardware_rank, self.end_hardware_rank + 1))
        if outside is not None:
            raise PlacementError([outside])
        return place(self._runs(resources), isolate_accelerator)

    def _runs(self, resources: Resources) -> Iterator[tuple[NodeHardware, tuple[tuple[int, ...], ...]]]:
        block = self.num_hardware_per_process * self.stride
        start, end = self.start_hardware_rank, self.end_hardware_rank + 1
        shapes: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
        for part in resources.nodes_of(range(start, end)):
            low, high = max(start, part.first) - part.first, min(end, part.end) - part.first
            if (high - low) % block:
                raise PlacementError([self._crossing(resources, part, high)])
            shape = shapes.get((low, high))
            if shape is None:
                shape = shapes[low, high] = tuple(
                    tuple(range(first + j, first + block, self.stride))
                    for first in range(low, high, block)
                    for j in range(self.stride)
                )
            yield part, shape

    def _crossing(self, resources: Resources, part: NodeHardware, high: int) -> Finding:
        """Return the finding about a block that crosses the end of a node."""
        block = self.num_hardware_per_process * self.stride
        start, end = self.start_hardware_rank, self.end_hardware_rank + 1
        inside = (part.first + high - start) // block
        first = start + inside * block
        rank = inside * self.stride
        noun = resources.noun(part, 2)
        fits = []
        for other in resources.nodes_of(range(start, end)):
            low = max(start, other.first)
            usable = (min(end, other.end) - low) // block * block
            if usable:
                fits.append(f"{low}-{low + usable - 1}" if usable > 1 else f"{low}")
        if not fits:  # no part of the range fits: suggest the first node that has a whole block
            fits = [f"{s.first}-{s.first + block - 1}" for s in resources.by_node if s.count >= block][:1]
        ranges = ", ".join(fits[:6]) + (f", … {len(fits) - 6:,} more" if len(fits) > 6 else "")
        wanted = f"{first}-{first + block - 1}" if block > 1 else f"{first}"
        return Finding(
            "P203",
            f"process {rank} would span nodes: its block is {noun} {wanted}, and node {part.node.rank} "
            f"has {part.count} ({part.ranks})",
            context=resources.context,
            rule=f"a block of num_hardware_per_process * stride ({block}) lies on one node",
            fixes=(Fix("ranges that fit", ranges),) if ranges else (Fix("no node has that many"),),
        )


class FlexiblePlacementStrategy(PlacementStrategy):
    """Gives each process the resources in its own list.

    Each list is sorted, and processes are ordered by their first rank. Two processes may share resources.

    Args:
        hardware_ranks_list: A list of resource ranks per process.
        node_group_label: Label or labels of the groups to count in; ``None`` for the whole cluster.

    Raises:
        PlacementError: With every list that is empty, repeats a rank, or holds something that is not a rank.
    """

    def __init__(
        self,
        hardware_ranks_list: Iterable[Iterable[int]],
        node_group_label: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(node_group_label)
        given = _iterate(hardware_ranks_list, "hardware_ranks_list")
        # One rank per process is the usual case; a flat list of ranks is its cheapest form.
        self._singles: list[int] = _single_ranks(given)
        self._lists: list[tuple[int, ...]] = [] if self._singles else _rank_lists(given)

    @classmethod
    def _trusted(cls, lists: list[tuple[int, ...]], labels: Sequence[str]) -> FlexiblePlacementStrategy:
        """Return a strategy for lists that are known to be valid and sorted."""
        strategy = cls.__new__(cls)
        PlacementStrategy.__init__(strategy, list(labels))
        is_single = max(map(len, lists)) == 1
        strategy._singles = [ranks[0] for ranks in lists] if is_single else []
        strategy._lists = [] if is_single else lists
        return strategy

    def __repr__(self) -> str:
        return f"FlexiblePlacementStrategy({shown(self.hardware_ranks_list)}, {self.node_group_labels!r})"

    @property
    def hardware_ranks_list(self) -> list[tuple[int, ...]]:
        """The resource ranks of each process, sorted."""
        return [(rank,) for rank in self._singles] or list(self._lists)

    @accept_older_names(_OLDER)
    def get_placement(self, cluster: Any, isolate_accelerator: bool = True) -> list[Placement]:
        """Return the placement of every process, in rank order.

        Raises:
            PlacementError: A rank is out of range, or a process would have resources of two nodes or types.
        """
        resources = self._resources(cluster)
        last = self._singles[-1] if self._singles else max(map(operator.itemgetter(-1), self._lists))
        outside = resources.outside(range(last, last + 1))
        if outside is not None:
            raise PlacementError([outside])
        return place(self._runs(resources), isolate_accelerator)

    def _runs(self, resources: Resources) -> Iterator[tuple[NodeHardware, tuple[tuple[int, ...], ...]]]:
        return self._single_runs(resources) if self._singles else self._general_runs(resources)

    def _single_runs(self, resources: Resources) -> Iterator[tuple[NodeHardware, tuple[tuple[int, ...], ...]]]:
        """Yield the runs of processes with one resource each: node by node, without a look at each process."""
        firsts = self._singles
        singles = [(local,) for local in range(resources.most_per_node)]
        index = 0
        while index < len(firsts):
            part = resources.node_of(firsts[index])
            end = bisect_left(firsts, part.end, index)
            base = part.first
            yield part, tuple([singles[rank - base] for rank in firsts[index:end]])
            index = end

    def _general_runs(self, resources: Resources) -> Iterator[tuple[NodeHardware, tuple[tuple[int, ...], ...]]]:
        part = resources.by_node[0]
        end, base = part.end, part.first
        run: list[tuple[int, ...]] = []
        for rank, ranks in enumerate(self._lists):
            first = ranks[0]
            if first >= end:
                if run:
                    yield part, tuple(run)
                    run = []
                part = resources.node_of(first)
                end, base = part.end, part.first
            if len(ranks) == 1:
                run.append((first - base,))
            elif ranks[-1] < end:
                run.append(tuple([r - base for r in ranks]))
            else:
                raise PlacementError([_spanning(resources, rank, ranks, part)])
        if run:
            yield part, tuple(run)


class NodePlacementStrategy(PlacementStrategy):
    """Puts processes on nodes, without giving them accelerators.

    Args:
        node_ranks: The node of each process; sorted before ranks are given.
        node_group_label: Label or labels of the groups to count nodes in; ``None`` for all nodes.

    Raises:
        PlacementError: With every value that is not a rank; or there are no processes.
    """

    def __init__(self, node_ranks: Iterable[int], node_group_label: str | Sequence[str] | None = None) -> None:
        super().__init__(node_group_label)
        findings: list[Finding] = []
        ranks = [_integer("a node rank", rank, 0, findings) for rank in _iterate(node_ranks, "node_ranks")]
        if not ranks:
            findings.append(Finding("P204", "node_ranks is empty: there is no process to place"))
        if findings:
            raise PlacementError(findings)
        self.node_ranks: list[int] = sorted(ranks)

    @accept_older_names(_OLDER)
    def get_placement(self, cluster: Any, isolate_accelerator: bool = True) -> list[Placement]:
        """Return the placement of every process, in rank order.

        Raises:
            PlacementError: A node rank is out of range.
        """
        resources = self._resources(cluster, as_nodes=True)
        last = self.node_ranks[-1]
        outside = resources.outside(range(last, last + 1))
        if outside is not None:
            raise PlacementError([outside])
        runs = ((resources.by_node[rank], sum(1 for _ in run)) for rank, run in groupby(self.node_ranks))
        return place(((part, ((),) * count) for part, count in runs), isolate_accelerator)


def _integer(name: str, value: Any, minimum: int, findings: list[Finding]) -> int:
    try:
        number = operator.index(value) if not isinstance(value, bool) else None
    except TypeError:
        number = None
    if number is None or not minimum <= number < MAX_RANK:
        findings.append(Finding("P201", f"{name} is a whole number from {minimum} up, not {shown(value)}"))
        return minimum
    return number


def _check_packed(start: int, end: int, per_process: int, stride: int) -> Iterator[Finding]:
    total, block = end - start + 1, per_process * stride
    if total < 1:
        fix = Fix("the other way round", f"start_hardware_rank={end}, end_hardware_rank={start}")
        message = f"the range {start}-{end} runs backwards"
        yield Finding("P202", message, rule="start_hardware_rank <= end_hardware_rank", fixes=(fix,))
    elif total // per_process > MAX_PROCESSES:
        message = f"{total // per_process:,} processes: more than {MAX_PROCESSES:,} is a typing error"
        yield Finding("P103", message)
    elif total % block:
        fits = [size for size in (total // block * block, (total // block + 1) * block) if size]
        yield Finding(
            "P202",
            f"{total} resources ({start}-{end}) are no multiple of {block} "
            f"({per_process} per process with stride {stride})",
            rule="(end - start + 1) is a multiple of num_hardware_per_process * stride",
            fixes=tuple(Fix("a range that fits", f"{start}-{start + size - 1}") for size in fits),
        )


def _single_ranks(given: tuple[Any, ...]) -> list[int]:
    """Return the sorted ranks if every list has exactly one valid rank, else an empty list."""
    if not set(map(type, given)) <= {list, tuple, range} or set(map(len, given)) != {1}:
        return []
    ranks = [ranks[0] for ranks in given]
    if set(map(type, ranks)) != {int}:
        return []
    ranks.sort()
    return ranks if ranks[0] >= 0 and ranks[-1] < MAX_RANK else []


def _rank_lists(given: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """Return checked copies of the lists, each sorted, in the order of their first ranks."""
    findings: list[Finding] = []
    checked: list[tuple[int, ...]] = []
    for index, ranks in enumerate(given):
        if len(findings) >= 100:
            break
        before = len(findings)
        name = f"process {index}"
        values = tuple(ranks) if isinstance(ranks, (list, tuple, range)) else _iterate(ranks, name, findings)
        if len(values) == 1 and type(values[0]) is int and values[0] >= 0:
            checked.append(values)
            continue
        values = tuple(sorted(_integer(f"a rank of {name}", value, 0, findings) for value in values))
        if len(findings) > before:
            continue
        if not values:
            rule = "every process has at least one resource"
            fixes = (Fix("for processes without any", "NodePlacementStrategy(node_ranks)"),)
            findings.append(Finding("P204", f"{name} has no hardware ranks", rule=rule, fixes=fixes))
        elif len(set(values)) != len(values):
            findings.append(Finding("P204", f"{name} names a hardware rank twice: {list(values)[:20]}"))
        else:
            checked.append(values)
    if not checked and not findings:
        findings.append(Finding("P204", "hardware_ranks_list is empty: there is no process to place"))
    if findings:
        raise PlacementError(findings)
    checked.sort(key=operator.itemgetter(0))
    return checked


def _iterate(values: Any, name: str, findings: list[Finding] | None = None) -> tuple[Any, ...]:
    if not isinstance(values, (str, bytes, Mapping)):
        try:
            return tuple(values)
        except TypeError:
            pass
    finding = Finding("P201", f"{name} is a list, not {shown(values)}")
    if findings is None:
        raise PlacementError([finding])
    findings.append(finding)
    return ()


def _labels(given: Any) -> tuple[str, ...]:
    """Return the labels in ``None``, ``"a"``, ``"a,b"`` or ``["a", "b"]``."""
    if given is None:
        return ()
    items = [given] if isinstance(given, (str, int)) and not isinstance(given, bool) else _iterate(given, "node_group")
    labels = [part.strip() for item in items for part in str(item).split(",")]
    if "" in labels or None in items or len(set(labels)) != len(labels):
        message = f"node_group is a label or a list of different labels, not {shown(given)}"
        raise PlacementError([Finding("P201", message)])
    return tuple(labels)


def _spanning(resources: Resources, rank: int, ranks: Sequence[int], part: NodeHardware) -> Finding:
    """Return the finding about a process whose resources are on two nodes, or of two types."""
    other = resources.node_of(ranks[-1])
    named = ", ".join(str(r) for r in ranks[:12]) + (", …" if len(ranks) > 12 else "")
    if other.node.rank == part.node.rank:
        message = f"process {rank} mixes hardware: {named} are {resources.noun(part, 2)} and {resources.noun(other, 2)}"
        return Finding("P110", message, context=resources.context, rule="a process has one type of hardware")
    message = (
        f"process {rank} would span nodes: {resources.noun(part, 2)} {named} are on node {part.node.rank} "
        f"({part.ranks}) and node {other.node.rank} ({other.ranks})"
    )
    return Finding("P109", message, context=resources.context, rule="the resources of a process are on one node")

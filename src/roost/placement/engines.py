"""Cut the accelerators of the rollout into engines, each on one node or on several whole nodes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from roost.errors import Finding, Fix, Place, counted

__all__ = ["EngineGroup", "EngineShare", "NodeSizes", "cut_engines"]

MAX_TRIES = 64
"""Number of positions or sizes that are tried to find a fix."""


@dataclass(frozen=True)
class EngineShare:
    """One engine, as positions in the stable order.

    Attributes:
        group: Index of its rollout group.
        positions: Positions of its accelerators.
        members: Number of its nodes; each has an equal part of the positions.
        placeholder: Reserved only; nothing is started.
    """

    group: int
    positions: range
    members: int = 1
    placeholder: bool = False


@dataclass(frozen=True)
class EngineGroup:
    """Engines of one size, before they are cut.

    Attributes:
        index: Index of the group.
        num_gpus: Accelerators of all its engines together.
        num_gpus_per_engine: Accelerators of one engine.
        placeholder: Reserved only; nothing is started.
        is_only: Whether the job has no list of groups, so that this is its whole rollout.
    """

    index: int
    num_gpus: int
    num_gpus_per_engine: int
    placeholder: bool = False
    is_only: bool = True

    @property
    def name(self) -> str:
        """The group in error messages."""
        return "rollout" if self.is_only else f"rollout_groups[{self.index}]"

    @property
    def size_key(self) -> str:
        """The argument that sets the size of an engine."""
        key = "num_gpus_per_engine"
        return f"rollout_{key}" if self.is_only else f"rollout_groups.{self.index}.{key}"

    @property
    def count_key(self) -> str:
        """The argument that sets the number of accelerators of the group."""
        return "rollout_num_gpus" if self.is_only else f"rollout_groups.{self.index}.num_gpus"


class NodeSizes:
    """The nodes' first and last positions in the stable order.

    Args:
        sizes: Accelerators of each node, or one number for every node.
        total: Number of positions that will be looked up.
    """

    def __init__(self, sizes: int | Sequence[int], total: int) -> None:
        self.ends: Sequence[int]
        if isinstance(sizes, int):
            self.ends = range(sizes, total + MAX_TRIES + sizes, sizes)
            self.total: int | None = None
        else:
            self.ends = list(accumulate(size for size in sizes if size))
            self.total = self.ends[-1] if self.ends else 0

    def node_of(self, position: int) -> int:
        """Return the index of the node that has a position."""
        return bisect_right(self.ends, position)

    def start(self, node: int) -> int:
        """Return the first position of a node."""
        return self.ends[node - 1] if node else 0

    def size(self, node: int) -> int:
        """Return the number of positions of a node."""
        return self.ends[node] - self.start(node)

    def members(self, engine: range) -> int:
        """Return the number of nodes of an engine.

        It is 0 if the engine has several nodes of which one is not whole, or which differ in size.
        """
        first, last = self.node_of(engine[0]), self.node_of(engine[-1])
        if first == last:
            return 1
        if engine[0] != self.start(first) or engine[-1] + 1 != self.ends[last]:
            return 0
        is_even = len({self.size(node) for node in range(first, last + 1)}) == 1
        return last - first + 1 if is_even else 0

    def fits(self, start: int, count: int, size: int) -> bool:
        """Return whether consecutive engines of one size all have one node, or equally many whole nodes."""
        if self.total is not None and start + count > self.total:
            return False
        members = {self.members(engine) for engine in _engines(start, count, size)}
        return len(members) == 1 and 0 not in members


def _engines(start: int, count: int, size: int) -> Iterator[range]:
    for first in range(start, start + count, size):
        yield range(first, first + size)


def cut_engines(
    groups: Sequence[EngineGroup], offset: int, nodes: NodeSizes | None, findings: list[Finding]
) -> tuple[EngineShare, ...]:
    """Return the engines of all groups, one after another from an offset.

    Args:
        groups: The groups to cut.
        offset: First position of the first group.
        nodes: Positions of the nodes; ``None`` if they are unknown: each engine then counts as being on one node.
        findings: Where problems go.
    """
    cut: list[EngineShare] = []
    for group in groups:
        count, size = group.num_gpus, group.num_gpus_per_engine
        if count and size > count:
            findings.append(_exceeds(group))
        elif count % size:
            findings.append(_indivisible(group))
        else:
            cut += _cut(group, offset, nodes, findings)
        offset += count
    return tuple(cut)


def _cut(group: EngineGroup, start: int, nodes: NodeSizes | None, findings: list[Finding]) -> list[EngineShare]:
    cut: list[EngineShare] = []
    for engine in _engines(start, group.num_gpus, group.num_gpus_per_engine):
        members = nodes.members(engine) if nodes else 1
        if nodes and (not members or (cut and members != cut[0].members)):
            findings.append(_misfit(group, start, engine, nodes))
            break
        cut.append(EngineShare(group.index, engine, members, group.placeholder))
    return cut


# Problems --------------------------------------------------------------


def _exceeds(group: EngineGroup) -> Finding:
    count, size = group.num_gpus, group.num_gpus_per_engine
    return Finding(
        "P407",
        f"{group.name}: an engine of {counted(size, 'GPU')} does not fit into {counted(count, 'GPU')}",
        Place(group.size_key),
        rule="an engine has no more GPUs than its group",
        fixes=(Fix("one engine of all of them", _write(group.size_key, count)),),
    )


def _indivisible(group: EngineGroup) -> Finding:
    count, size = group.num_gpus, group.num_gpus_per_engine
    less = count // size * size
    return Finding(
        "P404",
        f"{group.name}: {counted(count, 'GPU')} cannot be cut into engines of {size}: {count - less} would be left over",
        Place(group.size_key),
        rule="the GPUs of a group are a multiple of those of an engine",
        fixes=(
            Fix(f"{counted(less // size, 'engine')} of {size}", _write(group.count_key, less)),
            Fix(f"{counted(less // size + 1, 'engine')} of {size}", _write(group.count_key, less + size)),
        ),
    )


def _misfit(group: EngineGroup, start: int, engine: range, nodes: NodeSizes) -> Finding:
    """Return the finding about an engine that is neither on one node nor on several whole nodes."""
    count, size = group.num_gpus, group.num_gpus_per_engine
    first, last = nodes.node_of(engine[0]), nodes.node_of(engine[-1])
    per_node = nodes.size(first)
    text = f"GPUs {engine[0]}-{engine[-1]}"
    fixes = []
    if size > per_node and size % per_node:
        code, rule = "P405", "an engine of several nodes has all GPUs of each, and the nodes have equally many"
        message = f"{group.name}: an engine of {size} GPUs is no whole number of nodes: they have {per_node} GPUs"
    elif engine[0] == nodes.start(first) and (last == first or engine[-1] + 1 == nodes.ends[last]):
        code, rule = "P405", "the engines of a group live on equally many nodes, of equally many GPUs"
        sizes = ", ".join(str(nodes.size(node)) for node in range(first, min(last, first + 7) + 1))
        message = f"{group.name}: the engine on {text} is unlike the others, or its nodes are: they have {sizes} GPUs"
    else:
        code, rule = "P406", "an engine lives on one node, or on whole ones"
        number = (engine[0] - start) // size
        message = (
            f"{group.name}: engine {number} ({text}) would straddle nodes: the next begins at GPU {nodes.start(last)}"
        )
        moved = next((s for s in range(start + 1, start + 1 + MAX_TRIES) if nodes.fits(s, count, size)), None)
        if moved is not None:
            fixes.append(_moved(group, start, moved))
    smaller = [n for n in range(size - 1, 0, -1) if count % n == 0][:MAX_TRIES]
    fitting = next((n for n in smaller if nodes.fits(start, count, n)), None)
    if fitting:
        fixes.append(Fix(f"engines of {counted(fitting, 'GPU')}", _write(group.size_key, fitting)))
    return Finding(code, message, Place(group.size_key), rule=rule, fixes=tuple(fixes))


def _moved(group: EngineGroup, start: int, moved: int) -> Fix:
    """Return the fix that starts the engines at a later position, behind GPUs that stay unused."""
    text = f"begin at GPU {moved}, and keep {counted(moved - start, 'GPU')} before it free"
    hole = f"{{num_gpus: {moved - start}, placeholder: true}}"
    if not group.is_only:
        return Fix(text, f"{hole} before this group")
    own = f"{{num_gpus: {group.num_gpus}, num_gpus_per_engine: {group.num_gpus_per_engine}}}"
    return Fix(text, f"rollout_groups: [{hole}, {own}]")


def _write(key: str, value: int) -> str:
    return f"{key.rpartition('.')[2]}: {value}"

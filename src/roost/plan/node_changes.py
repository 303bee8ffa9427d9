"""Compare two descriptions of the same nodes: the ones of a plan, and the ones of a cluster.

A description may leave facts out: ``2x8`` has no names, addresses or models. A fact that one side does
not know is never a difference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from roost.errors import counted
from roost.ranks import format_ranks
from roost.topology import Node, Topology

__all__ = ["NodeChange", "NodeUuids", "accelerator_uuids", "compare_nodes", "fingerprint"]

_MEMORY_SLACK = 0.05
"""Relative difference of memory that is ignored: drivers reserve some, so that 80 GiB are measured as 79.6."""

_WORD = re.compile(r"[a-z0-9]+")

NodeUuids = Sequence[Sequence[str]]
"""UUIDs of the accelerators of each node; empty for a node whose UUIDs are unknown."""


@dataclass(frozen=True)
class NodeChange:
    """One difference between the planned nodes and the nodes that were found.

    Attributes:
        kind: ``gone`` (the node is missing), ``further`` (an additional node), ``other`` (another node in its place),
            ``order`` (the node has another rank), or ``fact`` (a fact about the node differs).
        node_ranks: The nodes with this difference, by planned rank (``further``: by rank in the second description).
        what: The fact, such as ``address`` or ``GPU 3``.
        planned: Its value in the first description.
        found: Its value in the second description.
    """

    kind: Literal["gone", "further", "other", "order", "fact"]
    node_ranks: tuple[int, ...]
    what: str
    planned: str
    found: str

    @property
    def nodes(self) -> str:
        """``node 3`` or ``nodes 0-7``."""
        return f"node{'s' if len(self.node_ranks) > 1 else ''} {format_ranks(self.node_ranks)}"

    def __str__(self) -> str:
        return f"{self.nodes}: {self.what}: planned {self.planned}, found {self.found}"


def accelerator_uuids(cluster: Any) -> tuple[tuple[str, ...], ...]:
    """Return the UUIDs of the accelerators of each node of a live cluster.

    A node whose driver reports none has an empty entry, and so has every node of a topology. An accelerator that did
    not answer has an empty UUID.
    """
    topology = Topology.of(cluster)
    measured: Callable[[int], Any] | None = getattr(cluster, "get_node_info", None)
    if measured is None:
        return ((),) * topology.num_nodes
    uuids = [tuple(device.uuid for device in measured(node.rank).accelerators) for node in topology.nodes]
    return tuple(found if any(found) else () for found in uuids)


def fingerprint(topology: Topology, uuids: NodeUuids = ()) -> str:
    """Return a short hash that is equal for the same nodes in the same order."""
    text = Topology(topology.nodes).to_json() + repr([list(found) for found in uuids if found])
    return sha256(text.encode()).hexdigest()[:16]


def compare_nodes(
    planned: Topology, found: Topology, planned_uuids: NodeUuids = (), found_uuids: NodeUuids = ()
) -> list[NodeChange]:
    """Return all differences, with nodes that have the same difference in one entry.

    A node is recognised by the UUIDs of its accelerators, else by its address, else by its name.
    """
    ours = _Side(planned.nodes, planned_uuids)
    theirs = _Side(found.nodes, found_uuids)
    pairs = _match(ours, theirs)
    there = set(pairs.values())
    single: list[NodeChange] = []
    for rank, node in enumerate(ours.nodes):
        at = pairs.get(rank)
        if at is not None:
            if at != rank:
                single.append(NodeChange("order", (rank,), "order", f"as node {rank}", f"as node {at}"))
            single += _facts(ours, theirs, rank, at)
        elif rank < len(theirs.nodes) and rank not in there:
            single.append(NodeChange("other", (rank,), "machine", _identity(node), _identity(theirs.nodes[rank])))
            single += _accelerator_facts(rank, node, theirs.nodes[rank])
        else:
            single.append(NodeChange("gone", (rank,), "machine", _identity(node), "none: it is gone"))
    for rank, node in enumerate(theirs.nodes):
        if rank not in there and (rank >= len(ours.nodes) or rank in pairs):
            single.append(NodeChange("further", (rank,), "machine", "none", _identity(node)))
    return _merged(single)


class _Side:
    """Nodes of one side, with lookups by UUID, address and name."""

    def __init__(self, nodes: Sequence[Node], uuids: NodeUuids) -> None:
        self.nodes = nodes
        self.uuids = [tuple(uuids[i]) if i < len(uuids) else () for i in range(len(nodes))]
        self.by_uuid = {uuid: rank for rank, found in enumerate(self.uuids) for uuid in found if uuid}
        self.by_address = _unique_ranks([node.address for node in nodes])
        self.by_name = _unique_ranks([node.name for node in nodes])


def _unique_ranks(texts: Sequence[str]) -> dict[str, int]:
    """Return rank by text for the texts that only one node has. Several nodes on one computer share its name."""
    counts = Counter(texts)
    return {text: rank for rank, text in enumerate(texts) if text and counts[text] == 1}


def _match(ours: _Side, theirs: _Side) -> dict[int, int]:
    """Return planned rank → found rank of the nodes that are on both sides."""
    pairs: dict[int, int] = {}
    taken: set[int] = set()

    def pair(rank: int, at: int | None) -> None:
        if at is not None and rank not in pairs and at not in taken:
            pairs[rank] = at
            taken.add(at)

    for uuid, rank in ours.by_uuid.items():
        pair(rank, theirs.by_uuid.get(uuid))
    for mine, other in ((ours.by_address, theirs.by_address), (ours.by_name, theirs.by_name)):
        for text, rank in mine.items():
            pair(rank, other.get(text))
    for rank in range(min(len(ours.nodes), len(theirs.nodes))):
        if not _are_distinguishable(ours, theirs, rank):
            pair(rank, rank)
    return pairs


def _are_distinguishable(ours: _Side, theirs: _Side, rank: int) -> bool:
    """Return whether both sides identify the node. Two identified nodes that did not match are different nodes."""
    mine, other = ours.nodes[rank], theirs.nodes[rank]
    return bool(
        (ours.uuids[rank] and theirs.uuids[rank])
        or (mine.address and other.address)
        or (mine.name and other.name and mine.name != other.name)
    )


def _identity(node: Node) -> str:
    known = [text for text in (node.name, node.address) if text]
    if not known:
        noun = node.accelerator_type.noun
        model = f" ({node.accelerator_model})" if node.accelerator_model else ""
        return f"one with {counted(node.num_accelerators, noun)}{model}" if node.accelerator_ids else "one without GPUs"
    return f"{known[0]} ({known[1]})" if len(known) == 2 else known[0]


def _facts(ours: _Side, theirs: _Side, rank: int, at: int) -> Iterator[NodeChange]:
    mine, other = ours.nodes[rank], theirs.nodes[at]
    for what, planned, found in (("name", mine.name, other.name), ("address", mine.address, other.address)):
        if planned and found and planned != found:
            yield NodeChange("fact", (rank,), what, planned, found)
    yield from _accelerator_facts(rank, mine, other)
    planned_uuids, found_uuids = ours.uuids[rank], theirs.uuids[at]
    if len(planned_uuids) == len(found_uuids):
        for local, (planned, found) in enumerate(zip(planned_uuids, found_uuids, strict=True)):
            if planned != found:
                yield NodeChange(
                    "fact", (rank,), f"{mine.accelerator_type.noun} {local}", planned or "none", found or "none"
                )


def _accelerator_facts(rank: int, mine: Node, other: Node) -> Iterator[NodeChange]:
    """Yield how the accelerators of two nodes differ: number, vendor, model, memory, ids."""
    nouns = {node.accelerator_type.noun for node in (mine, other) if node.accelerator_ids}
    noun = nouns.pop() if len(nouns) == 1 else "accelerator"
    if mine.num_accelerators != other.num_accelerators:
        counts = (str(mine.num_accelerators), str(other.num_accelerators))
        yield NodeChange("fact", (rank,), f"{noun}s", *counts)
    if not mine.accelerator_ids or not other.accelerator_ids:
        return
    if mine.accelerator_type != other.accelerator_type:
        vendors = (mine.accelerator_type.name, other.accelerator_type.name)
        yield NodeChange("fact", (rank,), f"{noun} vendor", *vendors)
    if not _same_model(mine.accelerator_model, other.accelerator_model):
        yield NodeChange("fact", (rank,), f"{noun} model", mine.accelerator_model, other.accelerator_model)
    planned, found = mine.accelerator_memory_gib, other.accelerator_memory_gib
    if planned is not None and found is not None and abs(planned - found) > _MEMORY_SLACK * max(planned, found):
        yield NodeChange("fact", (rank,), f"{noun} memory", f"{planned:g} GiB", f"{found:g} GiB")
    if mine.num_accelerators == other.num_accelerators and mine.accelerator_ids != other.accelerator_ids:
        ids = (",".join(mine.accelerator_ids), ",".join(other.accelerator_ids))
        yield NodeChange("fact", (rank,), f"{noun} ids", *ids)


def _same_model(planned: str, found: str) -> bool:
    """Return whether two names can mean one model: ``H200`` and ``H200 SXM 141GB``, but not ``H20``; or one is empty."""
    mine, other = set(_WORD.findall(planned.lower())), set(_WORD.findall(found.lower()))
    return mine <= other or other <= mine


def _merged(single: Sequence[NodeChange]) -> list[NodeChange]:
    """Merge equal changes of several nodes into one, and shifts of consecutive nodes."""
    ranks: dict[tuple[Any, ...], list[int]] = {}
    shifts: list[tuple[int, list[int]]] = []
    for change in single:
        (rank,) = change.node_ranks
        if change.kind == "order":
            by = int(change.found.rpartition(" ")[2]) - rank
            if not shifts or shifts[-1][0] != by or shifts[-1][1][-1] != rank - 1:
                shifts.append((by, []))
                ranks["order", len(shifts)] = shifts[-1][1]
            shifts[-1][1].append(rank)
        else:
            ranks.setdefault((change.kind, change.what, change.planned, change.found), []).append(rank)
    together = []
    for key, nodes in ranks.items():
        if key[0] == "order":
            by = shifts[key[1] - 1][0]
            word = "nodes" if len(nodes) > 1 else "node"
            before, after = format_ranks(nodes), format_ranks(rank + by for rank in nodes)
            change = NodeChange("order", tuple(nodes), "order", f"as {word} {before}", f"as {word} {after}")
        else:
            change = NodeChange(key[0], tuple(nodes), *key[1:])
        together.append(change)
    return together

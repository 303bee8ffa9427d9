"""The ledger: reserves accelerators of a job in Ray, so that other Ray jobs cannot get them.

A whole node is reserved by one placement group. For a part of a node, each free accelerator of the node gets a
placement group for a moment: Ray chooses the accelerator of a group, so the ledger takes all free ones, asks each group
for its accelerator, and removes the groups with accelerators that are not wanted. Meanwhile other Roost jobs wait for
their turn (see :mod:`roost.cluster.turn`), so that two jobs cannot each get a half of what they need.

Reservations are counted by accelerator: worker groups of one job share accelerators, and start and end at different
times.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as count_up
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roost.cluster.nodes import NodeInfo
from roost.cluster.ray_private import free_resources_of_nodes, placement_group_of
from roost.cluster.ray_typed import nodes_of_ray
from roost.cluster.turn import reservation_turn
from roost.errors import Finding, Fix, ReservationError

__all__ = [
    "Ledger",
    "ask_accelerators",
    "asking_ray",
    "first_line",
    "free_resources",
    "pin",
    "remove_groups",
    "remove_holds",
]

asking_ray = threading.Lock()
"""Held while Ray's state API is called: older Rays abort a process in which two threads call it at the same time."""

PROBE_S = 60.0
"""Seconds in which all groups of single accelerators must have reported their accelerator."""

_HOLD = "roost:hold"

logger = logging.getLogger("roost")


def pin(node: NodeInfo) -> dict[str, float]:
    """Return the small amount of a node's own resource that pins a bundle to the node, in every supported Ray."""
    return {f"node:{node.address}": 0.001}


@dataclass
class _Hold:
    """A placement group of this ledger, its node, and its accelerators."""

    group: PlacementGroup
    node_rank: int
    accelerators: tuple[int, ...] = ()


@dataclass
class _Entry:
    """One reservation: its accelerators by node rank, and the placement groups of its CPUs."""

    accelerators: dict[int, tuple[int, ...]]
    cpu_holds: list[_Hold] = field(default_factory=list)


class Ledger:
    """Reserves the accelerators that at least one worker group of the job uses.

    Args:
        nodes: The nodes of the job, in cluster order.
        owner: Id of the managers' actor; part of the names of the placement groups.
    """

    def __init__(self, nodes: Sequence[NodeInfo], owner: str) -> None:
        self._nodes = list(nodes)
        self._owner = owner
        self._counts: dict[tuple[int, int], int] = {}
        self._holds: list[_Hold] = []
        self._entries: dict[int, _Entry] = {}
        self._next_token = 1

    def reserve(self, accelerators: Mapping[int, Sequence[int]], cpus: Mapping[int, float], timeout_s: float) -> int:
        """Reserve accelerators (local ranks by node rank) and CPUs (by node rank); return a token.

        Raises:
            ReservationError: They are not available in time; it names every shortage (R201-R206).
        """
        entry = _Entry({rank: tuple(sorted(set(wanted))) for rank, wanted in accelerators.items() if wanted})
        new = {
            rank: [local for local in wanted if not self._counts.get((rank, local))]
            for rank, wanted in entry.accelerators.items()
        }
        new = {rank: wanted for rank, wanted in new.items() if wanted}
        cpus = {rank: count for rank, count in cpus.items() if count > 0}
        if new or cpus:
            self._check_possible(cpus)
            self._obtain(entry, new, cpus, timeout_s)
        for rank, wanted in entry.accelerators.items():
            for local in wanted:
                self._counts[rank, local] = self._counts.get((rank, local), 0) + 1
        token = self._next_token
        self._next_token += 1
        self._entries[token] = entry
        return token

    def release(self, token: int) -> None:
        """Release a reservation; accelerators without another reservation become free in Ray."""
        entry = self._entries.pop(token, None)
        if entry is None:
            return
        for rank, wanted in entry.accelerators.items():
            for local in wanted:
                self._counts[rank, local] -= 1
        unused = [hold for hold in self._holds if not self._is_used(hold)]
        self._holds = [hold for hold in self._holds if self._is_used(hold)]
        remove_groups(hold.group for hold in (*entry.cpu_holds, *unused))

    def held(self) -> dict[tuple[int, int], int]:
        """Return the number of reservations of each accelerator, by (node rank, local rank)."""
        return {key: count for key, count in self._counts.items() if count}

    # ---------------------------------------------------------------------------------------

    def _is_used(self, hold: _Hold) -> bool:
        return any(self._counts.get((hold.node_rank, local)) for local in hold.accelerators)

    def _check_possible(self, cpus: Mapping[int, float]) -> None:
        findings = [
            Finding("R202", f"node {rank} has {self._nodes[rank].cpus:g} CPUs, and {count:g} are needed")
            for rank, count in cpus.items()
            if count > self._nodes[rank].cpus
        ]
        if findings:
            raise ReservationError(findings)

    def _check_alive(self, ranks: Iterable[int]) -> None:
        """Raise if a node is gone: a node never comes back with the same id, so there is nothing to wait for."""
        with asking_ray:
            alive = {str(node["NodeID"]) for node in nodes_of_ray() if node["Alive"]}
        gone = [self._nodes[rank] for rank in sorted(ranks) if self._nodes[rank].ray_id not in alive]
        if gone:
            fixes = (Fix("make a new cluster, of the nodes that are left", "cluster.close(); Cluster(num_nodes=0)"),)
            raise ReservationError(
                [Finding("R203", f"node {node.rank} ({node.address}) is gone", fixes=fixes) for node in gone]
            )

    def _obtain(
        self, entry: _Entry, wanted: Mapping[int, Sequence[int]], cpus: Mapping[int, float], timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        fewest: list[Finding] = []
        for attempt in count_up(1):
            self._check_alive({*wanted, *cpus})
            shortages = self._attempt_in_turn(entry, wanted, cpus, deadline)
            if not shortages:
                return
            fewest = shortages if not fewest or len(shortages) < len(fewest) else fewest
            # Ray reports free resources with a delay, so the shortages of one attempt may name the wrong accelerator.
            if attempt >= 3 and time.monotonic() + 0.5 > deadline:
                raise ReservationError(_explain(fewest, timeout_s))
            time.sleep(0.2 + random.random() * 0.3)  # noqa: S311

    def _attempt_in_turn(
        self, entry: _Entry, wanted: Mapping[int, Sequence[int]], cpus: Mapping[int, float], deadline: float
    ) -> list[Finding]:
        """Try once to reserve everything; return the shortages. After any failure nothing stays reserved."""
        made: list[PlacementGroup] = []
        kept: list[_Hold] = []
        try:
            with reservation_turn(max(deadline, time.monotonic() + 1.0)) as turn:
                before = free_resources()
                try:
                    holds, cpu_holds, shortages = self._attempt(wanted, cpus, deadline, made)
                    if not shortages and not turn.is_mine():
                        message = "another job took the turn to reserve, since Ray did not answer in time"
                        shortages = [Finding("R204", message)]
                    if not shortages:
                        self._holds += holds
                        entry.cpu_holds = cpu_holds
                        kept = [*holds, *cpu_holds]
                finally:
                    ids = {hold.group.id for hold in kept}
                    remove_groups(group for group in made if group.id not in ids)
                if shortages:
                    self._settle(before, {*wanted, *cpus})
                return shortages
        except RayError as error:
            self._check_alive({*wanted, *cpus})
            message = f"Ray failed during the reservation of accelerators: {first_line(error)}"
            raise ReservationError([Finding("R206", message)]) from error

    def _settle(self, before: Mapping[str, Mapping[str, float]], ranks: Iterable[int]) -> None:
        """Wait up to 2 s until Ray counts the removed groups as free: the next attempt of any job relies on that."""
        deadline = time.monotonic() + 2.0
        names = [(self._nodes[rank].ray_id, self._nodes[rank].accelerator_type.ray_resource) for rank in ranks]
        while time.monotonic() < deadline:
            now = free_resources()
            if all(now.get(node, {}).get(name, 0.0) >= before.get(node, {}).get(name, 0.0) for node, name in names):
                return
            time.sleep(0.02)

    def _attempt(
        self,
        wanted: Mapping[int, Sequence[int]],
        cpus: Mapping[int, float],
        deadline: float,
        made: list[PlacementGroup],
    ) -> tuple[list[_Hold], list[_Hold], list[Finding]]:
        """Create placement groups for everything, and keep those that are wanted.

        Returns:
            The holds of accelerators, the holds of CPUs, and the shortages. Every group is added to ``made`` as soon as
            it exists, also if this method raises.
        """
        free = free_resources()
        whole: list[_Hold] = []
        singles: list[_Hold] = []
        for rank, locals_wanted in wanted.items():
            node = self._nodes[rank]
            resource = node.accelerator_type.ray_resource
            if len(locals_wanted) == node.num_accelerators:
                bundle = {resource: float(node.num_accelerators), **pin(node)}
                whole.append(_Hold(self._group(bundle, made), rank, tuple(locals_wanted)))
            else:
                count = int(free.get(node.ray_id, {}).get(resource, 0.0))
                singles += [_Hold(self._group({resource: 1.0, **pin(node)}, made), rank) for _ in range(count)]
        cpu_holds = [
            _Hold(self._group({"CPU": count, **pin(self._nodes[rank])}, made), rank) for rank, count in cpus.items()
        ]
        timeout_s = max(0.5, min(5.0, deadline - time.monotonic()))
        ready = _wait([*whole, *cpu_holds, *singles], timeout_s)
        shortages = [
            self._shortage(hold.node_rank, free, cpus) for hold in (*whole, *cpu_holds) if id(hold) not in ready
        ]
        chosen, missing = self._choose(wanted, whole, [hold for hold in singles if id(hold) in ready])
        shortages += [self._taken(rank, local) for rank, local in missing]
        return [*whole, *chosen], cpu_holds, shortages

    def _group(self, bundle: dict[str, float], made: list[PlacementGroup]) -> PlacementGroup:
        """Create a placement group; its name has the owner, for :func:`remove_holds`."""
        made.append(placement_group([bundle], name=f"{_HOLD}:{self._owner}:{random.getrandbits(64):x}"))
        return made[-1]

    def _choose(
        self, wanted: Mapping[int, Sequence[int]], whole: Sequence[_Hold], singles: Sequence[_Hold]
    ) -> tuple[list[_Hold], list[tuple[int, int]]]:
        """Return the holds of the wanted single accelerators, and the missing ones as (node rank, local rank)."""
        given = ask_accelerators([(hold.group, 0, self._nodes[hold.node_rank]) for hold in singles])
        found: dict[tuple[int, int], _Hold] = {}
        for hold, accelerator in zip(singles, given, strict=True):
            ids = [device.id for device in self._nodes[hold.node_rank].accelerators]
            if accelerator in ids:
                found[hold.node_rank, ids.index(accelerator)] = hold
        are_whole = {hold.node_rank for hold in whole}
        parts = [
            (rank, local) for rank, locals_wanted in wanted.items() if rank not in are_whole for local in locals_wanted
        ]
        for rank, local in parts:
            if (rank, local) in found:
                found[rank, local].accelerators = (local,)
        return [found[key] for key in parts if key in found], [key for key in parts if key not in found]

    def _shortage(self, rank: int, free: Mapping[str, Mapping[str, float]], cpus: Mapping[int, float]) -> Finding:
        node = self._nodes[rank]
        resource = node.accelerator_type.ray_resource
        there = free.get(node.ray_id)
        if there is None:
            return Finding("R203", f"node {rank} ({node.address}) is gone")
        text = f"{there.get(resource, 0):g} of {node.num_accelerators} {node.accelerator_type.noun}s are free"
        if rank in cpus:
            text += f", {there.get('CPU', 0):g} of {node.cpus:g} CPUs are free and {cpus[rank]:g} are needed"
        return Finding("R201", f"node {rank} ({node.address}): {text}")

    def _taken(self, rank: int, local: int) -> Finding:
        node = self._nodes[rank]
        noun = node.accelerator_type.noun
        return Finding("R201", f"node {rank} ({node.address}): {noun} {local} is held by another Ray job")


def _explain(shortages: Sequence[Finding], timeout_s: float) -> list[Finding]:
    fixes = (
        Fix("see which jobs hold accelerators", "ray status -v"),
        Fix("wait longer", "ROOST_RESERVE_TIMEOUT_S=600"),
    )
    rule = f"waited {timeout_s:g} s for other jobs to release them"
    unique = {finding.message: finding for finding in shortages}
    return [Finding(f.code, f.message, rule=rule, fixes=fixes) for f in unique.values()]


def _wait(holds: Sequence[_Hold], timeout_s: float) -> set[int]:
    """Return the ``id()`` of each hold whose placement group was created in time."""
    deadline = time.monotonic() + timeout_s
    ready = set()
    for hold in holds:
        # A group that exists already must not count as late because the wait for another one took all the time.
        if hold.group.wait(max(0.05, deadline - time.monotonic())):
            ready.add(id(hold))
    return ready


def remove_holds(owner: str) -> None:
    """Remove the placement groups of a ledger whose actor has ended.

    Ray itself keeps the placement groups of an actor until the whole driver has ended.
    """
    with asking_ray:
        table = placement_group_table()
    for key, entry in table.items():
        if entry["name"].startswith(f"{_HOLD}:{owner}:") and entry["state"] != "REMOVED":
            remove_placement_group(placement_group_of(key))


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each node, by Ray's node id."""
    with asking_ray:
        return free_resources_of_nodes()


def remove_groups(groups: Iterable[PlacementGroup]) -> None:
    """Remove placement groups; log those that cannot be removed."""
    for group in groups:
        try:
            remove_placement_group(group)
        except RayError as error:  # Ray removes it when the driver ends
            logger.warning("a placement group could not be removed: %s", first_line(error))


def ask_accelerators(bundles: Sequence[tuple[PlacementGroup, int, NodeInfo]]) -> list[str]:
    """Return the id of the accelerator of each bundle of one accelerator.

    Nodes are asked in parallel, and the bundles of a node one after another. ``max_calls=0`` keeps the worker process,
    which Ray would end after each task with a GPU, so the bundles of a node cost one process start.

    Args:
        bundles: The placement group of each bundle, its index there, and its node.

    Raises:
        ReservationError: Bundles did not answer within :data:`PROBE_S`, or their nodes died (R206).
    """
    probe = ray.remote(num_cpus=0, max_calls=0)(_which_accelerator)
    deadline = time.monotonic() + PROBE_S
    by_node: dict[str, list[int]] = {}
    for index, (_, _, node) in enumerate(bundles):
        by_node.setdefault(node.ray_id, []).append(index)
    ids = [""] * len(bundles)
    for turn in range(max(map(len, by_node.values()), default=0)):
        asked: dict[ray.ObjectRef[Any], int] = {}
        for indices in by_node.values():
            if turn < len(indices):
                group, bundle, node = bundles[indices[turn]]
                resource = node.accelerator_type.ray_resource
                wanted: dict[str, Any] = {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}}
                strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
                asked[probe.options(scheduling_strategy=strategy, **wanted).remote(resource)] = indices[turn]
        ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=max(0.0, deadline - time.monotonic()))
        findings = [_unknown(bundles[asked[ref]][2], f"did not end within {PROBE_S:g} s") for ref in late]
        for ref in ready:
            try:
                ids[asked[ref]] = ray.get(ref)
            except RayError as error:
                findings.append(_unknown(bundles[asked[ref]][2], f"failed: {first_line(error)}"))
        if findings:
            raise ReservationError(findings)
    return ids


def _which_accelerator(resource: str) -> str:
    """Return the id of the accelerator of the calling task."""
    found = ray.get_runtime_context().get_accelerator_ids().get(resource) or [""]
    return str(found[0])


def _unknown(node: NodeInfo, reason: str) -> Finding:
    noun = node.accelerator_type.noun
    message = f"node {node.rank} ({node.address}): the task that reports which {noun} Ray gave it {reason}"
    rule = "Ray chooses the accelerator of a task, so Roost asks which one it is before it reserves a part of a node"
    fix = Fix("see why no worker process starts there", "raylet.out in Ray's session folder on that node")
    return Finding("R206", message, rule=rule, fixes=(fix,))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class where it has no text."""
    return next(iter(str(error).splitlines()), type(error).__name__)

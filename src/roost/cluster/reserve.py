"""The ledger: which accelerators the job holds, so that no other Ray job can have them.

A node that is wanted whole costs one placement group. A part of a node costs one group per free
accelerator for a moment: Ray does not let one choose *which* accelerator a group gets, so all free
ones are taken, each is asked which it is, and those that are not wanted go back at once. While this
happens other Roost jobs wait their turn (a lock in Ray's own key-value store), so that two jobs never
end up with half each.

Entries are counted: groups of one job share accelerators, and come and go one after another.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as count_up
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roost.cluster.nodes import NodeInfo
from roost.errors import Finding, Fix, ReservationError

__all__ = ["Ledger", "asking_ray", "free_resources", "pin", "remove_holds", "reservation_turn", "which_accelerator"]

asking_ray = threading.Lock()
"""Older Rays end a process of which two threads ask for the state of the cluster at once."""

_LOCK = b"roost:reservation-turn"
_HOLD = "roost:hold"
_TURN_S = 30.0


def pin(node: NodeInfo) -> dict[str, float]:
    """The sliver of a resource that ties a bundle to a node; works in every supported Ray."""
    return {f"node:{node.address}": 0.001}


@dataclass
class _Hold:
    """One placement group of ours: what it holds on which node."""

    group: PlacementGroup
    node_rank: int
    accelerators: tuple[int, ...] = ()


@dataclass
class _Entry:
    """What one reservation asked for."""

    accelerators: dict[int, tuple[int, ...]]
    cpu_holds: list[_Hold] = field(default_factory=list)


class Ledger:
    """Counts who uses which accelerator, and holds those that anybody uses."""

    def __init__(self, nodes: Sequence[NodeInfo], owner: str) -> None:
        self._nodes = list(nodes)
        self._owner = owner
        self._counts: dict[tuple[int, int], int] = {}
        self._holds: list[_Hold] = []
        self._entries: dict[int, _Entry] = {}
        self._next_token = 1

    def reserve(self, accelerators: Mapping[int, Sequence[int]], cpus: Mapping[int, float], timeout_s: float) -> int:
        """Holds accelerators (by node rank and local rank) and CPUs; returns a token.

        Raises:
            ReservationError: Naming every shortage, where they cannot be had in time.
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
        """Gives a reservation back; accelerators that nobody else uses become free."""
        entry = self._entries.pop(token, None)
        if entry is None:
            return
        for rank, wanted in entry.accelerators.items():
            for local in wanted:
                self._counts[rank, local] -= 1
        for hold in entry.cpu_holds:
            remove_placement_group(hold.group)
        kept = []
        for hold in self._holds:
            if any(self._counts.get((hold.node_rank, local)) for local in hold.accelerators):
                kept.append(hold)
            else:
                remove_placement_group(hold.group)
        self._holds = kept

    def held(self) -> dict[tuple[int, int], int]:
        """(node rank, local rank) → how many reservations use it."""
        return {key: count for key, count in self._counts.items() if count}

    # ---------------------------------------------------------------------------------------

    def _check_possible(self, cpus: Mapping[int, float]) -> None:
        findings = [
            Finding("R202", f"node {rank} has {self._nodes[rank].cpus:g} CPUs, and {count:g} are wanted")
            for rank, count in cpus.items()
            if count > self._nodes[rank].cpus
        ]
        if findings:
            raise ReservationError(findings)

    def _check_alive(self, ranks: Iterable[int]) -> None:
        """A node that is gone does not come back with the same id: waiting for it is in vain."""
        with asking_ray:
            alive = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
        gone = [self._nodes[rank] for rank in sorted(ranks) if self._nodes[rank].ray_id not in alive]
        if gone:
            fixes = (Fix("a new cluster, of the nodes that are there", "cluster.close(); Cluster(num_nodes=0)"),)
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
            with reservation_turn(max(deadline, time.monotonic() + 1.0)):
                before = free_resources()
                holds, cpu_holds, shortages = self._attempt(wanted, cpus, deadline)
                if not shortages:
                    self._holds += holds
                    entry.cpu_holds = cpu_holds
                    return
                for hold in (*holds, *cpu_holds):
                    remove_placement_group(hold.group)
                self._settle(before, {*wanted, *cpus})
            fewest = shortages if not fewest or len(shortages) < len(fewest) else fewest
            # What is free is known with a delay: one look alone might blame the wrong accelerator.
            if attempt >= 3 and time.monotonic() + 0.5 > deadline:
                raise ReservationError(_explain(fewest, timeout_s))
            time.sleep(0.2 + random.random() * 0.3)  # noqa: S311

    def _settle(self, before: Mapping[str, Mapping[str, float]], ranks: Iterable[int]) -> None:
        """Waits a moment until what was given back is counted as free: the next attempt, of whomever, relies on it."""
        deadline = time.monotonic() + 2.0
        names = [(self._nodes[rank].ray_id, self._nodes[rank].accelerator_type.ray_resource) for rank in ranks]
        while time.monotonic() < deadline:
            now = free_resources()
            if all(now.get(node, {}).get(name, 0.0) >= before.get(node, {}).get(name, 0.0) for node, name in names):
                return
            time.sleep(0.02)

    def _attempt(
        self, wanted: Mapping[int, Sequence[int]], cpus: Mapping[int, float], deadline: float
    ) -> tuple[list[_Hold], list[_Hold], list[Finding]]:
        """Everything at once, or the shortages."""
        free = free_resources()
        whole: list[_Hold] = []
        parts: dict[int, list[_Hold]] = {}
        cpu_holds = []
        for rank, locals_wanted in wanted.items():
            node = self._nodes[rank]
            resource = node.accelerator_type.ray_resource
            if len(locals_wanted) == node.num_accelerators:
                bundle = {resource: float(node.num_accelerators), **pin(node)}
                whole.append(_Hold(self._group(bundle), rank, tuple(locals_wanted)))
            else:
                count = int(free.get(node.ray_id, {}).get(resource, 0.0))
                singles = [self._group({resource: 1.0, **pin(node)}) for _ in range(count)]
                parts[rank] = [_Hold(group, rank) for group in singles]
        for rank, cpu_count in cpus.items():
            cpu_holds.append(_Hold(self._group({"CPU": cpu_count, **pin(self._nodes[rank])}), rank))
        patience = max(0.5, min(5.0, deadline - time.monotonic()))
        ready = _wait([*whole, *cpu_holds, *(hold for holds in parts.values() for hold in holds)], patience)
        shortages = [
            self._shortage(hold.node_rank, free, cpus) for hold in (*whole, *cpu_holds) if id(hold) not in ready
        ]
        kept = list(whole)
        for rank, holds in parts.items():
            got, missing = self._choose(rank, wanted[rank], [hold for hold in holds if id(hold) in ready])
            kept += got
            for hold in holds:
                if hold not in got:
                    remove_placement_group(hold.group)
            shortages += [self._taken(rank, local) for local in missing]
        return kept, cpu_holds, shortages

    def _group(self, bundle: dict[str, float]) -> PlacementGroup:
        """A placement group by whose name :func:`remove_holds` knows whose it is."""
        return placement_group([bundle], name=f"{_HOLD}:{self._owner}:{random.getrandbits(64):x}")

    def _choose(self, rank: int, wanted: Sequence[int], holds: Sequence[_Hold]) -> tuple[list[_Hold], list[int]]:
        """Of single accelerators of a node, those that are wanted; and the wanted ones that are not there."""
        node = self._nodes[rank]
        ids = [device.id for device in node.accelerators]
        resource = node.accelerator_type.ray_resource
        found: dict[int, _Hold] = {}
        for hold, given in zip(holds, _ids_of([hold.group for hold in holds], resource), strict=True):
            if given in ids:
                found[ids.index(given)] = hold
        got = []
        for local in wanted:
            if local in found:
                found[local].accelerators = (local,)
                got.append(found[local])
        return got, [local for local in wanted if local not in found]

    def _shortage(self, rank: int, free: Mapping[str, Mapping[str, float]], cpus: Mapping[int, float]) -> Finding:
        node = self._nodes[rank]
        resource = node.accelerator_type.ray_resource
        there = free.get(node.ray_id)
        if there is None:
            return Finding("R203", f"node {rank} ({node.address}) is gone")
        text = f"{there.get(resource, 0):g} of {node.num_accelerators} {node.accelerator_type.noun}s are free"
        if rank in cpus:
            text += f", {there.get('CPU', 0):g} of {node.cpus:g} CPUs are free and {cpus[rank]:g} are wanted"
        return Finding("R201", f"node {rank} ({node.address}): {text}")

    def _taken(self, rank: int, local: int) -> Finding:
        node = self._nodes[rank]
        noun = node.accelerator_type.noun
        return Finding("R201", f"node {rank} ({node.address}): {noun} {local} is held by another Ray job")


def _explain(shortages: Sequence[Finding], timeout_s: float) -> list[Finding]:
    fixes = (Fix("see who holds what", "ray status -v"), Fix("wait longer", "ROOST_RESERVE_TIMEOUT_S=600"))
    rule = f"waited {timeout_s:g} s for other jobs to give it back"
    unique = {finding.message: finding for finding in shortages}
    return [Finding(f.code, f.message, rule=rule, fixes=fixes) for f in unique.values()]


def _wait(holds: Sequence[_Hold], timeout_s: float) -> set[int]:
    """Ids of the holds whose groups came into being in time."""
    deadline = time.monotonic() + timeout_s
    ready = set()
    for hold in holds:
        # A group that has been there all along is not late because the one before it was.
        if hold.group.wait(max(0.05, deadline - time.monotonic())):
            ready.add(id(hold))
    return ready


def remove_holds(owner: str) -> None:
    """Gives back what a ledger whose actor is gone has held.

    Ray keeps the placement groups of an actor until the actor and its whole driver are gone.
    """
    from ray._raylet import PlacementGroupID

    with asking_ray:
        table = placement_group_table()
    for key, entry in table.items():
        if entry["name"].startswith(f"{_HOLD}:{owner}:") and entry["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(key))))


def free_resources() -> dict[str, dict[str, float]]:
    """Free resources by Ray's node id."""
    from ray._private.state import available_resources_per_node

    with asking_ray:
        found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def which_accelerator(resource: str) -> str:
    """Runs in a group of one accelerator: which is it?"""
    found = ray.get_runtime_context().get_accelerator_ids().get(resource) or [""]
    return str(found[0])


def _ids_of(groups: Sequence[PlacementGroup], resource: str) -> list[str]:
    """The accelerator ids of groups of one accelerator each.

    One after another: ``max_calls=0`` keeps the worker process (Ray would end it after each task that
    has a GPU), so that all of them cost one process start.
    """
    probe = ray.remote(num_cpus=0, max_calls=0)(which_accelerator)
    wanted: dict[str, Any] = {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}}
    ids = []
    for group in groups:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        ids.append(ray.get(probe.options(scheduling_strategy=strategy, **wanted).remote(resource), timeout=60))
    return ids


@contextmanager
def reservation_turn(deadline: float) -> Iterator[None]:
    """Waits for this job's turn to reserve; a turn that its holder did not end runs out by itself.

    Raises:
        ReservationError: Where the turn does not come before the deadline; it says who has it.
    """
    me = f"{ray.get_runtime_context().get_job_id()}:{os.getpid()}:{random.getrandbits(64):x}"
    while True:
        turn = json.dumps({"owner": me, "until": time.time() + _TURN_S}).encode()
        internal_kv._internal_kv_put(_LOCK, turn, overwrite=False)
        found = internal_kv._internal_kv_get(_LOCK)
        holder: dict[str, Any] = json.loads(found) if found else {"owner": me, "until": 0.0}
        if holder["owner"] == me:
            break
        if holder["until"] < time.time():
            internal_kv._internal_kv_del(_LOCK)
            continue
        if time.monotonic() > deadline:
            message = f"another Roost job has been reserving all the time (job {holder['owner'].partition(':')[0]})"
            raise ReservationError([Finding("R204", message)])
        time.sleep(0.02 + random.random() * 0.05)  # noqa: S311
    try:
        yield
    finally:
        found = internal_kv._internal_kv_get(_LOCK)
        if found and json.loads(found)["owner"] == me:  # it may have run out, and be another's now
            internal_kv._internal_kv_del(_LOCK)

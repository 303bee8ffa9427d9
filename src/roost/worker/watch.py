"""Watching jobs: the state of every rank, at the cost of one small call to each rank's control methods."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from roost.cluster.managers import MANAGERS
from roost.cluster.nodes import NodeInfo
from roost.hardware.accelerators import Usage
from roost.plan.states import AcceleratorStatus, CallError, GroupStatus, JobStatus, NodeStatus, RankStatus

__all__ = ["QUESTIONS_PER_NODE", "WatchedJob", "WatchedRank", "Watcher"]

logger = logging.getLogger("roost")

QUESTIONS_PER_NODE = 4.0
"""Number of ranks of a node that a repeated watch asks per second.

An answer costs a rank about a millisecond, nearly all of it in Ray, so watching stays under 1 % of a core on each node.
Ranks take turns: eight ranks on a node are each asked every two seconds.
"""
GROUPS_EVERY_S = 2.0
"""Seconds between two questions of a repeated watch for new and ended groups."""

LIST_EVERY_S = 5.0
"""Seconds between two searches for new jobs; each makes Ray list all named actors."""


@dataclass
class WatchedRank:
    """A rank, and how it is reached.

    Attributes:
        actor: Name of its actor.
        last: Its last known status.
        is_registered: Whether its launch has ended.
        handle: Its actor, once found.
        asked: Reference of the question that it has not answered yet.
        asked_at: When it was last asked, on the monotonic clock.
        answered_at: When it last answered, on the monotonic clock; 0 for never.
        usage: Usage of its node's accelerators, if its last answer had it.
    """

    actor: str
    last: RankStatus
    is_registered: bool
    handle: Any = None
    asked: Any = None
    asked_at: float = float("-inf")
    answered_at: float = 0.0
    usage: list[Usage] = field(default_factory=list)

    @property
    def is_dead(self) -> bool:
        """Whether the worker has ended; workers are never restarted."""
        return self.last.state == "dead"

    def status(self) -> RankStatus:
        """Return the status now: the last known one, with the time since then added to its durations."""
        last, age_s = self.last, time.monotonic() - self.answered_at
        if not self.answered_at or last.state not in ("busy", "starting", "ready"):
            return last
        since_s = last.since_s + age_s if last.state != "ready" else 0.0
        error = last.last_error
        return replace(
            last, since_s=since_s, last_error=replace(error, ago_s=error.ago_s + age_s) if error is not None else None
        )

    def die(self, reason: str) -> None:
        """Record that the worker has ended."""
        self.last = replace(self.last, state="dead", reason=reason, running=0)
        self.handle = self.asked = None
        self.usage = []


class WatchedJob:
    """One job: its managers, and its ranks by group.

    Attributes:
        namespace: Namespace of the job.
        managers: The actor of its managers.
        groups: Name of a group → its id, the name of its class, its ranks.
        was_asked: Whether its ranks were asked before.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.managers = ray.get_actor(MANAGERS, namespace=namespace)
        self.groups: dict[str, tuple[str, str, list[WatchedRank]]] = {}
        self.was_asked = False
        self._change = 0
        self._owner: dict[str, Any] = {}
        self._machines = ""
        self._nodes: list[NodeInfo] = []
        self._refreshed_at = float("-inf")
        self._usage_ranks: dict[int, WatchedRank] = {}  # node → the rank last asked for its accelerators

    def refresh_groups(self, timeout_s: float, every_s: float = 0.0) -> None:
        """Ask the managers for changed groups, and the first time for the nodes.

        Args:
            timeout_s: Seconds to wait for the managers.
            every_s: Do nothing if the last refresh was less than so many seconds ago.

        Raises:
            RayError: The managers have died, or do not answer in time.
        """
        if time.monotonic() - self._refreshed_at < every_s:
            return
        refs = [self.managers.get_groups_since.remote(self._change)]
        if not self._owner:
            names = ("owner", "get_topology", "get_nodes")
            refs += [getattr(self.managers, name).remote() for name in names]
        (change, groups), *facts = ray.get(refs, timeout=timeout_s)
        if facts:
            self._owner, topology, self._nodes = facts
            self._machines = topology.describe()
        self._refreshed_at = time.monotonic()
        if groups is None:
            return
        self._change = change
        self.groups = {name: self._group(name, record) for name, record in sorted(groups.items())}

    def _group(self, name: str, record: dict[str, Any]) -> tuple[str, str, list[WatchedRank]]:
        known = self.groups.get(name)
        before = known[2] if known is not None and known[0] == record["id"] else []
        is_registered = bool(record["workers"])
        ranks = []
        for index, worker in enumerate(record["workers"] or record["starting"]):
            facts = {**worker, "accelerators": tuple(worker["accelerators"])}
            if index < len(before):
                rank = before[index]
                rank.last, rank.is_registered = replace(rank.last, **facts), is_registered
            else:
                rank = WatchedRank(f"{name}:{worker['rank']}", RankStatus(**facts), is_registered)
            ranks.append(rank)
        return record["id"], record.get("class", ""), ranks

    def ranks(self) -> Iterator[WatchedRank]:
        """Yield all ranks of all groups."""
        for _, _, ranks in self.groups.values():
            yield from ranks

    def ask(self, per_node: int | None = None) -> None:
        """Ask ranks for their state. Ranks with a question in flight are passed over.

        One rank of each node is also asked for the usage of the node's accelerators.

        Args:
            per_node: Ask at most so many ranks of a node, those first that were not asked for the longest time;
                default all.
        """
        by_node: dict[int, list[WatchedRank]] = {}
        for rank in self.ranks():
            if not rank.is_dead and rank.asked is None:
                by_node.setdefault(rank.last.node_rank, []).append(rank)
        real = {node.rank for node in self._nodes if node.accelerators_are_real}
        for node, ranks in by_node.items():
            if per_node is not None:
                ranks = sorted(ranks, key=lambda rank: rank.asked_at)[:per_node]
            needs_usage = node in real
            for rank in ranks:
                if self.find(rank):
                    if needs_usage:
                        self._usage_ranks[node] = rank
                    rank.asked = rank.handle.state.remote(needs_usage)
                    rank.asked_at = time.monotonic()
                    needs_usage = False

    def find(self, rank: WatchedRank) -> bool:
        """Look up the actor of a rank; return whether it exists. A registered rank without an actor has died."""
        if rank.handle is None:
            try:
                rank.handle = ray.get_actor(rank.actor, namespace=self.namespace)
            except ValueError:
                if rank.is_registered:
                    rank.die("its process was ended")
                return False
        return True

    def take(self, ready: set[Any]) -> None:
        """Take the answers that have arrived; registered ranks without one become ``silent``."""
        for rank in self.ranks():
            if rank.asked is None:
                continue
            if rank.asked in ready:
                try:
                    answer = ray.get(rank.asked)
                except ray.exceptions.RayError as error:
                    rank.die(_reason(error))
                    continue
                rank.asked, rank.answered_at = None, time.monotonic()
                rank.usage = answer.pop("usage", [])
                rank.last = replace(rank.last, **_facts(answer))
            elif rank.is_registered:
                since = time.monotonic() - rank.asked_at
                rank.last = replace(rank.last, state="silent", since_s=since)
                rank.usage = []

    def status(self) -> JobStatus:
        """Return the status of the job as far as it is known."""
        groups = tuple(
            GroupStatus(name, tuple(rank.status() for rank in ranks), kind)
            for name, (_, kind, ranks) in self.groups.items()
        )
        usage = {(node, used.uuid): used for node, rank in self._usage_ranks.items() for used in rank.usage}
        nodes = tuple(_node_status(node, usage) for node in self._nodes)
        return JobStatus(self._owner, self._machines, groups, nodes, time.time())


class Watcher:
    """Observes all jobs on the Ray that this process has joined, repeatedly.

    It caches what does not change. A rank with a question in flight is not asked again, so questions do not pile up in
    front of a worker that holds the interpreter lock for a long time.

    Args:
        interval_s: Seconds between two calls of :meth:`look`, for a repeated watch. Then the ranks of a node take turns
            (see :data:`QUESTIONS_PER_NODE`), to spare the job. Default: every call asks all ranks.
    """

    def __init__(self, interval_s: float | None = None) -> None:
        self._per_node = None if interval_s is None else max(1, round(QUESTIONS_PER_NODE * interval_s))
        self._groups_every_s = 0.0 if interval_s is None else GROUPS_EVERY_S
        self._jobs: dict[str, WatchedJob] = {}
        self._listed_at = float("-inf")

    def look(self, timeout_s: float = 5.0) -> list[JobStatus]:
        """Return the status of every job. Blocks at most ``timeout_s`` for the managers of each job, and again for all ranks."""
        jobs = self.refresh(timeout_s)
        for job in jobs:
            job.ask(self._per_node if job.was_asked else None)
            job.was_asked = True
        asked = [rank.asked for job in jobs for rank in job.ranks() if rank.asked is not None]
        ready = set(ray.wait(asked, num_returns=len(asked), timeout=timeout_s)[0]) if asked else set()
        for job in jobs:
            job.take(ready)
        return [job.status() for job in jobs]

    def refresh(self, timeout_s: float = 5.0) -> list[WatchedJob]:
        """Return the jobs with their groups as they are now, without asking their ranks."""
        if time.monotonic() - self._listed_at >= LIST_EVERY_S:
            self._list()
        for namespace, job in list(self._jobs.items()):
            try:
                job.refresh_groups(timeout_s, self._groups_every_s)
            except ray.exceptions.GetTimeoutError:
                continue  # the managers are busy: the last known groups stay
            except ray.exceptions.RayError as error:
                logger.debug("the job in the namespace %r has ended: %s", namespace, error)
                del self._jobs[namespace]
                self._listed_at = float("-inf")
        return [job for _, job in sorted(self._jobs.items()) if job._owner]

    def _list(self) -> None:
        named = ray.util.list_named_actors(all_namespaces=True)
        for namespace in {entry["namespace"] for entry in named if entry["name"] == MANAGERS} - set(self._jobs):
            try:
                self._jobs[namespace] = WatchedJob(namespace)
            except ValueError:
                continue  # the job has ended since the actors were listed
        self._listed_at = time.monotonic()


def _node_status(node: NodeInfo, usage: Mapping[tuple[int, str], Usage]) -> NodeStatus:
    accelerators = []
    for device in node.accelerators:
        used = usage.get((node.rank, device.uuid)) if device.uuid else None
        if used is None:
            accelerators.append(AcceleratorStatus(device.memory_gib))
        else:
            accelerators.append(AcceleratorStatus(used.memory_gib, used.used_gib, used.busy))
    model = node.accelerators[0].model if node.accelerators else ""
    return NodeStatus(node.rank, node.address, node.name, model, tuple(accelerators))


def _facts(answer: dict[str, Any]) -> dict[str, Any]:
    error = answer.pop("last_error", None)
    facts = {key: value for key, value in answer.items() if key in RankStatus.__dataclass_fields__}
    facts["last_error"] = CallError(**error) if error else None
    return facts


def _reason(error: BaseException) -> str:
    """Return the reason that Ray gives for the death of an actor, without Ray's advice."""
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    detail = re.search(r"Worker exit type: (\w+) Worker exit detail: (.*?)(?: Some common causes|$)", text)
    if detail is not None:
        return f"its process ended ({detail[1]}: {detail[2].rstrip('. ')[:200]})"
    because = re.search(r"(?:dead|died) because (.*?\.)(?: |$)", text)
    return (because[1] if because is not None else text)[:200]

"""Measuring the nodes of a Ray, and putting them in cluster order."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.cluster.accelerators import MADE_UP_VARIABLE, AcceleratorFacts, accelerators_of, look_at_accelerators
from roost.cluster.ray_typed import pickled
from roost.errors import ClusterError, Finding, Fix
from roost.hardware import AcceleratorType
from roost.hardware.accelerators import Device
from roost.hardware.devices import hardware_detectors
from roost.topology import Hardware, Node
from roost.topology.order import natural_key, stable_order_key

__all__ = ["NodeInfo", "measure_nodes", "order_nodes"]

logger = logging.getLogger("roost")

RANK_VARIABLE = "ROOST_NODE_RANK"
"""Variable of a raylet with the rank that its node is to have."""


@dataclass(frozen=True)
class NodeInfo:
    """A node, as measured by a task that ran on it.

    Attributes:
        rank: Rank of the node in the cluster; -1 before nodes are put in order.
        ray_id: Ray's id of the node.
        address: IP address.
        name: Host name.
        is_head: Whether it is Ray's head node.
        cpus: CPUs that Ray counts on it.
        memory_gib: Host memory, in GiB.
        accelerators: Its accelerators, in the order of their ids.
        accelerator_type: Type (vendor) of these accelerators.
        accelerators_are_real: Whether a driver library lists them; if not, only Ray's count is known.
        interpreter: Path of the Python interpreter that runs workers.
        python_version: Version of that interpreter.
        ray_version: Version of Ray.
        wanted_rank: Value of ``ROOST_NODE_RANK`` on the node; empty if not set.
        labels: Ray's labels of the node.
        clock_s: Seconds by which its clock was ahead of the driver's when it was measured.
        hardware: Robots and other devices that registered types found on it.
        num_detected: Number of accelerators that the driver library lists, whatever Ray counts.
        driver_error: How the driver library failed on it; empty if it works or is not installed.
    """

    ray_id: str
    address: str
    rank: int = -1
    name: str = ""
    is_head: bool = False
    cpus: float = 0.0
    memory_gib: float = 0.0
    accelerators: tuple[Device, ...] = ()
    accelerator_type: AcceleratorType = AcceleratorType.NO_ACCEL
    accelerators_are_real: bool = False
    interpreter: str = ""
    python_version: str = ""
    ray_version: str = ""
    wanted_rank: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    clock_s: float = 0.0
    num_detected: int = 0
    hardware: tuple[Hardware, ...] = ()
    driver_error: str = ""

    @property
    def num_accelerators(self) -> int:
        """Number of accelerators."""
        return len(self.accelerators)

    @property
    def num_gpus(self) -> int:
        """Older name of ``num_accelerators``."""
        return len(self.accelerators)

    @property
    def num_cpus(self) -> float:
        """Older name of ``cpus``."""
        return self.cpus

    @property
    def node_ip(self) -> str:
        """Older name of ``address``."""
        return self.address

    def without_faulty(self) -> str:
        """Return the command that restarts Ray on this node without its faulty accelerators, or advice if none is left."""
        healthy = ",".join(device.id for device in self.accelerators if not device.fault)
        if not healthy:
            return "repair this node, or leave it out of Ray"
        return f"restart Ray there without it: {self.accelerator_type.visible_devices_variable}={healthy} ray start …"

    def as_node(self) -> Node:
        """Return this node as a node of a topology."""
        first = next((device for device in self.accelerators if not device.fault), None)
        return Node(
            self.rank,
            self.name,
            self.address,
            self.cpus,
            self.memory_gib,
            tuple(device.id for device in self.accelerators),
            self.accelerator_type,
            first.model if first else "",
            first.memory_gib if first else None,
            dict(self.labels),
            self.hardware,
        )


def measure_nodes(ray_nodes: Sequence[Mapping[str, Any]], timeout_s: float) -> list[NodeInfo]:
    """Measure all nodes at the same time, by a task on each.

    Args:
        ray_nodes: Entries of Ray's node table.
        timeout_s: Seconds in which all tasks must end.

    Raises:
        ClusterError: Nodes do not answer in time, or a task failed (R104).
    """
    probe = ray.remote(num_cpus=0, max_retries=1)(_measure)
    detectors = pickled(hardware_detectors())
    tasks = {
        probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            detectors
        ): node
        for node in ray_nodes
    }
    done, silent = ray.wait(list(tasks), num_returns=len(tasks), timeout=timeout_s)
    if silent:
        names = ", ".join(str(tasks[task]["NodeManagerAddress"]) for task in silent[:10])
        message = f"{len(silent)} of {len(tasks)} nodes did not answer within {timeout_s:g} s: {names}"
        raise ClusterError([Finding("R104", message, rule="every node runs a small measuring task first")])
    now = time.time()
    try:
        facts = ray.get(done)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error  # the text of Ray's error has colours, and begins with the task
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        raise ClusterError([Finding("R104", f"a node could not be measured: {reason}")]) from error
    return [_combine(tasks[task], measured, now) for task, measured in zip(done, facts, strict=True)]


def _measure(detectors: bytes) -> dict[str, Any]:
    """Runs on the node."""
    import psutil

    hardware = [
        Hardware(name, {key: value for key, value in dataclasses.asdict(item).items() if key != "node_rank"})
        for name, cls in sorted(cloudpickle.loads(detectors).items())
        for item in cls.detect()
    ]

    raylet = _raylet_environment()
    return {
        "name": platform.node(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerators": look_at_accelerators(raylet),
        "hardware": tuple(hardware),
        "raylet_environment": raylet,
        "interpreter": sys.executable,
        "python_version": platform.python_version(),
        "ray_version": ray.__version__,
        "clock": time.time(),
    }


def _raylet_environment() -> dict[str, str]:
    """Return the variables of this task's raylet; Ray may have changed them in the task's own process."""
    names = {RANK_VARIABLE, MADE_UP_VARIABLE} | {
        kind.visible_devices_variable for name in AcceleratorType.names() if (kind := AcceleratorType.get(name))
    }
    try:
        found = psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError) as error:
        logger.debug("the environment of the raylet is not readable: %s", error)
        found = dict(os.environ)
    return {name: found[name] for name in names & found.keys()}


def _combine(node: Mapping[str, Any], facts: Mapping[str, Any], now: float) -> NodeInfo:
    resources: Mapping[str, float] = node["Resources"]
    seen: AcceleratorFacts = facts["accelerators"]
    labels = {key: value for key, value in (node.get("Labels") or {}).items() if key != "ray.io/node-id"}
    kind, devices, are_real = accelerators_of(resources, labels, seen)
    return NodeInfo(
        ray_id=node["NodeID"],
        address=node["NodeManagerAddress"],
        name=facts["name"],
        is_head="node:__internal_head__" in resources,
        cpus=resources.get("CPU", 0.0),
        memory_gib=facts["memory_gib"],
        accelerators=devices,
        accelerator_type=kind,
        accelerators_are_real=are_real,
        interpreter=facts["interpreter"],
        python_version=facts["python_version"],
        ray_version=facts["ray_version"],
        wanted_rank=facts["raylet_environment"].get(RANK_VARIABLE, ""),
        labels=labels,
        clock_s=facts["clock"] - now,
        num_detected=len(seen.devices),
        driver_error=seen.driver_error,
        hardware=facts["hardware"],
    )


def order_nodes(nodes: Sequence[NodeInfo], order: str = "address") -> list[NodeInfo]:
    """Return nodes in cluster order, with their ranks.

    If ``ROOST_NODE_RANK`` is set on all nodes, it decides. Else the head is first, and the others follow by address (as
    numbers), by name, or by the value of a label.

    Args:
        nodes: The nodes, in any order.
        order: ``address``, ``name`` or ``label:KEY``.

    Raises:
        ClusterError: ``ROOST_NODE_RANK`` is not 0, 1, 2, … (R105), or nodes lack the label (R106).
    """
    if any(node.wanted_rank for node in nodes):
        ordered = _by_wanted_rank(nodes)
    else:
        ordered = sorted(nodes, key=lambda node: (not node.is_head, *_order_key(node, order)))
    return [replace(node, rank=rank) for rank, node in enumerate(ordered)]


def _order_key(node: NodeInfo, order: str) -> tuple[Any, ...]:
    address = stable_order_key(node.address, 0, lambda name: None)
    if order == "address":
        return address
    if order == "name":
        return (natural_key(node.name), address)
    label = order.partition(":")[2]
    if label not in node.labels:
        known = ", ".join(sorted(node.labels)) or "none"
        message = f"node {node.address} has no label {label!r}, and node_order asks for it"
        raise ClusterError([Finding("R106", message, rule=f"its labels: {known}")])
    return (natural_key(node.labels[label]), address)


def _by_wanted_rank(nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    shown = ", ".join(f"{node.address}: {node.wanted_rank or 'not set'}" for node in nodes[:16])
    try:
        ranks = [int(node.wanted_rank) for node in nodes]
    except ValueError:
        ranks = []
    if sorted(ranks) != list(range(len(nodes))):
        message = f"{RANK_VARIABLE} must be set on all nodes or on none, and count from 0: {shown}"
        fix = Fix("on each node, before it starts", f"{RANK_VARIABLE}=0 ray start …")
        raise ClusterError([Finding("R105", message, fixes=(fix,))])
    return sorted(nodes, key=lambda node: int(node.wanted_rank))

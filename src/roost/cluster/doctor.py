"""``roost doctor``: whether the nodes of a Ray are fit for a job, one check per node and question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.cluster.nodes import NodeInfo
from roost.cluster.ports import lease_ports
from roost.errors import RoostError, counted

__all__ = ["Check", "examine"]

CLOCK_LIMIT_S = 2.0
"""Largest difference between the clocks of a node and of this process that is fine."""


@dataclass(frozen=True)
class Check:
    """The result of one check of one node.

    Attributes:
        node_rank: Rank of the node.
        question: What was checked.
        is_well: Whether it passed.
        finding: What was found.
        fix: What to do if it failed.
    """

    node_rank: int
    question: str
    is_well: bool
    finding: str
    fix: str = ""


def examine(nodes: Sequence[NodeInfo]) -> list[Check]:
    """Run all checks on all nodes. Blocks for up to a minute while ports are tried."""
    head = nodes[0]
    ports = _ports(nodes)
    checks = []
    for node, ports_found in zip(nodes, ports, strict=True):
        checks += [
            _equal(node, "Ray", node.ray_version, head.ray_version, f"pip install ray=={head.ray_version}"),
            _equal(
                node, "Python", _minor(node.python_version), _minor(head.python_version),
                f"use Python {_minor(head.python_version)} on this node",
            ),
            _accelerators(node),
            *_devices(node),
            _busy(node),
            _clock(node),
            Check(
                node.rank, "ports", not ports_found, ports_found or "can be leased and held",
                "free some ports above 20000: ss -tlnp" if ports_found else "",
            ),
            Check(node.rank, "interpreter", bool(node.interpreter), node.interpreter or "not known"),
        ]  # fmt: skip
    return checks


def _equal(node: NodeInfo, question: str, found: str, wanted: str, fix: str) -> Check:
    is_well = found == wanted
    text = found if is_well else f"{found}, and the head has {wanted}"
    return Check(node.rank, question, is_well, text, "" if is_well else fix)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _accelerators(node: NodeInfo) -> Check:
    noun = node.accelerator_type.noun
    if node.driver_error:
        text = f"Ray counts {counted(node.num_accelerators, noun)}; {node.driver_error}"
        return Check(node.rank, "accelerators", False, text, "see what nvidia-smi and dmesg say on this node")
    if not node.accelerators:
        seen = node.num_detected
        text = f"Ray counts none, and the driver library sees {seen}" if seen else "none"
        fix = f"ray start --num-gpus={seen} …" if seen else ""
        return Check(node.rank, "accelerators", not seen, text, fix)
    models = sorted({device.model for device in node.accelerators if device.model})
    what = counted(node.num_accelerators, noun) + (f" ({', '.join(models)})" if models else "")
    if node.accelerators_are_real:
        is_well = node.num_detected == node.num_accelerators
        text = what if is_well else f"{what}; the driver library sees {node.num_detected}"
        return Check(node.rank, "accelerators", is_well, text, "" if is_well else "restart Ray on this node")
    if node.accelerator_type.detect is None:
        vendor = node.accelerator_type.name
        return Check(node.rank, "accelerators", True, f"{what} of {vendor}, as Ray counts them; no driver was asked")
    return Check(node.rank, "accelerators", True, f"{what}, made up: no driver library knows them")


def _devices(node: NodeInfo) -> list[Check]:
    """Return a check for each accelerator that the driver library knows."""
    rows = []
    for device in node.accelerators if node.accelerators_are_real and not node.driver_error else ():
        if device.fault:
            question = f"{node.accelerator_type.noun} {device.id}"
            rows.append(Check(node.rank, question, False, device.fault, node.without_faulty()))
            continue
        facts = [device.model]
        if device.memory_gib is not None and device.used_gib is not None:
            facts.append(f"{device.used_gib:.1f} of {device.memory_gib:.1f} GiB used")
        if device.busy is not None:
            facts.append(f"{device.busy:.0%} busy")
        found = ", ".join(fact for fact in (*facts, device.uuid) if fact)
        rows.append(Check(node.rank, f"{node.accelerator_type.noun} {device.id}", True, found))
    return rows


def _busy(node: NodeInfo) -> Check:
    busy = [device for device in node.accelerators if device.pids]
    if not busy:
        return Check(node.rank, "busy", True, "no process uses its accelerators")
    text = "; ".join(
        f"{device.id}: process{'es' if len(device.pids) > 1 else ''} {', '.join(map(str, device.pids))}"
        + (f" ({device.used_gib:g} GiB)" if device.used_gib is not None else "")
        for device in busy[:8]
    )  # fmt: skip
    return Check(node.rank, "busy", False, text, "end those processes, or keep the job off these accelerators")


def _clock(node: NodeInfo) -> Check:
    is_well = abs(node.clock_s) <= CLOCK_LIMIT_S
    fix = "" if is_well else "set the clock: chronyc makestep"
    return Check(node.rank, "clock", is_well, f"{node.clock_s:+.1f} s from here", fix)


def _try_ports() -> str:
    """Return why ports cannot be leased on this node; empty if they can."""
    try:
        lease_ports(8).release()
    except (RoostError, OSError) as error:
        return str(error).splitlines()[0]
    return ""


def _ports(nodes: Sequence[NodeInfo]) -> list[str]:
    """Return why ports cannot be leased, for each node; empty if they can."""
    probe = ray.remote(num_cpus=0)(_try_ports)
    refs = [
        probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.ray_id, soft=False)).remote()
        for node in nodes
    ]
    found: list[str] = ray.get(refs, timeout=60)
    return found

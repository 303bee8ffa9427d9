"""What only reality knows: where a plan's processes really are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roost.cluster.nodes import NodeInfo
from roost.errors import AttestationError, Finding, Fix, LaunchError
from roost.hardware.accelerators import Device
from roost.plan import ComponentPlan, Plan, Process
from roost.worker.strangers import Stranger, findings_of

__all__ = ["Attestation", "Binding", "asks_driver", "check_faults", "check_strangers", "compare"]


@dataclass(frozen=True)
class Attestation:
    """What one worker process found before any of the user's code ran.

    Attributes:
        rank: Its rank.
        ray_node_id: Ray's id of the node that it runs on.
        address: That node's address.
        pid: Its process id.
        interpreter: The Python that runs it.
        visible: What the visible-devices variable says in it.
        uuids: What the driver library really shows it; ``None`` where there is none to ask, or it fails.
        strangers: Processes of others that hold memory of the node's accelerators, where it was asked to look.
        driver_error: Why the driver library does not tell; empty where it does, or was not asked.
        started: When its process started, as the kernel of its node counts; tells it from a later one with its pid.
    """

    rank: int
    ray_node_id: str
    address: str
    pid: int
    interpreter: str
    visible: str | None
    uuids: tuple[str, ...] | None
    strangers: tuple[Stranger, ...] = ()
    driver_error: str = ""
    started: int = 0


@dataclass(frozen=True)
class Binding:
    """A plan bound to real machines.

    Attributes:
        plan: The plan.
        component: The component of it that was launched.
        epoch: Counts bindings of the same plan; a new one follows the loss of a node.
        node_ids: Ray's id of the node of each rank.
        uuids: UUIDs of the accelerators of each rank; empty where they are made up.
        attestations: What each worker found.
        master_address: Where rank 0 is.
        master_port: A port there that is held for the group.
        reservation: Token of the reservation; 0 where nothing was reserved.
    """

    plan: Plan
    component: str
    epoch: int
    node_ids: tuple[str, ...]
    uuids: tuple[tuple[str, ...], ...]
    attestations: tuple[Attestation, ...]
    master_address: str
    master_port: int
    reservation: int


def asks_driver(process: Process, node: NodeInfo) -> bool:
    """Return whether attestation asks the driver library in this process, and compares accelerators by UUID.

    A process without accelerators of its own is not asked. It sees all of the node, and one lost GPU, which no other
    process of the job uses, would then prevent its launch: the list differs from the plan, or CUDA does not start.
    """
    return node.accelerators_are_real and bool(process.placement.accelerators)


def compare(group: str, processes: Sequence[Process], nodes: Sequence[NodeInfo], found: Sequence[Attestation]) -> None:
    """Compares what workers found with what the plan says.

    Nodes and interpreters are always compared. Accelerators are compared by UUID where the driver library knows them and
    the process has some of its own, and otherwise by the visible-devices variable.

    Raises:
        AttestationError: With both rows for every worker that got something else.
    """
    findings = []
    for process, attestation in zip(processes, found, strict=True):
        node = nodes[process.placement.cluster_node_rank]
        planned = _planned(process, node)
        measured = _measured(attestation, planned)
        wrong = [key for key, value in planned.items() if measured[key] != value]
        if wrong:
            findings.append(
                Finding(
                    "W104",
                    f"{group}[{attestation.rank}] on node {node.rank}: {', '.join(wrong)} is not as planned",
                    context=(f"planned:  {_row(planned)}", f"measured: {_row(measured)}"),
                    rule="a worker runs only where, and with what, its plan says",
                )
            )
    if findings:
        raise AttestationError(findings)


def check_faults(nodes: Sequence[NodeInfo], processes: Sequence[Process]) -> None:
    """Refuses accelerators that do not work, for processes that use accelerators and would use or see these.

    A process without accelerators of its own may be beside one that does not work.

    Raises:
        LaunchError: With every such accelerator.
    """
    wanted: dict[int, set[str]] = {}
    for placement in (process.placement for process in processes):
        if placement.accelerators:
            wanted.setdefault(placement.cluster_node_rank, set()).update(placement.visible_accelerators)
    findings = [
        Finding(
            "W114",
            f"node {rank} ({nodes[rank].address}), {_name(nodes[rank], device)} cannot be used: {device.fault}",
            rule="a worker is shown accelerators that work: CUDA may fail for all of them where one is lost",
            fixes=(Fix(nodes[rank].without_faulty()),),
        )
        for rank, ids in sorted(wanted.items())
        for device in nodes[rank].accelerators
        if device.fault and device.id in ids
    ]
    if findings:
        raise LaunchError(findings)


def check_strangers(
    component: ComponentPlan, nodes: Sequence[NodeInfo], processes: Sequence[Process], found: Sequence[Attestation]
) -> None:
    """Refuses accelerators whose memory others hold: they would leave too little.

    Raises:
        LaunchError: With every process that holds some.
    """
    findings: list[Finding] = []
    used = component.accelerators
    for process, attestation in zip(processes, found, strict=True):
        if not attestation.strangers:
            continue
        node = nodes[process.placement.cluster_node_rank]
        devices = [node.accelerators[index] for index in used.get(node.rank, ())]
        names = {device.uuid: _name(node, device) for device in devices}
        findings += findings_of(node.rank, attestation.strangers, names)
    if findings:
        raise LaunchError(findings)


def _name(node: NodeInfo, device: Device) -> str:
    name = f"{node.accelerator_type.noun} {device.id}"
    return name if device.memory_gib is None else f"{name} ({device.memory_gib:g} GiB)"


def _planned(process: Process, node: NodeInfo) -> dict[str, Any]:
    visible = process.placement.visible_accelerators
    planned: dict[str, Any] = {"node": node.ray_id}
    if process.interpreter:
        planned["interpreter"] = process.interpreter
    if asks_driver(process, node):
        by_id = {device.id: device.uuid for device in node.accelerators}
        planned["accelerators"] = tuple(by_id[item] for item in visible)
    elif node.accelerators:
        planned["visible devices"] = ",".join(visible)
    return planned


def _measured(found: Attestation, planned: dict[str, Any]) -> dict[str, Any]:
    measured = {
        "node": found.ray_node_id,
        "interpreter": found.interpreter,
        "accelerators": f"not known ({found.driver_error})" if found.driver_error else found.uuids,
        "visible devices": found.visible,
    }
    return {key: measured[key] for key in planned}


def _row(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())

"""``Binding``: a plan tied to real nodes; and the checks of what workers found there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roost.cluster.nodes import NodeInfo
from roost.errors import AttestationError, Finding, Fix, LaunchError
from roost.hardware.accelerators import Device
from roost.plan import ComponentPlan, Plan, Process
from roost.worker.foreign_processes import ForeignProcess, findings_of

__all__ = ["Attestation", "Binding", "asks_driver", "check_faults", "check_foreign_processes", "compare"]


@dataclass(frozen=True)
class Attestation:
    """What a worker process found out about itself before any of the user's code ran.

    Attributes:
        rank: Rank of the worker.
        ray_node_id: Ray's id of the worker's node.
        address: Address of that node.
        pid: Process id of the worker.
        interpreter: Path of the Python interpreter that runs it.
        visible: Value of the visible-devices variable in its environment.
        uuids: UUIDs of the accelerators that the driver library shows to it; ``None`` if there is no driver library,
            or it fails.
        foreign_processes: Foreign processes on the accelerators of the node, if this worker looked for them.
        driver_error: How the driver library failed; empty if it works or was not asked.
        started: When the process started, in seconds after the boot of its node.
    """

    rank: int
    ray_node_id: str
    address: str
    pid: int
    interpreter: str
    visible: str | None
    uuids: tuple[str, ...] | None
    foreign_processes: tuple[ForeignProcess, ...] = ()
    driver_error: str = ""
    started: float = 0.0


@dataclass(frozen=True)
class Binding:
    """A component of a plan, tied to real nodes.

    Attributes:
        plan: The plan.
        component: Name of the component that was launched.
        epoch: Number of this binding of the plan, from 1; the loss of a node leads to the next one.
        node_ids: Ray's id of the node of each rank.
        uuids: UUIDs of the accelerators of each rank; empty for made-up accelerators.
        attestations: The attestation of each rank.
        master_address: Address of the node of rank 0.
        master_port: A port on that node, leased for the group.
        reservation: Token of the reservation; 0 if nothing was reserved.
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
    """Compare the attestations of workers with the plan.

    Nodes are always compared, and interpreters if the plan names them. Accelerators are compared by UUID if the driver
    library knows them and the process has some of its own, else by the value of the visible-devices variable: made-up
    accelerators have nothing else.

    Raises:
        AttestationError: Workers differ from the plan (W104); it shows the planned and the measured row of each.
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
    """Refuse accelerators that do not work, for processes that have accelerators and would use or see these.

    A process without accelerators of its own may be beside one that does not work.

    Raises:
        LaunchError: There are such accelerators (W114); it names each of them.
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


def check_foreign_processes(
    component: ComponentPlan, nodes: Sequence[NodeInfo], processes: Sequence[Process], found: Sequence[Attestation]
) -> None:
    """Refuse accelerators of which foreign processes hold memory: too little would be left for the component.

    Raises:
        LaunchError: There are such processes (W113); it names each of them.
    """
    findings: list[Finding] = []
    used = component.accelerators
    for process, attestation in zip(processes, found, strict=True):
        if not attestation.foreign_processes:
            continue
        node = nodes[process.placement.cluster_node_rank]
        devices = [node.accelerators[index] for index in used.get(node.rank, ())]
        names = {device.uuid: _name(node, device) for device in devices}
        findings += findings_of(node.rank, attestation.foreign_processes, names)
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

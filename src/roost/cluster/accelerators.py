"""Which accelerators a node has: what Ray counts there, and what the node's driver says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from roost.errors import RoostError
from roost.hardware import AcceleratorType
from roost.hardware.accelerators import Device

__all__ = ["MADE_UP_VARIABLE", "AcceleratorFacts", "accelerators_of", "look_at_accelerators"]

MADE_UP_VARIABLE = "ROOST_MADE_UP_ACCELERATORS"
"""Set on a raylet, to the name of a vendor: its accelerators are made up, whatever the computer really has."""


@dataclass(frozen=True)
class AcceleratorFacts:
    """What was found on a node.

    Attributes:
        devices: What the driver library lists.
        vendor: Whose driver library that is, or whose accelerators are made up here; empty where neither is.
        driver_error: How the driver library fails; empty where it works, or is not there.
        is_made_up: Whether the node says that its accelerators are made up.
        raylet_environment: Visible-devices variables of the raylet.
    """

    devices: tuple[Device, ...] = ()
    vendor: str = ""
    driver_error: str = ""
    is_made_up: bool = False
    raylet_environment: Mapping[str, str] = field(default_factory=dict)


def look_at_accelerators(raylet_environment: Mapping[str, str]) -> AcceleratorFacts:
    """Ask the drivers of this node; the first that has accelerators, or fails, is the node's."""
    made_up = raylet_environment.get(MADE_UP_VARIABLE, "")
    if made_up:
        return AcceleratorFacts(vendor=made_up, is_made_up=True, raylet_environment=raylet_environment)
    for name in AcceleratorType.names():
        kind = AcceleratorType.get(name)
        if kind is None or kind.detect is None:
            continue
        try:
            devices = tuple(kind.detect())
        except Exception as error:  # also of a vendor that the user registered
            text = str(error.findings[0]) if isinstance(error, RoostError) else f"{type(error).__name__}: {error}"
            return AcceleratorFacts(vendor=name, driver_error=text, raylet_environment=raylet_environment)
        if devices:
            return AcceleratorFacts(devices, name, raylet_environment=raylet_environment)
    return AcceleratorFacts(raylet_environment=raylet_environment)


def accelerators_of(
    resources: Mapping[str, float], facts: AcceleratorFacts
) -> tuple[AcceleratorType, tuple[Device, ...], bool]:
    """Return the vendor of the accelerators that Ray counts on a node, these accelerators, and whether they are real."""
    kind, count = _counted(resources, facts.vendor)
    if not count:
        return AcceleratorType.NO_ACCEL, (), False
    visible = facts.raylet_environment.get(kind.visible_devices_variable)
    ids = [item.strip() for item in visible.split(",") if item.strip()] if visible else []
    if len(ids) != count:
        ids = [str(i) for i in range(count)]
    is_real = kind.name == facts.vendor and not facts.is_made_up
    devices = [_device(item, facts) if is_real else Device(item) for item in ids]
    model = next((key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")), "")
    return kind, tuple(device if device.model else replace(device, model=model) for device in devices), is_real


def _counted(resources: Mapping[str, float], vendor: str) -> tuple[AcceleratorType, int]:
    """Whose accelerators Ray counts on a node, and how many."""
    measured = AcceleratorType.get(vendor) if vendor else None
    if measured is not None and resources.get(measured.ray_resource):
        return measured, int(resources[measured.ray_resource])
    for name in AcceleratorType.names():
        kind = AcceleratorType.get(name)
        if kind is not None and kind.ray_resource != "GPU" and resources.get(kind.ray_resource):
            return kind, int(resources[kind.ray_resource])
    return AcceleratorType.NVIDIA, int(resources.get("GPU", 0))


def _device(item: str, facts: AcceleratorFacts) -> Device:
    """The device that an item of a visible-devices variable names: a number, a UUID, or the beginning of a UUID."""
    if facts.driver_error:
        return Device(item, fault=facts.driver_error)
    found = [device for device in facts.devices if item in (device.id, device.uuid)]
    if not found and not item.isdecimal():
        found = [device for device in facts.devices if device.uuid.startswith(item)]
    if len(found) == 1:
        return replace(found[0], id=item)
    return Device(item, fault=f"Ray counts it, and the driver lists {_listed(facts.devices)}")


def _listed(devices: Sequence[Device]) -> str:
    return ", ".join(device.id for device in devices)

"""Accelerators of a node: the number that Ray counts, and the devices that the node's driver lists."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roost.cluster.ray_private import visible_devices_variable
from roost.errors import RoostError
from roost.hardware import AcceleratorType
from roost.hardware.accelerators import Device

__all__ = ["MADE_UP_VARIABLE", "AcceleratorFacts", "accelerators_of", "look_at_accelerators"]

MADE_UP_VARIABLE = "ROOST_MADE_UP_ACCELERATORS"
"""Variable of a raylet, with the name of a vendor: the node's accelerators are made up, and no driver is asked."""

LABEL = "ray.io/accelerator-type"

logger = logging.getLogger("roost")


@dataclass(frozen=True)
class AcceleratorFacts:
    """What a node knows about its accelerators.

    Attributes:
        devices: The devices that the driver library lists.
        vendor: Vendor of that driver library, or of the made-up accelerators; empty without either.
        driver_error: How the driver library failed; empty if it works or is not installed.
        is_made_up: Whether the node declares its accelerators as made up.
        likely_vendor: Vendor of the node's GPUs according to its variables, Ray and kernel drivers; empty if these
            do not tell, as on most nodes with NVIDIA GPUs.
        raylet_environment: Visible-devices variables of the raylet.
    """

    devices: tuple[Device, ...] = ()
    vendor: str = ""
    driver_error: str = ""
    is_made_up: bool = False
    likely_vendor: str = ""
    raylet_environment: Mapping[str, str] = field(default_factory=dict)


def look_at_accelerators(raylet_environment: Mapping[str, str]) -> AcceleratorFacts:
    """Ask the driver libraries of this node; the first one that lists accelerators, or fails, is the node's."""
    made_up = raylet_environment.get(MADE_UP_VARIABLE, "")
    if made_up:
        return AcceleratorFacts(vendor=made_up, is_made_up=True, raylet_environment=raylet_environment)
    for name in AcceleratorType.names():
        kind = AcceleratorType.get(name)
        if kind is None or kind.detect is None:
            continue
        try:
            devices = tuple(kind.detect())
        except Exception as error:  # the user may have registered a vendor whose detection raises anything
            text = str(error.findings[0]) if isinstance(error, RoostError) else f"{type(error).__name__}: {error}"
            return AcceleratorFacts(vendor=name, driver_error=text, raylet_environment=raylet_environment)
        if devices:
            return AcceleratorFacts(devices, name, raylet_environment=raylet_environment)
    likely = _vendor_of_variables(raylet_environment) or _vendor_in_ray() or _vendor_of_files()
    return AcceleratorFacts(likely_vendor=likely, raylet_environment=raylet_environment)


def _vendors() -> Iterator[AcceleratorType]:
    for name in AcceleratorType.names():
        kind = AcceleratorType.get(name)
        if kind is not None:
            yield kind


def _vendor_of_variables(raylet_environment: Mapping[str, str]) -> str:
    """Return the vendor whose visible-devices variable the raylet has; empty unless it is exactly one vendor.

    Schedulers such as Slurm set the variables of all vendors, and several vendors read ``CUDA_VISIBLE_DEVICES``.
    """
    variables = {kind.visible_devices_variable for kind in _vendors()} & set(raylet_environment)
    owners = [kind.name for kind in _vendors() if {kind.visible_devices_variable} == variables]
    return owners[0] if len(owners) == 1 else ""


def _vendor_in_ray() -> str:
    """Return the vendor whose GPUs Ray detects on this node; empty for vendors that use CUDA's variable."""
    try:
        variable = visible_devices_variable()
    except Exception as error:  # Ray's private detection runs libraries of vendors
        logger.debug("Ray's detection of GPUs failed: %r", error)
        return ""
    noset = f"RAY_EXPERIMENTAL_NOSET_{variable}"
    owners = [kind.name for kind in _vendors() if noset in kind.noset_variables]
    return owners[0] if len(owners) == 1 else ""


def _vendor_of_files() -> str:
    """Return the vendor whose kernel driver has device files on this node; empty if there is none."""
    return next((kind.name for kind in _vendors() if any(glob.glob(pattern) for pattern in kind.device_files)), "")


def accelerators_of(
    resources: Mapping[str, float], labels: Mapping[str, str], facts: AcceleratorFacts
) -> tuple[AcceleratorType, tuple[Device, ...], bool]:
    """Return the type of the accelerators that Ray counts on a node, the accelerators, and whether they are real."""
    models = [key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")]
    models += [labels[LABEL]] if labels.get(LABEL) else []
    kind, count = _counted(resources, models, facts)
    if not count:
        return AcceleratorType.NO_ACCEL, (), False
    visible = facts.raylet_environment.get(kind.visible_devices_variable)
    ids = [item.strip() for item in visible.split(",") if item.strip()] if visible else []
    ids = ids[:count] if len(ids) >= count else [str(i) for i in range(count)]  # Ray uses the first ones
    is_real = kind.name == facts.vendor and not facts.is_made_up
    devices = [_device(item, facts) if is_real else Device(item) for item in ids]
    model = models[0] if models else ""
    return kind, tuple(device if device.model else replace(device, model=model) for device in devices), is_real


def _counted(
    resources: Mapping[str, float], models: Sequence[str], facts: AcceleratorFacts
) -> tuple[AcceleratorType, int]:
    """Return the type of the accelerators that Ray counts on a node, and their number.

    Ray counts the accelerators of several vendors as ``GPU``. Then the vendor comes from the driver library that lists
    them, else from Ray's accelerator type (a resource or a label), else from ``likely_vendor``; else it is NVIDIA.
    """
    known = AcceleratorType.get(facts.vendor) if facts.devices or facts.is_made_up else None
    own = [kind for kind in _vendors() if kind.ray_resource != "GPU"]
    for kind in (known, *own):
        if kind is not None and resources.get(kind.ray_resource):
            return kind, int(resources[kind.ray_resource])
    named = [kind.name for kind in _vendors() if any(_is_model(model, kind) for model in models)]
    found = next(filter(None, (*named, facts.vendor, facts.likely_vendor)), "")
    return AcceleratorType.get(found) or AcceleratorType.NVIDIA, int(resources.get("GPU", 0))


def _is_model(model: str, kind: AcceleratorType) -> bool:
    return model.casefold().startswith(tuple(start.casefold() for start in kind.models))


def _device(item: str, facts: AcceleratorFacts) -> Device:
    """Return the device that an item of a visible-devices variable names: by index, UUID, or the beginning of a UUID."""
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

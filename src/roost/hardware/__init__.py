"""The hardware of nodes: accelerators by vendor, and other devices by registered type."""

import importlib
import pkgutil

from roost.hardware import vendors
from roost.hardware.accelerators import AcceleratorType, register_accelerator
from roost.hardware.devices import (
    HardwareField,
    device_key,
    hardware_fields,
    hardware_types,
    register_hardware,
    values_for_worker,
)

__all__ = [
    "AcceleratorType",
    "HardwareField",
    "device_key",
    "hardware_fields",
    "hardware_types",
    "register_accelerator",
    "register_hardware",
    "values_for_worker",
]

for _vendor in pkgutil.iter_modules(vendors.__path__):
    importlib.import_module(f"{vendors.__name__}.{_vendor.name}")

"""NVIDIA GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from roost.hardware.accelerators import AcceleratorType, Device, Holder, Usage, register_accelerator


def _detect() -> list[Device]:
    """All GPUs of this node, from the driver library, whatever this process is shown of them."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        devices = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = _told(pynvml.nvmlDeviceGetMemoryInfo, handle)
            users = _told(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
            devices.append(
                Device(
                    str(index),
                    str(pynvml.nvmlDeviceGetUUID(handle)),
                    str(pynvml.nvmlDeviceGetName(handle)).removeprefix("NVIDIA "),
                    None if memory is None else _gib(memory.total),
                    None if memory is None else _gib(memory.used),
                    tuple(sorted(user.pid for user in users or ())),
                    _busy(handle),
                )
            )
        return devices
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _visible_uuids() -> list[str] | None:
    """What CUDA shows to this process: asked of the driver, not of a variable."""
    import ctypes
    from uuid import UUID

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    uuids = []
    for ordinal in range(count.value):
        device, raw = ctypes.c_int(), (ctypes.c_char * 16)()
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0 and cuda.cuDeviceGetUuid(raw, device) == 0:
            uuids.append(f"GPU-{UUID(bytes=bytes(raw))}")
    return uuids


def _told(question: Callable[[Any], Any], handle: Any) -> Any:
    """What the library answers; nothing where it does not for this GPU, such as for one that is cut in slices."""
    import pynvml

    try:
        return question(handle)
    except pynvml.NVMLError:
        return None


def _busy(handle: Any) -> float | None:
    """Share of the last moments in which a GPU computed."""
    import pynvml

    rates = _told(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else float(rates.gpu / 100)


def _gib(size: int) -> float:
    return round(size / 2**30, 1)


@functools.cache
def _known_devices() -> list[tuple[str, str, Any]]:
    """Number, UUID and handle of each GPU. The library stays open: opening it costs more than all questions."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [(str(index), str(pynvml.nvmlDeviceGetUUID(handle)), handle) for index, handle in enumerate(handles)]
    except Exception:  # not there, or no driver behind it
        return []


def _usage() -> list[Usage]:
    """Memory and utilisation of all GPUs of this node; those that do not answer are left out."""
    found = []
    for index, uuid, handle in _known_devices():
        import pynvml

        memory = _told(pynvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            found.append(Usage(index, uuid, _gib(memory.total), _gib(memory.used), _busy(handle)))
    return found


def _holders() -> list[Holder]:
    """Who holds memory of the GPUs of this node."""
    found = []
    for _, uuid, handle in _known_devices():
        import pynvml

        for user in _told(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
            used = None if user.usedGpuMemory is None else _gib(user.usedGpuMemory)
            found.append(Holder(uuid, int(user.pid), used))
    return found


NVIDIA = register_accelerator(
    AcceleratorType(
        name="NVIDIA",
        visible_devices_variable="CUDA_VISIBLE_DEVICES",
        noset_variables=("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",),
        # Without it CUDA numbers unequal cards by speed, and the driver library by bus.
        environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        detect=_detect,
        visible_uuids=_visible_uuids,
        usage=_usage,
        holders=_holders,
    )
)

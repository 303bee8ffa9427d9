"""NVIDIA GPUs."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from roost.errors import ClusterError, Finding
from roost.hardware import cuda_probe
from roost.hardware.accelerators import AcceleratorType, Device, Holder, Usage, register_accelerator

PROBE_TIMEOUT_S = 60.0
"""Seconds that CUDA may take to start; without persistence mode it initialises all GPUs of the node first."""


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


def _visible_uuids() -> list[str]:
    """What CUDA shows to a process with the environment of this one, asked in a process of its own.

    A process that has called ``cuInit`` itself could no longer fork children that use CUDA.
    """
    probe = subprocess.Popen(  # noqa: S603
        [sys.executable, "-I", "-S", cuda_probe.__file__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        output, errors = probe.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        probe.kill()  # and not waited for: a process that hangs in the driver cannot be killed
        raise _failure(f"cuInit did not return within {PROBE_TIMEOUT_S:g} s") from None
    try:
        answer = json.loads(output.splitlines()[-1])  # libraries that CUDA loads may print, too
        error, uuids = answer.get("error"), answer.get("uuids")
    except (IndexError, ValueError, AttributeError):
        said = (errors.strip() or output.strip() or "nothing").splitlines()[-1][:200]
        message = f"the process that asks CUDA for its GPUs ended with status {probe.returncode} and printed: {said}"
        raise _failure(message) from None
    if error or not isinstance(uuids, list):
        raise _failure(str(error))
    return [str(uuid) for uuid in uuids]


def _failure(message: str) -> ClusterError:
    return ClusterError([Finding("R114", f"NVIDIA's driver does not tell which GPUs there are: {message}")])


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

"""NVIDIA GPUs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from roost.errors import ClusterError, Finding
from roost.hardware.accelerators import AcceleratorType, Device, Holder, Usage, register_accelerator

PROBE_TIMEOUT_S = 60.0
"""Seconds that CUDA may take to start; without persistence mode it initialises all GPUs of the node first."""

PCI_DEVICES = "/sys/bus/pci/devices"
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
SICK = frozenset({11, 15, 16, 999})
"""What NVML returns for a GPU that needs repair: interrupt issue, lost, reset required, unknown error."""


def _initialised() -> Any:
    """The driver library (NVML), initialised; ``None`` on a node without NVIDIA GPUs.

    Raises:
        ClusterError: Where the library fails; where a GPU is on the PCI bus and the library, its Python package or the
            driver is missing.
    """
    try:
        import pynvml
    except ImportError:
        if not _has_gpu_on_bus():
            return None
        raise _failure("a GPU is on the PCI bus, and the Python package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        is_missing = error.value in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED)
        if is_missing and not _has_gpu_on_bus():
            return None  # also where the image of a node without a GPU has NVIDIA's packages
        raise _failure(f"nvmlInit: {error}" + (", and a GPU is on the PCI bus" if is_missing else "")) from None
    return pynvml


def _has_gpu_on_bus() -> bool:
    """Whether the kernel lists a graphics or compute device (class 0x03) of NVIDIA (vendor 0x10de) on the PCI bus."""
    from pathlib import Path  # here and below: planning, which loads this module, needs none of these

    for device in Path(PCI_DEVICES).glob("*"):
        try:
            if (device / "vendor").read_text().strip() == "0x10de" and (device / "class").read_text().startswith(
                "0x03"
            ):
                return True
        except OSError:  # it was removed meanwhile
            continue
    return False


def _detect() -> list[Device]:
    """All GPUs of this node, from the driver library, whatever this process is shown of them.

    A GPU that the library counts and that does not answer is in the list, with its fault. A partitioned GPU (MIG) is
    in the list as its instances; the first has the GPU's number, because that is what CUDA takes the number for.
    """
    nvml = _initialised()
    if nvml is None:
        return []
    try:
        return [device for index in range(_count(nvml)) for device in _devices(nvml, index)]
    finally:
        nvml.nvmlShutdown()


def _count(nvml: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        raise _failure(f"nvmlDeviceGetCount: {error}") from None


def _devices(nvml: Any, index: int) -> list[Device]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        parts = _instances(nvml, handle)
        if parts is None:
            return [_device(nvml, handle, str(index))]
        if not parts:
            return [Device(str(index), fault="it is partitioned (MIG), and has no instances")]
        found = [_device(nvml, part, "") for part in parts]
        return [replace(device, id=device.uuid if number else str(index)) for number, device in enumerate(found)]
    except nvml.NVMLError as error:
        return [Device(str(index), fault=str(error))]


def _device(nvml: Any, handle: Any, name: str) -> Device:
    memory = _memory(nvml, handle)
    users = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return Device(
        name,
        str(nvml.nvmlDeviceGetUUID(handle)),
        str(nvml.nvmlDeviceGetName(handle)).removeprefix("NVIDIA "),
        None if memory is None else _gib(memory.total),
        None if memory is None else _gib(memory.used),
        tuple(sorted(user.pid for user in users or ())),
        _busy(nvml, handle),
    )


def _instances(nvml: Any, handle: Any) -> list[Any] | None:
    """The instances of a partitioned GPU; ``None`` where it is not partitioned."""
    try:
        is_partitioned = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
        places = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if is_partitioned else 0
    except (AttributeError, nvml.NVMLError):  # most GPUs, and older libraries, know no partitions
        return None
    if not is_partitioned:
        return None
    parts = []
    for place in range(places):
        part = _told(nvml, functools.partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, index=place), handle)
        parts += [part] if part is not None else []
    return parts


def _visible_uuids() -> list[str]:
    """What CUDA shows to a process with the environment of this one, asked in a process of its own.

    A process that has called ``cuInit`` itself could no longer fork children that use CUDA.
    """
    import json
    import subprocess

    from roost.hardware import cuda_probe

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


def _told(nvml: Any, question: Callable[[Any], Any], handle: Any) -> Any:
    """What the library answers; nothing where it does not for this GPU, such as for one that is cut in slices."""
    try:
        return question(handle)
    except nvml.NVMLError:
        return None


def _memory(nvml: Any, handle: Any) -> Any:
    """The memory of a GPU; nothing where the library does not tell it. That the GPU itself is sick is raised."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if getattr(error, "value", None) in SICK:
            raise
        return None


def _busy(nvml: Any, handle: Any) -> float | None:
    """Share of the last moments in which a GPU computed."""
    rates = _told(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else float(rates.gpu / 100)


def _gib(size: int) -> float:
    return round(size / 2**30, 1)


_kept: Any = None


def _answering() -> Iterator[tuple[str, str, Any]]:
    """Number, UUID and handle of each GPU that answers. The library stays open: opening it costs more than questions.

    Nothing else is kept, and no failure. A GPU that was reset is found again. A library that does not count its GPUs any
    more, as after the driver was reloaded, is closed, and the next call opens it again.
    """
    global _kept
    _kept = _kept or _initialised()
    try:
        count = _count(_kept) if _kept else 0
    except ClusterError:
        with contextlib.suppress(_kept.NVMLError):
            _kept.nvmlShutdown()
        _kept = None
        raise
    for index in range(count):
        try:
            handle = _kept.nvmlDeviceGetHandleByIndex(index)
            uuid = str(_kept.nvmlDeviceGetUUID(handle))
        except _kept.NVMLError:
            continue
        yield str(index), uuid, handle


def _usage() -> list[Usage]:
    """Memory and utilisation of all GPUs of this node; those that do not answer are left out."""
    found = []
    with contextlib.suppress(ClusterError):
        for index, uuid, handle in _answering():
            with contextlib.suppress(_kept.NVMLError):
                memory = _memory(_kept, handle)
                if memory is not None:
                    busy = _busy(_kept, handle)
                    found.append(Usage(index, uuid, _gib(memory.total), _gib(memory.used), busy))
    return found


def _holders() -> list[Holder]:
    """Who holds memory of the GPUs of this node; of those that answer.

    Raises:
        ClusterError: Where the driver library fails.
    """
    found = []
    for _, uuid, handle in _answering():
        with contextlib.suppress(_kept.NVMLError):
            for user in _told(_kept, _kept.nvmlDeviceGetComputeRunningProcesses, handle) or ():
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

"""Print the UUIDs of the GPUs that CUDA shows to this process, as JSON: ``{"uuids": [...]}`` or ``{"error": "..."}``.

It runs as a script in a process of its own, with ``python -I``. ``cuInit`` must not be called in a process that later
runs user code: after it, children that the process forks cannot use CUDA (error 3, ``CUDA_ERROR_NOT_INITIALIZED``).
"""

from __future__ import annotations

import ctypes
import json
from typing import Any
from uuid import UUID

NO_DEVICE = 100
"""``CUDA_ERROR_NO_DEVICE``: the driver works, and this process is shown no GPU."""


def probe() -> dict[str, Any]:
    """Return the UUIDs in CUDA's order, or the reason why CUDA cannot list them."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": f"CUDA's driver library cannot be loaded: {error}"}
    code = cuda.cuInit(0)
    if code == NO_DEVICE:
        return {"uuids": []}
    if code:
        return {"error": f"cuInit returned {_name(cuda, code)}"}
    count, device = ctypes.c_int(), ctypes.c_int()
    code = cuda.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return {"error": f"cuDeviceGetCount returned {_name(cuda, code)}"}
    uuids = []
    for ordinal in range(count.value):
        raw, part = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
        code = cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetUuid(raw, device)
        if code:
            return {"error": f"device {ordinal}: CUDA returned {_name(cuda, code)}"}
        # For an instance of a partitioned GPU (MIG), version 2 returns the instance's UUID and version 1 the GPU's.
        get_part = getattr(cuda, "cuDeviceGetUuid_v2", None)
        is_part = get_part is not None and get_part(part, device) == 0 and bytes(part) != bytes(raw)
        uuids.append(f"MIG-{UUID(bytes=bytes(part))}" if is_part else f"GPU-{UUID(bytes=bytes(raw))}")
    return {"uuids": uuids}


def _name(cuda: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(name))
    return f"{code} ({name.value.decode()})" if name.value else str(code)


if __name__ == "__main__":
    print(json.dumps(probe()))  # noqa: T201

"""NVIDIA's driver libraries for machines without an NVIDIA GPU: a C library with the same functions, built here.

``nvidia_driver.c`` says what it can do, and where it differs from a real driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
VERSION_MISMATCH = 18
LOST = 15
"""What NVML returns for a GPU that has fallen off the bus."""


class NvidiaDriver:
    """The stand-in, in a folder.

    Attributes:
        folder: Where the libraries and the files are that say what they answer.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler for the stand-in of NVIDIA's driver")
        self.folder = folder
        source = Path(__file__).with_suffix(".c")
        library = folder / "libcuda.so.1"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        (folder / "libnvidia-ml.so.1").symlink_to(library)

    def environment(self) -> dict[str, str]:
        """The variables of a process whose dynamic linker shall find these libraries."""
        paths = [str(self.folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {"LD_LIBRARY_PATH": os.pathsep.join(paths), "NVIDIA_STAND_IN": str(self.folder)}

    def set_gpus(self, status: Sequence[int]) -> None:
        """Say how many GPUs there are, and the NVML code that each returns: 0, or ``LOST``."""
        self._write("gpus", "\n".join(map(str, status)))

    def set_instances(self, count: int) -> None:
        """Say how many instances (MIG) each GPU is cut into; 0: none is."""
        self._write("mig", str(count))

    def set_nvml(self, code: int) -> None:
        """Say what ``nvmlInit`` returns."""
        self._write("nvml", str(code))

    def set_cuda(self, code: int) -> None:
        """Say what ``cuInit`` returns: -1, never; -2, a text and the end of the process."""
        self._write("cuda", str(code))

    def processes_with_cuda(self) -> list[int]:
        """The processes that called ``cuInit``."""
        file = self.folder / "inits"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def _write(self, name: str, text: str) -> None:
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.replace(self.folder / name)

    @staticmethod
    def uuid(index: int) -> str:
        """The UUID of a GPU."""
        return f"GPU-00000000-0000-0000-0000-{index:012d}"

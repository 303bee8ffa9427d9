"""Write the output files of commands."""

from __future__ import annotations

import contextlib
import os

from roost.cli.inputs import UsageError
from roost.errors import Finding

__all__ = ["write_file"]


def write_file(path: str, text: str) -> None:
    """Write a file atomically: readers see the old content or the new.

    Devices and pipes, such as /dev/stdout, are written to directly.

    Raises:
        UsageError: If the file cannot be written (U120).
    """
    is_regular = not os.path.exists(path) or os.path.isfile(path)
    target = f"{os.path.realpath(path)}.{os.getpid()}.new" if is_regular else path
    try:
        with open(target, "w", encoding="utf-8") as file:
            file.write(text)
        if is_regular:
            os.replace(target, os.path.realpath(path))
    except OSError as error:
        if is_regular:
            with contextlib.suppress(OSError):
                os.remove(target)
        message = f"{path} cannot be written: {error.strerror or error}"
        raise UsageError([Finding("U120", message)]) from error

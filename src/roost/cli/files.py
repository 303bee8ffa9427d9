"""Files that commands write."""

from __future__ import annotations

import contextlib
import os

from roost.cli.inputs import UsageError
from roost.errors import Finding

__all__ = ["write_file"]


def write_file(path: str, text: str) -> None:
    """Writes a file, whole or not at all: who reads it meanwhile sees what was there before.

    Raises:
        UsageError: Where it cannot be written (U120).
    """
    # Devices and pipes, such as /dev/stdout, are written to and not replaced.
    is_plain = not os.path.exists(path) or os.path.isfile(path)
    chosen = f"{os.path.realpath(path)}.{os.getpid()}.new" if is_plain else path
    try:
        with open(chosen, "w", encoding="utf-8") as file:
            file.write(text)
        if is_plain:
            os.replace(chosen, os.path.realpath(path))
    except OSError as error:
        if is_plain:
            with contextlib.suppress(OSError):
                os.remove(chosen)
        message = f"{path} cannot be written: {error.strerror or error}"
        raise UsageError([Finding("U120", message)]) from error

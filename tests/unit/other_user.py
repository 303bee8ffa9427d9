"""Acting as another user of the machine, which only root can do."""

from __future__ import annotations

import os
import subprocess

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def as_nobody(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script as another user. Not Python: its interpreter may be in a folder that only root can enter."""
    return subprocess.run(
        ["/bin/sh", "-c", script, "sh", *arguments],
        user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip

"""Other processes for these tests: they do what they are told, as another user's job would."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

_LOOP = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever is printed goes to stderr
names = {"__name__": "__main__"}
for line in sys.stdin:
    names.pop("result", None)
    try:
        exec(json.loads(line), names)
        answer = {"result": names.get("result")}
    except BaseException as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()
"""


class DriverError(Exception):
    """What went wrong in the other process: the name of its exception, and its text."""


class Driver:
    """Another Python process; ``driver("result = 1 + 1")`` is 2."""

    def __init__(self, **environment: str | None) -> None:
        paths = [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        for name, value in environment.items():
            if value is None:
                variables.pop(name, None)
            else:
                variables[name] = value
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
        )
        self._rest = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def __call__(self, code: str, timeout_s: float = 240.0) -> Any:
        self.tell(code)
        return self.answer(timeout_s)

    def tell(self, code: str) -> None:
        """Lets it do something, and does not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = 240.0) -> Any:
        """What became of it."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the other process did not answer within {timeout_s:g} s"
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, "the other process is gone"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(line)
        if "error" in found:
            raise DriverError(f"{found['error']}: {found['text']}")
        return found["result"]

    def kill(self) -> None:
        """As a power cut would."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def end(self) -> None:
        """Lets it come to its end, and makes sure that it does."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

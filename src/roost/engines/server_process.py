"""Servers that run as child processes: SGLang, vLLM and the router."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from roost.cluster.log_files import describe_node, open_log
from roost.cluster.private_folder import PrivateFolder
from roost.cluster.runtime_folder import open_private
from roost.engines import leash
from roost.errors import Finding, Fix, RolloutError, RoostError

__all__ = ["LOG_LINES", "ServerProcess", "socket_folder"]

LOG_LINES = 30
"""Number of log lines that an error shows."""
LOG_BYTES = 64_000
"""Bytes at the end of a log that are read at most."""
SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class ServerProcess:
    """A child process that never outlives this process.

    Args:
        command: The program and its arguments.
        env: Environment variables, added to those of this process. Proxy variables are not inherited.
        name: Name for errors.
        log_name: Base name of the log file; by default ``name``.

    Attributes:
        log_path: The log file, which is kept after the end of the process; empty before :meth:`start`. Older lines
            are in ``LOG_PATH.1``.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        name: str = "server",
        log_name: str = "",
    ) -> None:
        self.command = list(command)
        self.name = name
        self.log_path = ""
        self._log_name = log_name or name
        self._env = dict(env or {})
        self._child: subprocess.Popen[bytes] | None = None
        self._log = -1

    def start(self) -> None:
        """Start the process and return at once, before its server answers.

        Raises:
            RolloutError: The log file cannot be created (E125).
        """
        if self._child is not None:
            return
        inherited = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
        try:
            self.log_path, self._log = open_log(self._log_name)
        except OSError as error:
            message = f"the log of {self.name} on {describe_node()} cannot be created: {error}"
            raise RolloutError([Finding("E125", message)]) from error
        self._child = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", str(leash.__file__), str(os.getpid()), self.log_path, *self.command],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, env={**inherited, **self._env},
            start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        """Stop the process with all of its children; takes at most 10 s. Safe to call twice."""
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(leash.GRACE_S + 5)
            except subprocess.TimeoutExpired:
                self._child.kill()  # the kernel kills the command with it
                self._child.wait()
            self._child = None
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code; ``None`` before the end of the process."""
        return self._child.poll() if self._child is not None else None

    @property
    def pid(self) -> int:
        """Id of the leash process, which ends the command when it is ended itself; 0 before the start."""
        return self._child.pid if self._child is not None else 0

    def logs(self, lines: int = LOG_LINES) -> str:
        """Return the last lines of the log."""
        if self._log < 0:
            return ""
        content = _end_of(self._log)
        if len(content) < LOG_BYTES:  # perhaps the log was rotated a moment ago
            with contextlib.suppress(OSError, RoostError):  # it was never rotated
                older = open_private(self.log_path + ".1", os.O_RDONLY)
                try:
                    content = (_end_of(older) + content)[-LOG_BYTES:]
                finally:
                    os.close(older)
        return "\n".join(_COLOUR.sub("", content.decode(errors="replace")).splitlines()[-lines:])

    def described_logs(self, lines: int = LOG_LINES) -> str:
        """Return the last lines of the log, and below them its path and node."""
        return f"{self.logs(lines)}\nthe whole log: {self.log_path} on node {describe_node()}".lstrip()

    @property
    def log_fix(self) -> Fix:
        """The path and the node of the whole log, for errors."""
        return Fix(f"read the whole log, on node {describe_node()}", self.log_path)


def socket_folder(folder: PrivateFolder, name_bytes: int) -> str:
    """Return the path of a private folder in which a server creates Unix sockets.

    Args:
        folder: The folder.
        name_bytes: Length of the longest file name of such a socket.

    Raises:
        RolloutError: The paths of the sockets would be too long (E123).
        ClusterError: The private runtime folder cannot be used (R140).
    """
    path = folder.path()
    if len(os.fsencode(path)) + 1 + name_bytes > SOCKET_PATH_BYTES:
        message = f"the path of the private folder {path} is too long for Unix sockets in it"
        fixes = (Fix("use a shorter one", "export XDG_RUNTIME_DIR=/run/user/$(id -u)"),)
        raise RolloutError([Finding("E123", message, fixes=fixes)])
    return path


def _end_of(log: int) -> bytes:
    return os.pread(log, LOG_BYTES, max(0, os.fstat(log).st_size - LOG_BYTES))

"""Servers that run as child processes: engines that are programs of their own, and the router."""

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
"""How many lines of a log an error shows."""
LOG_BYTES = 64_000
SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class ServerProcess:
    """A command that runs beside this process, and never outlives it.

    Args:
        command: The program and its arguments.
        env: Variables of its environment, besides those of this process; proxies are left out.
        name: What it is called in errors.
        log_name: What its log file is called after; default the name.

    Attributes:
        log_path: Its log, which stays after its end; empty before :meth:`start`. Older lines are in ``LOG_PATH.1``.
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
        """Starts it; whether it answers is the caller's to find out.

        Raises:
            RolloutError: Its log cannot be created (E125).
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
        """Ends it with everything that it started. Safe to call twice."""
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(leash.GRACE_S + 5)
            except subprocess.TimeoutExpired:
                self._child.kill()  # the kernel ends the command with it
                self._child.wait()
            self._child = None
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        """What it ended with; ``None`` while it runs, and before."""
        return self._child.poll() if self._child is not None else None

    @property
    def pid(self) -> int:
        """The process that holds its leash, and ends it when it is ended itself; 0 where it does not run."""
        return self._child.pid if self._child is not None else 0

    def logs(self, lines: int = LOG_LINES) -> str:
        """Its last lines."""
        if self._log < 0:
            return ""
        content = _end_of(self._log)
        if len(content) < LOG_BYTES:  # the log may have started again a moment ago
            with contextlib.suppress(OSError, RoostError):
                older = open_private(self.log_path + ".1", os.O_RDONLY)
                try:
                    content = (_end_of(older) + content)[-LOG_BYTES:]
                finally:
                    os.close(older)
        return "\n".join(_COLOUR.sub("", content.decode(errors="replace")).splitlines()[-lines:])

    def described_logs(self, lines: int = LOG_LINES) -> str:
        """Its last lines, and below them where the whole log is."""
        return f"{self.logs(lines)}\nthe whole log: {self.log_path} on node {describe_node()}".lstrip()

    @property
    def log_fix(self) -> Fix:
        """Where the whole log is, for errors."""
        return Fix(f"read the whole log, on node {describe_node()}", self.log_path)


def socket_folder(folder: PrivateFolder, name_bytes: int) -> str:
    """Return the path of a private folder in which a server makes Unix sockets.

    Args:
        folder: The folder.
        name_bytes: Length of the longest name that the server gives a socket there.

    Raises:
        RolloutError: The paths of such sockets would be too long (E123).
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

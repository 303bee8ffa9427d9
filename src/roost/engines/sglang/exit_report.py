"""The error of an SGLang server that has ended: the cause from its log, and the memory that the plan gave it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from roost.engines.engine import EnginePlace
from roost.engines.server_process import LOG_LINES, ServerProcess
from roost.engines.sglang.memory import FreeMemory
from roost.errors import Finding, Fix

__all__ = ["explain_exit"]

SEARCHED_LINES = 2000
_MEMORY = re.compile(r"out of memory|OutOfMemoryError|Not enough memory", re.IGNORECASE)
_ERROR = re.compile(r"^\S*(Error|Exception)\b.*: |error: ")
_RAISED = re.compile(r"\bhit an exception\b")
"""SGLang's log line about an exception that ends one of its processes; the traceback follows."""
_CRASHED = re.compile(r"Subprocess \S+ \(pid=\d+\) crashed with exit code -(\d+)")
"""SGLang's log line about one of its processes that a signal ended."""


def explain_exit(child: ServerProcess, place: EnginePlace, memory: FreeMemory | None = None) -> Finding:
    """Return a finding with the cause of a server's end, as far as its log shows it."""
    lines = [line.strip() for line in child.logs(SEARCHED_LINES).splitlines() if line.strip()]
    last = tuple(lines[-LOG_LINES:])
    if cause := _killed_process(lines):
        rule = "the kernel's out-of-memory killer sends SIGKILL too; it writes to the kernel's log (dmesg)"
        message = f"SGLang ended with exit code {child.exit_code}: {cause}"
        return Finding("E121", message, context=last, rule=rule, fixes=(child.log_fix,))
    cause = next((line for line in reversed(lines) if _MEMORY.search(line)), "")
    if cause:
        message = f"SGLang ran out of memory: {cause}"
        fixes = (
            Fix("give it more of each GPU", f"gpu_share: {min(1.0, place.gpu_share + 0.2):.1f}"),
            Fix("or set what it takes by hand", 'SglangEngine(…, options=["--mem-fraction-static", "0.7"])'),
            child.log_fix,
        )
        return Finding("E121", message, context=(_memory_text(child, place, memory), *last), fixes=fixes)
    cause = next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1] if lines else "its log is empty")
    message = f"SGLang ended with exit code {child.exit_code}: {cause}"
    return Finding("E121", message, context=last, fixes=(child.log_fix,))


def _killed_process(lines: Sequence[str]) -> str:
    """Return SGLang's log line about a process that a signal ended, with the signal's name.

    Empty if a process raised an exception before: then the server ends all other processes, and their deaths are a
    consequence. Log lines before the kill, such as rejected requests, are not its cause.
    """
    for line in lines:
        if _RAISED.search(line):
            return ""
        if (found := _CRASHED.search(line)) and int(found[1]) != signal.SIGQUIT:  # SGLang ends itself by SIGQUIT
            number = int(found[1])
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return f"{found[0]} ({name})"
    return ""


def _memory_text(child: ServerProcess, place: EnginePlace, memory: FreeMemory | None) -> str:
    """Return the engine's GPU share, and the memory fraction with which SGLang was started."""
    text = place.share_text()
    if "--mem-fraction-static" in child.command:
        last = len(child.command) - 1 - child.command[::-1].index("--mem-fraction-static")
        text += f"; it was started with --mem-fraction-static {child.command[last + 1]}"
        if memory is not None:
            text += f" of the {memory.free_gib:.1f} GiB that were free"
    return text

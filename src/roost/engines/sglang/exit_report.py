"""What to say of an SGLang server that has ended: its own words, and what the plan had given it."""

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
"""What a process of SGLang says of an exception that ends it; the traceback follows."""
_CRASHED = re.compile(r"Subprocess \S+ \(pid=\d+\) crashed with exit code -(\d+)")
"""What SGLang's server says of a process of its own that a signal ended."""


def explain_exit(child: ServerProcess, place: EnginePlace, memory: FreeMemory | None = None) -> Finding:
    """Why a server ended, as far as its last lines tell."""
    lines = [line.strip() for line in child.logs(SEARCHED_LINES).splitlines() if line.strip()]
    last = tuple(lines[-LOG_LINES:])
    if words := _killed(lines):
        rule = "the kernel's out-of-memory killer sends SIGKILL too; it writes to the kernel's log (dmesg)"
        message = f"SGLang ended with exit code {child.exit_code}: {words}"
        return Finding("E121", message, context=last, rule=rule, fixes=(child.log_fix,))
    words = next((line for line in reversed(lines) if _MEMORY.search(line)), "")
    if words:
        message = f"SGLang ran out of memory: {words}"
        fixes = (
            Fix("give it more of each GPU", f"gpu_share: {min(1.0, place.gpu_share + 0.2):.1f}"),
            Fix("or set what it takes by hand", 'SglangEngine(…, options=["--mem-fraction-static", "0.7"])'),
            child.log_fix,
        )
        return Finding("E121", message, context=(_given(child, place, memory), *last), fixes=fixes)
    words = next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1] if lines else "it said nothing")
    message = f"SGLang ended with exit code {child.exit_code}: {words}"
    return Finding("E121", message, context=last, fixes=(child.log_fix,))


def _killed(lines: Sequence[str]) -> str:
    """Return which process of SGLang a signal ended; empty where one ended by an exception of its own before.

    A process that raises has the server end all others, so that their deaths are a consequence. The server
    names a process that was killed once, and what it logged before that, such as refused requests, explains nothing.
    """
    for line in lines:
        if _RAISED.search(line):
            return ""
        if (found := _CRASHED.search(line)) and int(found[1]) != signal.SIGQUIT:  # by which SGLang ends itself
            number = int(found[1])
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return f"{found[0]} ({name})"
    return ""


def _given(child: ServerProcess, place: EnginePlace, memory: FreeMemory | None) -> str:
    """What the plan gives an engine, and what it was told of that."""
    text = place.share_text()
    if "--mem-fraction-static" in child.command:
        last = len(child.command) - 1 - child.command[::-1].index("--mem-fraction-static")
        text += f"; it was started with --mem-fraction-static {child.command[last + 1]}"
        if memory is not None:
            text += f" of the {memory.free_gib:.1f} GiB that were free"
    return text

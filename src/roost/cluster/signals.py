"""Keeps the signal handlers of this process while Ray starts in it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from roost.cluster.ray_private import without_sigterm_handler

__all__ = ["keep_signal_handlers"]

_NO_FAILURE_HANDLER = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"


@contextlib.contextmanager
def keep_signal_handlers(starts_processes: bool) -> Iterator[None]:
    """Keep a handler of SIGTERM that this program has installed; Ray replaces it in two ways.

    In Python, ``ray.init`` and the start of a node install handlers that end the process with codes of their own. In
    C++, the core worker installs one that prints a stack and aborts. It does so without Python, which goes on
    reporting the handler from before. Where this program has no handler, those of Ray remain.

    Args:
        starts_processes: Whether processes of Ray are started meanwhile. They would inherit the variable that keeps
            Ray 2.60 from installing its C++ handler, and could not report a segmentation fault. Without the variable,
            and with an older Ray, a SIGTERM may abort this process during the last moments of ``ray.init``.
    """
    handler = signal.getsignal(signal.SIGTERM)
    is_ours = callable(handler) and not getattr(handler, "__module__", "").startswith("ray.")
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    sets_variable = not starts_processes and _NO_FAILURE_HANDLER not in os.environ
    if sets_variable:
        os.environ[_NO_FAILURE_HANDLER] = "1"
    try:
        with without_sigterm_handler():
            yield
    finally:
        if sets_variable:
            os.environ.pop(_NO_FAILURE_HANDLER, None)
        signal.signal(signal.SIGTERM, handler)

"""Keeping this program's SIGTERM handler while Ray starts in its process."""

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
    """Keep the program's handler of SIGTERM during the ``with`` block; Ray replaces it in two ways.

    In Python, ``ray.init`` and the start of a node install handlers that end the process with exit codes of Ray. In C++,
    the core worker installs a handler that prints a stack and aborts; Python does not notice that, and still reports the
    previous handler. If the program has no handler, those of Ray stay.

    Args:
        starts_processes: Whether processes of Ray are started in the block. They would inherit the variable that keeps
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

"""``python -m roost.engines.serve module:factory``: serve one engine outside any job.

The server's key is read from the environment variable ``ROOST_SERVER_KEY``.

The factory is a function that returns a torch module or an :class:`~roost.engines.engine.Engine`, or a class of engines.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from roost.engines.engine import Engine, EnginePlace
from roost.engines.keys import VARIABLE
from roost.errors import Finding, Fix, RolloutError, RoostError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    asked = _parser().parse_args(arguments)
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    engine: Engine | None = None
    try:
        key = _take_key()
        engine = _make_engine(asked)
        place = EnginePlace("served", host=asked.host, server_port=asked.port, device=asked.device, key=key)
        url = engine.start(place)
        sys.stderr.write(f"ready {url}\n")
        sys.stderr.flush()
        end.wait()
    except RoostError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    finally:
        if engine is not None:
            engine.stop()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m roost.engines.serve", description="Serve a model over HTTP with the routes of SGLang's servers."
    )
    parser.add_argument("factory", metavar="module:factory", help="a function that returns a torch module or an engine")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to bind (default: a leased port)")
    parser.add_argument("--version", type=int, default=0, help="version of the weights (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="device of the model (default: %(default)s)")
    parser.add_argument("--context", type=int, help="maximum length of a sequence, in tokens")
    parser.add_argument("--batch-rows", type=int, default=8, help="sequences in a batch (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    return parser


def _take_key() -> str:
    """Take the key out of the environment, so that the engine's child processes do not inherit it."""
    key = os.environ.pop(VARIABLE, "")
    if not key:
        message = f"{VARIABLE} is not set: the key that requests to this server must present"
        make = f"export {VARIABLE}=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
        fixes = (Fix("make one", make), Fix("and give it to the job", 'RolloutManager(…, external={"http://…": KEY})'))
        raise RolloutError([Finding("E113", message, fixes=fixes)])
    return key


def _make_engine(asked: argparse.Namespace) -> Engine:
    made = _call_factory(asked.factory)
    if isinstance(made, Engine):
        made.version = asked.version
        return made
    from roost.engines.torch.engine import TorchEngine

    return TorchEngine(
        lambda: made,
        context=asked.context, batch_rows=asked.batch_rows, threads=asked.threads, version=asked.version,
    )  # fmt: skip


def _call_factory(name: str) -> Any:
    """Import the factory ``module:function`` and return its result."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        message = f"{name} gives no engine: {type(error).__name__}: {error}"
        raise RolloutError([Finding("E109", message, rule="name a function as module:function")]) from error


if __name__ == "__main__":
    sys.exit(main())

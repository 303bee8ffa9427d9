"""A script that starts SGLang in its own interpreter, perhaps in another environment, without Roost.

It runs ``python -m sglang.launch_server`` with the server's key from the environment variable ``ROOST_SERVER_KEY``,
because every user of a node can read command lines. SGLang 0.5 has no variable for the key, and logs all of its
settings.

SGLang answers some requests without its key: all paths that begin with ``/health`` or ``/metrics``, all requests with
the method OPTIONS, and WebSockets. One of them is ``/health_generate``, which generates a token: a process that repeats
it keeps SGLang from ever being idle. This script makes all of them need the key, except ``GET /health``.
"""

import hmac
import importlib
import logging
import os
import runpy
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
REFUSAL = b'{"error": {"message": "the request does not present the key of this server", "code": 401}}'


def main() -> None:
    """Run ``python -m sglang.launch_server`` with the key."""
    key = os.environ.pop("ROOST_SERVER_KEY")
    keep_out_of_logs(key)
    close_routes(key)
    sys.argv[1:1] = [f"--api-key={key}"]  # one word: a key may begin with "-", which would read as an option
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def keep_out_of_logs(key: str) -> None:
    """Replace the key in all records that this process logs from now on."""
    make = logging.getLogRecordFactory()

    def make_without_key(*args: object, **more: object) -> logging.LogRecord:
        record = make(*args, **more)
        try:
            text = record.getMessage()
        except Exception:  # a record that cannot be formatted: logging reports it when it writes the record
            return record
        if key in text:
            record.msg, record.args = text.replace(key, "***"), ()
        return record

    logging.setLogRecordFactory(make_without_key)


def close_routes(key: str) -> None:
    """Have uvicorn, with which SGLang serves, check the key before any application that it runs from now on."""
    try:
        config = importlib.import_module("uvicorn").Config
    except ImportError as error:  # an SGLang with another server: only its own check of the key is left
        logging.getLogger(__name__).warning("uvicorn cannot be imported, so that some routes need no key: %s", error)
        return
    make = config.__init__

    def make_guarded(self: object, app: App | str, *args: Any, **more: Any) -> None:
        make(self, app if isinstance(app, str) else guarded(app, key), *args, **more)

    config.__init__ = make_guarded


def guarded(app: App, key: str) -> App:
    """Return an ASGI application that passes on requests with the key, and ``GET /health``, and rejects all others."""
    needed = f"Bearer {key}".encode()

    async def guard(scope: Message, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        is_open = kind not in ("http", "websocket") or (
            kind == "http" and scope["method"] == "GET" and scope["path"] == "/health"
        )
        if is_open or hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), needed):
            await app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    return guard


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file: its modules would shadow others of the same name
    main()

"""Keys of servers: a request is obeyed only if its header ``Authorization: Bearer KEY`` has the server's key.

The rollout manager makes a key for the router, and a new one each time that it starts an engine. Processes get
their key in a call of Ray, child processes in the variable :data:`VARIABLE` of their environment: every user of a
machine can read command lines. Objects that hold a key leave it out of their ``repr``.
"""

from __future__ import annotations

import hmac
import secrets

__all__ = ["VARIABLE", "headers_of", "is_permitted", "make_key"]

VARIABLE = "ROOST_SERVER_KEY"
"""The environment variable that tells a server its key."""


def make_key() -> str:
    """Return a new key of 256 random bits."""
    return secrets.token_urlsafe(32)


def headers_of(key: str) -> dict[str, str]:
    """Return the headers that present a key; none for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def is_permitted(header: str | None, key: str) -> bool:
    """Return whether an ``Authorization`` header presents this key; compare in constant time."""
    scheme, _, given = (header or "").partition(" ")
    matches = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode())
    return matches and bool(key) and scheme.lower() == "bearer"

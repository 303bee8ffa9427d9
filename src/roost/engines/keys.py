"""Keys of servers: a server accepts a request only if its header ``Authorization: Bearer KEY`` has the server's key.

The rollout manager makes a key for the router, and a new key each time that it starts an engine. Workers get their
key as an argument of a Ray call, child processes in the environment variable :data:`VARIABLE`, because every user of
a node can read command lines. Objects that hold a key leave it out of their ``repr``.
"""

from __future__ import annotations

import hmac
import secrets

__all__ = ["VARIABLE", "headers_of", "is_permitted", "make_key"]

VARIABLE = "ROOST_SERVER_KEY"
"""The environment variable with a server's key."""


def make_key() -> str:
    """Return a new key of 256 random bits."""
    return secrets.token_urlsafe(32)


def headers_of(key: str) -> dict[str, str]:
    """Return the request headers with a key; no headers for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def is_permitted(header: str | None, key: str) -> bool:
    """Return whether an ``Authorization`` header has this key; compare in constant time."""
    scheme, _, given = (header or "").partition(" ")
    matches = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode())
    return matches and bool(key) and scheme.lower() == "bearer"

"""The stable order of (address, accelerator id), which does not depend on the order in which nodes join."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ipaddress

__all__ = ["natural_key", "resolve_address", "stable_order_key"]

_DIGITS = re.compile(r"([0-9]+)", re.ASCII)


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts ``node-2`` before ``node-10``: digits count as numbers of any length."""
    parts = [part.lstrip("0") if i % 2 else part for i, part in enumerate(_DIGITS.split(text))]
    key = [(0, len(part), part) if i % 2 else (1, 0, part) for i, part in enumerate(parts) if part or i % 2]
    return (*key, (-1, 0, text))  # keeps node-01 and node-1 apart


def resolve_address(name: str) -> str | None:
    """Return the first address of a host name, IPv4 before IPv6; ``None`` if it does not resolve.

    Blocks until the resolver answers; its time limit is that of the operating system.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    addresses = sorted((entry[0] != socket.AF_INET, str(entry[4][0])) for entry in found)
    return addresses[0][1] if addresses else None


def stable_order_key(
    address: str,
    accelerator_id: int | str = 0,
    resolve: Callable[[str], str | None] = resolve_address,
) -> tuple[Any, ...]:
    """Return the sort key of an (address, accelerator id) pair.

    IPv4 addresses come first, as numbers, then IPv6 addresses, as numbers. A host name counts as the address
    that it resolves to; names that do not resolve come last, in natural order. On one node, numeric ids come
    first, as numbers, then UUIDs.

    Args:
        address: An IPv4 address, an IPv6 address (with or without brackets or a zone), or a host name.
        accelerator_id: A number, a numeric text, or a UUID, as for MIG instances.
        resolve: Looks up a host name; pass ``lambda name: None`` to avoid network access.
    """
    return (_address_key(address, resolve), _id_key(accelerator_id))


def _address_key(address: str, resolve: Callable[[str], str | None]) -> tuple[Any, ...]:
    text = address.strip().strip("[]")
    parsed = _parse(text)
    if parsed is None:
        resolved = resolve(text) if text else None
        parsed = _parse(resolved) if resolved else None
    if parsed is None:
        return (9, 0, natural_key(text))
    zone = getattr(parsed, "scope_id", None) or ""
    return (parsed.version, int(parsed), natural_key(zone))


def _parse(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    import ipaddress  # planning seldom needs it

    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _id_key(accelerator_id: int | str) -> tuple[Any, ...]:
    text = str(accelerator_id).strip()
    if text.isascii() and text.isdigit() and len(text) < 19:
        return (0, int(text), ())
    return (1, 0, natural_key(text))

"""Typed wrappers of Ray's public functions whose type hints are missing or incomplete."""

from __future__ import annotations

from typing import Any

import ray
from ray import cloudpickle

__all__ = ["actor_class", "node_address", "nodes_of_ray", "pickled"]


def actor_class(cls: type, **options: Any) -> Any:
    """Return a class as a Ray actor class. Ray's hints lack options such as ``concurrency_groups``."""
    decorate: Any = ray.remote(**options)
    return decorate(cls)


def node_address() -> str:
    """Return the address of this node as Ray knows it."""
    address: Any = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return str(address)


def nodes_of_ray() -> list[dict[str, Any]]:
    """Return Ray's table of nodes, also of dead ones."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def pickled(value: object) -> bytes:
    """Pickle a value as Ray does: a class of the driver's main module by value."""
    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]

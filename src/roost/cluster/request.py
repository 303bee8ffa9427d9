"""The arguments of :class:`~roost.cluster.Cluster`, checked and comparable."""

from __future__ import annotations

import os
from typing import Any

from roost.cluster.managers import NAMESPACE_VARIABLE
from roost.config import read_cluster
from roost.errors import ClusterError, ConfigError, Finding, counted
from roost.source import as_tree

__all__ = ["Request", "seconds_from"]

NAMESPACE = "roost"
"""The namespace of jobs that choose none."""


class Request:
    """The cluster that a caller asks for. Requests with equal values are equal."""

    def __init__(
        self, num_nodes: int | None, namespace: str, address: str | None, node_order: str, section: Any
    ) -> None:
        self.is_attach = num_nodes is None
        self.num_nodes = num_nodes or 0
        self.namespace = namespace
        self.address = address
        self.node_order = node_order
        self.section = section

    @staticmethod
    def of(
        num_nodes: int | None, cluster_cfg: Any, address: str | None, namespace: str | None, node_order: str | None
    ) -> Request:
        """Return the request for some arguments of :class:`~roost.cluster.Cluster`.

        Raises:
            ClusterError: An argument, or a value of the ``cluster`` section, is wrong (R113).
        """
        chosen = namespace or os.environ.get(NAMESPACE_VARIABLE) or NAMESPACE
        order = node_order or "address"
        plain = None
        if cluster_cfg is not None:
            tree = as_tree(cluster_cfg)
            try:
                settings = read_cluster(tree)
            except ConfigError as error:
                raise ClusterError(error.findings) from None
            plain = settings.plain()
            order = node_order or settings.node_order
            num_nodes = (settings.num_nodes or 0) if num_nodes is None else num_nodes
        if num_nodes is not None and (not isinstance(num_nodes, int) or isinstance(num_nodes, bool) or num_nodes < 0):
            message = f"num_nodes is a whole number from 0 (all nodes) up, not {num_nodes!r}"
            raise ClusterError([Finding("R113", message)])
        if order not in ("address", "name") and not order.startswith("label:"):
            message = f"node_order is 'address', 'name' or 'label:KEY', not {order!r}"
            raise ClusterError([Finding("R113", message)])
        return Request(num_nodes, chosen, address, order, plain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        what = "attached" if self.is_attach else counted(self.num_nodes, "node") if self.num_nodes else "all nodes"
        where = f", address {self.address}" if self.address else ""
        config = ", with a cluster_cfg" if self.section is not None else ""
        return f"{what}, namespace {self.namespace!r}, ordered by {self.node_order}{where}{config}"


def seconds_from(variable: str, default: float) -> float:
    """Return the number of seconds in an environment variable; without it, the default."""
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        message = f"{variable} is a number of seconds, not {text!r}"
        raise ClusterError([Finding("R113", message)]) from None

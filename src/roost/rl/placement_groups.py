"""``create_placement_groups``: one reservation, shared out to actor, critic and rollout by their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

from ray.util.placement_group import PlacementGroup

from roost.cluster import Cluster
from roost.errors import ClusterError, Finding, Fix, PlacementError, shown
from roost.placement.layouts import Layout, resolve_layout
from roost.topology.order import stable_order_key

__all__ = ["RoleBundles", "create_placement_groups"]

_DEFAULTS: dict[str, Any] = {
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 8,
    "rollout_num_gpus": 0,
    "rollout_num_gpus_per_engine": 1,
    "colocate": False,
    "debug_train_only": False,
    "debug_rollout_only": False,
    "external_engines": False,
    "async_training": False,
    "use_critic": False,
    "num_gpus_per_actor": None,
    "num_gpus_per_critic": None,
    "num_gpus_per_rollout_engine": None,
    "rollout_groups": None,
}
_OTHER_NAMES = {"rollout_external": "external_engines"}


class RoleBundles(NamedTuple):
    """The bundles of one role, in the stable order: ``pg, indices, gpu_ids = groups["actor"]``.

    Attributes:
        placement_group: The group; the same for every role.
        bundle_indices: Index of each of the role's bundles in it.
        gpu_ids: The accelerator of each, on its node: a number, or a text for ids that are none.
    """

    placement_group: PlacementGroup
    bundle_indices: list[int]
    gpu_ids: list[int | str]


def create_placement_groups(
    args: Any,
    cluster: Cluster | None = None,
    *,
    order: str = "cluster",
    cpus: float = 1.0,
    timeout_s: float | None = None,
) -> dict[str, RoleBundles | None]:
    """Reserves all accelerators of a job at once, and says which bundles are whose.

    The i-th bundle of a role is the same accelerator on every run. Positions are those of
    :func:`roost.resolve_layout`. The bundles are given back when the cluster is closed.

    Args:
        args: Anything with the attributes or keys ``actor_num_nodes``, ``actor_num_gpus_per_node``,
            ``rollout_num_gpus``, ``rollout_num_gpus_per_engine``, ``colocate``, ``debug_train_only``,
            ``debug_rollout_only``, ``rollout_external``, ``use_critic`` and so on; what is missing or
            ``None`` has its default.
        cluster: Where to reserve; default: the cluster of this process, or else all nodes of its Ray.
        order: ``cluster`` for the cluster's order; ``address`` for plain address order, the head among the others.
        cpus: CPUs in each bundle.
        timeout_s: How long to wait; default ``ROOST_RESERVE_TIMEOUT_S``, else 60.

    Returns:
        ``actor``, ``critic`` (``None`` without one) and ``rollout``; a role that a debug switch leaves out has
        no bundles.

    Raises:
        PlacementError: Where the numbers contradict each other, or an engine would straddle nodes.
        ReservationError: Saying what is needed, registered and free, node by node.
    """
    if order not in ("cluster", "address"):
        message = f"order is cluster or address, not {shown(order)}"
        raise PlacementError([Finding("P403", message)])
    arguments = _arguments(args)
    layout = resolve_layout(**arguments)
    if not layout.num_accelerators:
        fix = Fix("say how many there are to place on", "rollout_num_gpus=8")
        raise PlacementError([Finding("P411", "the layout places nothing: it has no GPUs", fixes=(fix,))])
    if cluster is None:
        cluster = _own_cluster()
    bundles = cluster.reserve_bundles(layout.num_accelerators, cpus, timeout_s)
    rows = list(zip(bundles.node_ranks, bundles.accelerator_ids, bundles.bundle_indices, strict=True))
    if order == "address":
        addresses = {rank: cluster.get_node_ip(rank) for rank in set(bundles.node_ranks)}
        rows.sort(key=lambda row: (stable_order_key(addresses[row[0]])[0], row[0], stable_order_key("", row[1])[1]))
    there = [sum(1 for _ in run) for _, run in groupby(rows, key=lambda row: row[0])]
    try:
        layout = resolve_layout(**arguments, num_gpus_per_node=there)  # as measured: no engine straddles nodes
    except PlacementError:
        bundles.release()
        raise
    indices = [index for _, _, index in rows]
    ids = [int(text) if text.isdecimal() else text for _, text, _ in rows]
    return _shared_out(layout, bundles.placement_group, indices, ids, bool(arguments["use_critic"]))


def _shared_out(
    layout: Layout, group: PlacementGroup, indices: list[int], ids: list[int | str], has_critic: bool
) -> dict[str, RoleBundles | None]:
    def bundles(positions: range) -> RoleBundles:
        return RoleBundles(group, [indices[i] for i in positions], [ids[i] for i in positions])

    return {
        "actor": bundles(layout.actor),
        "critic": bundles(layout.critic) if has_critic else None,
        "rollout": bundles(layout.rollout),
    }


def _arguments(args: Any) -> dict[str, Any]:
    """What ``resolve_layout`` takes, from whatever a program keeps its arguments in."""
    arguments = dict(_DEFAULTS)
    for name in (*_DEFAULTS, *_OTHER_NAMES):
        value = args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)
        if value is not None:
            arguments[_OTHER_NAMES.get(name, name)] = value
    return arguments


def _own_cluster() -> Cluster:
    """The cluster of this process or of the job it is in; else one of all nodes there are."""
    try:
        return Cluster()
    except ClusterError as error:
        if error.codes != ("R102",):
            raise
    return Cluster(num_nodes=0)

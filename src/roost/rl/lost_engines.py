"""What becomes of engines whose nodes are gone: errors that say so, and what can be done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import ray

from roost.cluster import Cluster
from roost.cluster.losses import NEW_CLUSTER, LostNode
from roost.engines.handles import EngineHandle, ExternalEngine
from roost.errors import Finding, Fix, RolloutError

__all__ = ["check_nodes_of", "lost_nodes_of", "none_alive"]


def lost_nodes_of(engines: Iterable[EngineHandle | ExternalEngine]) -> dict[str, list[LostNode]]:
    """Return the nodes of each engine that are gone, by the engine's name; it takes two seconds at most."""
    own = [engine for engine in engines if isinstance(engine, EngineHandle)]
    lost: Sequence[LostNode] = ()
    if own:
        with contextlib.suppress(ray.exceptions.RayError):  # Ray cannot say
            lost = own[0].group.cluster.lost_nodes({rank for engine in own for rank in _nodes_of(engine)})
    return {engine.name: [node for node in lost if node.rank in _nodes_of(engine)] for engine in own}


def none_alive(cluster: Cluster, engines: Iterable[EngineHandle | ExternalEngine]) -> RolloutError:
    """Return the error of a rollout without a running engine (S204): whether they can be started again."""
    own = [engine for engine in engines if isinstance(engine, EngineHandle)]
    lost = cluster.lost_nodes({rank for engine in own for rank in _nodes_of(engine)})
    gone = [engine for engine in own if set(_nodes_of(engine)) & {node.rank for node in lost}]
    if not gone:
        return RolloutError([Finding("S204", "no engine is alive", fixes=(Fix("start them", "rollout.recover()"),))])
    fixes: tuple[Fix, ...] = (NEW_CLUSTER,)
    if len(gone) < len(own):
        fixes = (
            Fix("start those on other nodes", "rollout.recover()"),
            Fix(f"or, for all: {NEW_CLUSTER.text}", NEW_CLUSTER.paste),
        )
    context = tuple(map(str, lost))
    message = f"no engine is alive, and {_names(gone)} cannot be started again: their nodes are gone"
    return RolloutError([Finding("S204", message, context=context, rule=_RULE, fixes=fixes)])


def check_nodes_of(cluster: Cluster, engine: EngineHandle) -> None:
    """Check that the nodes of an engine are there, before it is started again on them.

    Raises:
        RolloutError: A node is gone (S208).
    """
    lost: Sequence[LostNode] = cluster.lost_nodes(_nodes_of(engine))
    if lost:
        message = f"{engine.name} cannot be started again: {lost[0]}"
        fixes = (Fix("go on with the engines on other nodes"), Fix(f"or {NEW_CLUSTER.text}", NEW_CLUSTER.paste))
        raise RolloutError([Finding("S208", message, context=tuple(map(str, lost[1:])), rule=_RULE, fixes=fixes)])


_RULE = "engines are started again on their own accelerators; a node that was lost does not come back to a running job"


def _nodes_of(engine: EngineHandle) -> list[int]:
    return [engine.location(member)[0] for member in range(engine.num_members)]


def _names(engines: Sequence[EngineHandle]) -> str:
    shown = ", ".join(engine.name for engine in engines[:8])
    return shown if len(engines) <= 8 else f"{shown} and {len(engines) - 8} more"

"""Calls of a job's managers; if the managers have died, the error names them and their node."""

from __future__ import annotations

from typing import Any

import ray

from roost.cluster.ray_private import id_of_actor
from roost.errors import ClusterError, Finding, Fix

__all__ = ["ANSWER_S", "answer_of", "ask_managers", "note_node"]

ANSWER_S = 120.0
"""Seconds to wait for the reply to a call that does not wait for anything itself."""

_nodes: dict[str, str] = {}  # id of a managers' actor → address of its node, for errors


def note_node(managers: ray.actor.ActorHandle[Any], address: str) -> None:
    """Remember the node of some managers for errors: an actor handle does not have it."""
    _nodes[id_of_actor(managers)] = address


def ask_managers(
    managers: ray.actor.ActorHandle[Any], method: str, *arguments: Any, timeout_s: float | None = ANSWER_S
) -> Any:
    """Call a method of a job's managers and return its value; see :func:`answer_of`.

    Raises:
        ClusterError: This process is not connected to Ray (R115). Ray would connect it to any Ray on this machine.
    """
    if not ray.is_initialized():
        message = f"this process is not connected to Ray any more: {method}() was not done"
        raise ClusterError([Finding("R115", message, fixes=(Fix("make a new cluster", "Cluster(num_nodes=…)"),))])
    return answer_of(managers, method, getattr(managers, method).remote(*arguments), timeout_s)


def answer_of(
    managers: ray.actor.ActorHandle[Any], method: str, asked: ray.ObjectRef[Any], timeout_s: float | None
) -> Any:
    """Wait for the value of a call of a job's managers.

    Raises:
        ClusterError: The managers have died or cannot be reached (R150), or do not answer in time (R107).
    """
    try:
        return ray.get(asked, timeout=timeout_s)
    except ray.exceptions.RayActorError as error:
        raise ClusterError([_gone(managers, method, error)]) from error
    except ray.exceptions.GetTimeoutError:
        message = f"the job's managers on {_where(managers)} did not answer {method}() within {timeout_s:g} s"
        raise ClusterError([Finding("R107", message)]) from None


def _gone(managers: ray.actor.ActorHandle[Any], method: str, error: Exception) -> Finding:
    is_dead = not isinstance(error, ray.exceptions.ActorUnavailableError)
    what = "have died" if is_dead else "cannot be reached"
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return Finding(
        "R150",
        f"the job's managers on {_where(managers)} {what}: {method}() was not done",
        context=(f"Ray: {reason[:300]}",),
        rule="running workers continue, but nothing can be launched or reserved, and Ray may give their accelerators away",
        fixes=(
            Fix("save what is needed, then start the job again", "cluster.close(), then Cluster(…)"),
            Fix("see why they ended", f"ray logs actor --id {id_of_actor(managers)}"),
        ),
    )


def _where(managers: ray.actor.ActorHandle[Any]) -> str:
    address = _nodes.get(id_of_actor(managers))
    return f"node 0 ({address})" if address else "node 0"

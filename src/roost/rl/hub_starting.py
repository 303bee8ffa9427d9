"""Starting the hub of a rollout, and another in its place when it or its router has died."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from roost.cluster import Cluster
from roost.errors import RolloutError, RoostError, WorkerDiedError
from roost.placement import NodePlacementStrategy
from roost.rl.hub import CONCURRENCY, Hub, HubLink
from roost.worker import GroupRequest, WorkerGroup

__all__ = ["HubStarter"]

LOOK_S = 10.0
"""Seconds to wait for the hub to say that it is there; one that is silent is not dead."""
ROUTER_S = 180.0
"""Seconds to wait for the hub to start the router again, for which it has two attempts of a minute."""
REMOVE_S = 10.0
"""Seconds to wait for the hub to remove its journal at the end."""

logger = logging.getLogger("roost")


class HubStarter:
    """Starts the hub of a rollout on node 0, and keeps what a successor needs.

    Args:
        cluster: The machines.
        name: Name of the rollout.
        capacity: Of the buffer.
        lock_ttl_s: Of the lock.
        router: Settings of the router; ``None``: no router.
        journal: Folder for the buffer's journal; empty: one in the private folder of this user; ``None``: no journal.

    Attributes:
        url: Of the router; empty without one.
        key: Of the router; a new one each time that it starts, unless its settings have one.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        capacity: int,
        lock_ttl_s: float,
        router: Mapping[str, Any] | None,
        journal: str | None,
    ) -> None:
        self.url = self.key = ""
        self._cluster = cluster
        self._name = f"{name}-hub"
        self._arguments = (capacity, lock_ttl_s, router, journal)
        self._has_router = router is not None
        self._is_starting_router = False
        self._incarnation = 0
        self._group: WorkerGroup | None = None
        self._link: HubLink | None = None

    def start(self) -> None:
        """Start the hub and its router."""
        self._launch()

    @property
    def group(self) -> WorkerGroup:
        """The hub, once it was started."""
        if self._group is None:
            raise RuntimeError("the hub was not started")
        return self._group

    @property
    def link(self) -> HubLink:
        """Calls the hub; the same object for all hubs that take each other's place."""
        if self._link is None:
            self._link = HubLink(self.group)
        return self._link

    def recover(self) -> bool:
        """Start the hub or the router again if it has died; return whether the router knows no engines now.

        Raises:
            RoostError: It did not start.
        """
        (state,) = self.group.states([0], timeout_s=LOOK_S)
        if state["state"] != "dead":
            try:
                return self._has_router and self._start_dead_router()
            except (RolloutError, WorkerDiedError) as error:  # S210, W202: it has died since it was asked
                if isinstance(error, RolloutError) and "S210" not in error.codes:
                    raise
        self.group.close()
        self._launch()
        self.link.connect(self.group)
        for note in self.group.notes().wait()[0]:
            logger.warning("%s was started again: %s", self._name, note)
        return True

    def _start_dead_router(self) -> bool:
        """Start the router again if its process has ended; return whether it had."""
        if not self._is_starting_router:  # else it may run by now, with a key that did not arrive here
            try:
                self.link.call("router", "check")
                return False
            except RolloutError as error:
                if "S210" in error.codes:
                    raise
        self._is_starting_router = True
        self.url, self.key = self.group.start_router().wait(ROUTER_S)[0]
        self._is_starting_router = False
        return True

    def _launch(self) -> None:
        self._incarnation += 1
        request = GroupRequest(Hub, (*self._arguments, self._incarnation))
        self._group = request.launch(
            self._cluster, NodePlacementStrategy([0]), name=self._name, max_concurrency=CONCURRENCY
        )
        self.url, self.key = self.group.router_access().wait()[0]
        self._is_starting_router = False

    def close(self) -> None:
        """End the hub with everything that it has. Safe to call twice."""
        if self._group is not None:
            with contextlib.suppress(RoostError):
                self._group.remove_journal().wait(REMOVE_S)
            with contextlib.suppress(RoostError):
                self._group.close()

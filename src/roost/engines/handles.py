"""Engines as the rollout manager sees them: engines of the job, and external engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.engines.engine import EnginePlace
from roost.engines.http_calls import ask
from roost.errors import RolloutError
from roost.plan import ComponentPlan, WeightTransport
from roost.weights.files import version_folder
from roost.worker import GroupResult, WorkerGroup
from roost.worker.deadline import Deadline
from roost.worker.results import LaneResult

__all__ = ["EngineHandle", "ExternalEngine"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class EngineHandle:
    """One engine of the job: one worker for each of its members.

    Attributes:
        name: Name, such as ``rollout/0``.
        component: The engine's component in the plan.
        ranks: Ranks of its members in the component.
        group: The worker group of its members.
        first: Rank of member 0 in that group.
        url: Base URL of its server.
        version: Version of the weights that it serves; 0: those that it started with.
        is_alive: Whether it runs, as far as is known.
        is_registered: Whether the router sends requests to it.
        incarnation: Number of times that it was started.
        places: The :class:`EnginePlace` of each member.
        key: Key of its server; a new one with each start.
    """

    name: str
    component: ComponentPlan
    ranks: tuple[int, ...]
    group: WorkerGroup
    first: int
    url: str = ""
    version: int = 0
    is_alive: bool = True
    is_registered: bool = False
    incarnation: int = 1
    places: list[EnginePlace] = field(default_factory=list)
    key: str = field(default="", repr=False)

    is_external = False

    @property
    def num_members(self) -> int:
        """Number of its members."""
        return len(self.ranks)

    @property
    def identity(self) -> tuple[str, int]:
        """Name and incarnation, which distinguish the engine from the same engine after a restart."""
        return (self.name, self.incarnation)

    def call(self, member: int, method: str, *args: Any) -> list[GroupResult]:
        """Call a method of one member. Return a list, since external engines have no worker to call."""
        chosen = self.group.execute_on(self.first + member)
        return [getattr(chosen, method)(*args)]

    def open_lane(self, member: int, timeout_s: float) -> None:
        """Open the member's control lane, so that :meth:`begin` need not go through Ray."""
        self.group.open_lanes([self.first + member], in_order=False, timeout_s=timeout_s)

    def begin(self, member: int, method: str, *args: Any) -> GroupResult | LaneResult:
        """Call a method of one member: over its lane if it has one, else through Ray."""
        return self.group.begin(self.first + member, method, *args)

    def call_all(self, method: str, *args: Any) -> GroupResult:
        """Call a method of all members."""
        chosen = self.group.execute_on(*range(self.first, self.first + self.num_members))
        result: GroupResult = getattr(chosen, method)(*args)
        return result

    def end_members(self) -> None:
        """Kill the remaining processes of the engine: it cannot serve with only a part of its members."""
        ranks = range(self.first, self.first + self.num_members)
        self.group.kill_workers(ranks)

    def describe(self) -> GroupResult | None:
        """Ask member 0 which tensors the engine needs."""
        return self.call(0, "describe_weights")[0]

    def commit(self, member: int, version: int, pause: str, folder: str) -> list[GroupResult]:
        """Have a member switch to the version that it received."""
        return self.call(member, "commit_weights", version, pause)

    def location(self, member: int) -> tuple[int, int]:
        """Return the node rank and the first accelerator of a member."""
        placement = self.component.placements[self.ranks[member]]
        return (placement.cluster_node_rank, placement.local_accelerator_rank)

    def accelerators(self, member: int) -> tuple[int, ...]:
        """Return all accelerators of a member, on its node."""
        return self.component.placements[self.ranks[member]].accelerators

    def transport(self, member: int) -> WeightTransport:
        """Return the plan's transport for the weights of a member."""
        transports = self.component.transports
        return transports[self.ranks[member]] if transports else WeightTransport.BROADCAST

    def __repr__(self) -> str:
        state = "alive" if self.is_alive else "dead"
        return f"EngineHandle({self.name!r}, {self.url}, version {self.version}, {state})"


@dataclass(eq=False)
class ExternalEngine:
    """An engine outside the job, known by its URL. Weights reach it through files.

    Attributes:
        url: Base URL of its server.
        version: Version of the weights that it serves.
        is_alive: Whether it runs, as far as is known.
        is_registered: Whether the router sends requests to it.
        key: Key of its server, from the job's user; empty: the server needs none.
    """

    url: str
    version: int = 0
    is_alive: bool = True
    is_registered: bool = False
    key: str = field(default="", repr=False)

    is_external = True
    num_members = 1

    @property
    def name(self) -> str:
        """The URL."""
        return self.url

    @property
    def identity(self) -> tuple[str, int]:
        """The URL, with 1 in place of the incarnation."""
        return (self.url, 1)

    def call(self, member: int, method: str, *args: Any) -> list[GroupResult]:
        """Return an empty list: an external engine has no worker to call."""
        return []

    def describe(self) -> GroupResult | None:
        """Return ``None``: an external engine does not describe its tensors, and gets all of them whole."""
        return None

    def commit(self, member: int, version: int, pause: str, folder: str) -> list[Any]:
        """Have it load the version from the folder. The commands are sent when the result is waited for."""
        path = version_folder(folder, version)

        def load(timeout_s: float) -> None:
            if self.version == version:  # the commit is repeated because another engine died
                return
            deadline = Deadline(timeout_s)
            if pause != "keep":
                self.pause(pause, deadline.left_s())
            try:
                body = {"model_path": str(path), "weight_version": str(version)}
                self.post("update_weights_from_disk", body, deadline.left_s())
                self.version = version
            finally:
                if pause != "keep":
                    self.post("continue_generation", {}, deadline.left_s())

        return [_DeferredCall(load)]

    def pause(self, mode: str, timeout_s: float = 300.0) -> None:
        """Pause generation there, with mode ``abort`` if the server refuses the mode.

        SGLang's own servers know only ``abort``. This job has no request in flight by now.
        """
        deadline = Deadline(timeout_s)
        try:
            self.post("pause_generation", {"mode": mode}, timeout_s)
        except RolloutError as error:
            if mode == "abort":
                raise
            logger.info("%s cannot be paused with mode %r: %s", self.url, mode, error.findings[0].message)
            self.post("pause_generation", {"mode": "abort"}, deadline.left_s())

    def location(self, member: int) -> tuple[int, int]:
        """Return (-1, -1): the node and the accelerator are unknown."""
        return (-1, -1)

    def accelerators(self, member: int) -> tuple[int, ...]:
        """Return nothing: the accelerators are unknown."""
        return ()

    def transport(self, member: int) -> WeightTransport:
        """Return the transport by files."""
        return WeightTransport.FILE

    def health(self) -> str:
        """Return why it cannot serve; empty if it is healthy. Wait at most 5 s."""
        try:
            ask(f"{self.url}/health", timeout_s=5, key=self.key)
        except RolloutError as error:
            return error.findings[0].message
        return ""

    def ask_version(self) -> int:
        """Return the version that it serves, perhaps from another job; 0 if it does not report one.

        Raises:
            RolloutError: It refuses the key (E113).
        """
        try:
            text = str(ask(f"{self.url}/get_model_info", timeout_s=5, key=self.key)["weight_version"])
        except (RolloutError, KeyError, TypeError) as error:
            if isinstance(error, RolloutError) and "E113" in error.codes:
                raise
            logger.info("%s reports no version of its weights: %s", self.url, error)
            return 0
        return int(text) if text.isdigit() else 0

    def post(self, route: str, body: dict[str, Any], timeout_s: float = 300.0) -> Any:
        """Send a command and return the answer.

        Raises:
            RolloutError: It does not answer within ``timeout_s``, or answers with an error (S203).
        """
        return ask(f"{self.url}/{route}", "POST", body, max(0.1, timeout_s), code="S203", key=self.key)

    def __repr__(self) -> str:
        return f"ExternalEngine({self.url}, version {self.version})"


class _DeferredCall:
    """A call that runs when it is waited for; it has the interface of a group's result."""

    def __init__(self, action: Callable[[float], None]) -> None:
        self._action = action

    def wait(self, timeout_s: float | None = None) -> Sequence[None]:
        self._action(600.0 if timeout_s is None else timeout_s)
        return [None]

    def done(self) -> bool:
        """Return ``False``: the call runs in :meth:`wait`."""
        return False

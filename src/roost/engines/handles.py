"""Engines as the rollout manager sees them: its own, and those that run elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.engines.http_calls import ask
from roost.errors import RolloutError
from roost.plan import ComponentPlan, WeightTransport
from roost.weights.files import version_folder
from roost.worker import GroupResult, WorkerGroup
from roost.worker.deadline import Deadline
from roost.worker.results import LaneResult

__all__ = ["EngineHandle", "ExternalEngine"]


@dataclass(eq=False)
class EngineHandle:
    """One engine: one process per node-member.

    Attributes:
        name: Such as ``rollout/0``.
        component: The component of the plan that it belongs to.
        ranks: Ranks of its members in that component.
        group: The workers that it lives in.
        first: Rank of its first member in that group.
        url: Where it serves.
        version: The weights that it serves; 0: those that it started with.
        is_alive: Whether it runs, as far as is known.
        incarnation: Counts its starts.
        key: What its server asks for; another one with each start.
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
    places: list[Any] = field(default_factory=list)
    key: str = field(default="", repr=False)

    is_external = False

    @property
    def num_members(self) -> int:
        """Number of its members."""
        return len(self.ranks)

    @property
    def identity(self) -> tuple[str, int]:
        """Tells it from its successors."""
        return (self.name, self.incarnation)

    def call(self, member: int, method: str, *args: Any) -> list[GroupResult]:
        """Calls a method of one member; as a list, since engines that run elsewhere have none to call."""
        chosen = self.group.execute_on(self.first + member)
        return [getattr(chosen, method)(*args)]

    def open_lane(self, member: int, timeout_s: float) -> None:
        """Makes a shorter way for :meth:`begin`."""
        self.group.open_lanes([self.first + member], in_order=False, timeout_s=timeout_s)

    def begin(self, member: int, method: str, *args: Any) -> GroupResult | LaneResult:
        """Calls a method of one member by the shortest way that there is."""
        return self.group.begin(self.first + member, method, *args)

    def call_all(self, method: str, *args: Any) -> GroupResult:
        """Calls a method of all members."""
        chosen = self.group.execute_on(*range(self.first, self.first + self.num_members))
        result: GroupResult = getattr(chosen, method)(*args)
        return result

    def end_members(self) -> None:
        """Ends those of its processes that are left: they are of no use without the others."""
        ranks = range(self.first, self.first + self.num_members)
        self.group.kill_workers(ranks)

    def describe(self) -> GroupResult | None:
        """What it wants of the weights."""
        return self.call(0, "describe_weights")[0]

    def commit(self, member: int, version: int, pause: str, folder: str) -> list[GroupResult]:
        """Has a member change over to what it was sent."""
        return self.call(member, "commit_weights", version, pause)

    def location(self, member: int) -> tuple[int, int]:
        """Node and accelerator of a member."""
        placement = self.component.placements[self.ranks[member]]
        return (placement.cluster_node_rank, placement.local_accelerator_rank)

    def accelerators(self, member: int) -> tuple[int, ...]:
        """All accelerators of a member, on its node."""
        return self.component.placements[self.ranks[member]].accelerators

    def transport(self, member: int) -> WeightTransport:
        """How the plan wants its weights to come."""
        transports = self.component.transports
        return transports[self.ranks[member]] if transports else WeightTransport.BROADCAST

    def __repr__(self) -> str:
        state = "alive" if self.is_alive else "dead"
        return f"EngineHandle({self.name!r}, {self.url}, version {self.version}, {state})"


@dataclass(eq=False)
class ExternalEngine:
    """An engine that runs elsewhere and is known by its address. Weights reach it through files.

    Attributes:
        url: Where it serves.
        key: What its server asks for, which its owner knows; empty: nothing.
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
        """Its address."""
        return self.url

    @property
    def identity(self) -> tuple[str, int]:
        """Tells it from others."""
        return (self.url, 1)

    def call(self, member: int, method: str, *args: Any) -> list[GroupResult]:
        """It has no worker to call."""
        return []

    def describe(self) -> GroupResult | None:
        """It does not say what it wants: it gets all tensors in full."""
        return None

    def commit(self, member: int, version: int, pause: str, folder: str) -> list[Any]:
        """Tells it where the version is."""
        path = version_folder(folder, version)

        def tell(timeout_s: float) -> None:
            if self.version == version:  # told before; it is said once more because another engine died
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

        return [_Later(tell)]

    def pause(self, mode: str, timeout_s: float = 300.0) -> None:
        """Holds generation there. SGLang's own servers can only ``abort``; by now nothing of this job runs there."""
        deadline = Deadline(timeout_s)
        try:
            self.post("pause_generation", {"mode": mode}, timeout_s)
        except RolloutError:
            if mode == "abort":
                raise
            self.post("pause_generation", {"mode": "abort"}, deadline.left_s())

    def location(self, member: int) -> tuple[int, int]:
        """Nobody knows where it is."""
        return (-1, -1)

    def accelerators(self, member: int) -> tuple[int, ...]:
        """Nobody knows which it has."""
        return ()

    def transport(self, member: int) -> WeightTransport:
        """Through files."""
        return WeightTransport.FILE

    def health(self) -> str:
        """Empty where it answers that it can serve, else what it said."""
        try:
            ask(f"{self.url}/health", timeout_s=5, key=self.key)
        except RolloutError as error:
            return error.findings[0].message
        return ""

    def ask_version(self) -> int:
        """The version that it serves, which another job may have sent; 0 where it does not say.

        Raises:
            RolloutError: It refuses the key (E113).
        """
        try:
            said = str(ask(f"{self.url}/get_model_info", timeout_s=5, key=self.key)["weight_version"])
        except (RolloutError, KeyError, TypeError) as error:
            if isinstance(error, RolloutError) and "E113" in error.codes:
                raise
            return 0
        return int(said) if said.isdigit() else 0

    def post(self, route: str, body: dict[str, Any], timeout_s: float = 300.0) -> Any:
        """Send a command, and wait for its answer.

        Raises:
            RolloutError: With what it answered.
        """
        return ask(f"{self.url}/{route}", "POST", body, max(0.1, timeout_s), code="S203", key=self.key)

    def __repr__(self) -> str:
        return f"ExternalEngine({self.url}, version {self.version})"


class _Later:
    """Something to do that is waited for like a call."""

    def __init__(self, action: Callable[[float], None]) -> None:
        self._action = action

    def wait(self, timeout_s: float | None = None) -> Sequence[None]:
        self._action(600.0 if timeout_s is None else timeout_s)
        return [None]

    def done(self) -> bool:
        """Whether it has begun: never, before it is waited for."""
        return False

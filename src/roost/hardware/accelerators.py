"""Accelerator vendors as data. Each vendor is one module in ``hardware/vendors``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

__all__ = ["AcceleratorType", "Device", "Holder", "Usage", "register_accelerator"]


@dataclass(frozen=True)
class Device:
    """One accelerator, as the vendor's driver library knows it.

    Attributes:
        id: Its number on the node, as the driver counts.
        uuid: Its id in the world; empty where the vendor does not tell.
        model: Its model.
        memory_gib: Its memory.
        used_gib: How much of that is in use.
        pids: Processes that use it.
        busy: Share of the last moments in which it computed, from 0 to 1; ``None`` where that cannot be told.
        fault: Why it cannot be used, such as ``GPU is lost``; empty where nothing is known against it.
    """

    id: str
    uuid: str = ""
    model: str = ""
    memory_gib: float | None = None
    used_gib: float | None = None
    pids: tuple[int, ...] = ()
    busy: float | None = None
    fault: str = ""


@dataclass(frozen=True)
class Usage:
    """How much of an accelerator is used now.

    Attributes:
        id: Its number on the node, as the driver counts.
        uuid: Its id in the world.
        memory_gib: Its memory.
        used_gib: How much of that is in use, by anybody.
        busy: Share of the last moments in which it computed, from 0 to 1; ``None`` where that cannot be told.
    """

    id: str
    uuid: str
    memory_gib: float
    used_gib: float
    busy: float | None = None


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of an accelerator.

    Attributes:
        uuid: The accelerator.
        pid: The process, as the driver counts.
        used_gib: How much it holds; ``None`` where the driver does not tell.
    """

    uuid: str
    pid: int
    used_gib: float | None = None


@dataclass(frozen=True)
class AcceleratorType:
    """A vendor's accelerators: what they are called and how a process is shown some of them.

    Registered types are attributes of this class in capitals: ``AcceleratorType.NVIDIA``.

    Attributes:
        name: The vendor.
        visible_devices_variable: Environment variable that limits what a process sees; empty for
            nodes without accelerators.
        noset_variables: Variables that keep Ray from overwriting it, one per generation of Ray.
        ray_resource: The name under which Ray counts them.
        environment: Further variables that every worker on such accelerators gets.
        noun: What people call one of them.
        models: How the names of its models begin, as Ray and users spell them in a node's accelerator type.
        device_files: Patterns of files that its kernel driver makes; for vendors that share a resource name.
        detect: Finds them on this node through the driver library, those that do not answer with their fault; loads
            it only when called. It returns nothing where there is no driver, and raises where the driver fails.
        visible_uuids: What a process with this environment really sees, by uuid. It leaves the calling process able
            to fork and to choose its own context, and raises ``ClusterError`` where the driver fails.
        usage: How much of each accelerator of this node is used now; cheap enough to ask every second.
        holders: The processes that hold memory of accelerators of this node.
    """

    name: str
    visible_devices_variable: str
    noset_variables: tuple[str, ...] = ()
    ray_resource: str = "GPU"
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    noun: str = "GPU"
    models: tuple[str, ...] = ()
    device_files: tuple[str, ...] = ()
    detect: Callable[[], list[Device]] | None = field(default=None, compare=False, repr=False)
    visible_uuids: Callable[[], list[str]] | None = field(default=None, compare=False, repr=False)
    usage: Callable[[], list[Usage]] | None = field(default=None, compare=False, repr=False)
    holders: Callable[[], list[Holder]] | None = field(default=None, compare=False, repr=False)

    if TYPE_CHECKING:
        NVIDIA: ClassVar[AcceleratorType]
        AMD: ClassVar[AcceleratorType]
        ASCEND: ClassVar[AcceleratorType]
        INTEL: ClassVar[AcceleratorType]
        KUNLUN: ClassVar[AcceleratorType]
        MUSA: ClassVar[AcceleratorType]
        NO_ACCEL: ClassVar[AcceleratorType]

    @property
    def noset_variable(self) -> str:
        """The variable that keeps the current Ray from setting the visible devices."""
        return self.noset_variables[0] if self.noset_variables else ""

    def worker_environment(self, visible: Sequence[str]) -> dict[str, str]:
        """The variables of a worker that sees these accelerators and no others."""
        if not self.visible_devices_variable:
            return {}
        return {
            self.visible_devices_variable: ",".join(visible),
            **dict.fromkeys(self.noset_variables, "1"),
            **self.environment,
        }

    @staticmethod
    def get(name: str) -> AcceleratorType | None:
        """The type of that name, in any case; ``None`` where none is registered."""
        return _types.get(name.casefold())

    @staticmethod
    def names() -> list[str]:
        """The names of all registered vendors."""
        return [kind.name for kind in _types.values() if kind.visible_devices_variable]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"AcceleratorType.{self.name.upper()}"

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.name, self.visible_devices_variable, self.noset_variables, self.ray_resource)
        return (_restore, (*fields, dict(self.environment), self.noun))


_types: dict[str, AcceleratorType] = {}


def _restore(
    name: str, variable: str, noset: tuple[str, ...], resource: str, environment: dict[str, str], noun: str
) -> AcceleratorType:
    """Unpickles to the registered type, so that identity holds across processes."""
    return AcceleratorType.get(name) or AcceleratorType(name, variable, noset, resource, environment, noun)


def register_accelerator(kind: AcceleratorType) -> AcceleratorType:
    """Makes a vendor known under its name; registering a name again replaces it."""
    _types[kind.name.casefold()] = kind
    setattr(AcceleratorType, kind.name.upper(), kind)
    return kind


register_accelerator(AcceleratorType("NO_ACCEL", "", noun="node"))

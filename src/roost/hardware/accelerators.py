"""Accelerator vendors as data; each vendor is a module in ``hardware/vendors``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

__all__ = ["AcceleratorType", "Device", "Holder", "Usage", "register_accelerator"]


@dataclass(frozen=True)
class Device:
    """One accelerator, as the vendor's driver library reports it.

    Attributes:
        id: Number of the accelerator on its node, as the driver counts.
        uuid: Globally unique id; empty if the driver does not report one.
        model: Model name.
        memory_gib: Total memory in GiB; ``None`` if unknown.
        used_gib: Memory in use in GiB; ``None`` if unknown.
        pids: Ids of the processes that use it.
        busy: Utilisation from 0 to 1 over the driver's last sampling period; ``None`` if unknown.
        fault: Why it cannot be used, such as ``GPU is lost``; empty if it works.
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
    """Current memory use and utilisation of an accelerator.

    Attributes:
        id: Number of the accelerator on its node, as the driver counts.
        uuid: Globally unique id.
        memory_gib: Total memory in GiB.
        used_gib: Memory in use in GiB, by all processes together.
        busy: Utilisation from 0 to 1 over the driver's last sampling period; ``None`` if unknown.
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
        uuid: Globally unique id of the accelerator.
        pid: Process id, as the driver reports it.
        used_gib: Memory that the process holds in GiB; ``None`` if the driver does not report it.
    """

    uuid: str
    pid: int
    used_gib: float | None = None


@dataclass(frozen=True)
class AcceleratorType:
    """The accelerators of a vendor: their names, and how a process is limited to some of them.

    Registered types are attributes of this class in capitals: ``AcceleratorType.NVIDIA``.

    Attributes:
        name: Name of the vendor.
        visible_devices_variable: Environment variable that limits which accelerators a process sees; empty for
            nodes without accelerators.
        noset_variables: Variables that stop Ray from overwriting that variable, one per generation of Ray.
        ray_resource: Name of the Ray resource that counts the accelerators.
        environment: Further variables of every worker on such accelerators.
        noun: The word for one accelerator, such as ``GPU``.
        models: Prefixes of model names, as Ray and users write them in a node's accelerator type.
        device_files: Patterns of the kernel driver's device files, for vendors that share a Ray resource.
        detect: Returns the accelerators of this node; those that do not answer have a fault. It loads the driver
            library when called, returns an empty list without a driver, and raises if the driver fails.
        visible_uuids: Returns the UUIDs of the accelerators that a process with this environment sees. Afterwards the
            calling process can still fork and choose its own context. Raises ``ClusterError`` if the driver fails.
        usage: Returns the current use of each accelerator of this node; cheap enough for a call every second.
        holders: Returns the processes that hold memory of the accelerators of this node.
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
        """The variable that stops the current Ray from setting the visible devices; empty if there is none."""
        return self.noset_variables[0] if self.noset_variables else ""

    def worker_environment(self, visible: Sequence[str]) -> dict[str, str]:
        """Return the environment variables of a worker that sees only the given accelerator ids."""
        if not self.visible_devices_variable:
            return {}
        return {
            self.visible_devices_variable: ",".join(visible),
            **dict.fromkeys(self.noset_variables, "1"),
            **self.environment,
        }

    @staticmethod
    def get(name: str) -> AcceleratorType | None:
        """Return the type with a name, ignoring case; ``None`` if no such type is registered."""
        return _types.get(name.casefold())

    @staticmethod
    def names() -> list[str]:
        """Return the names of all registered vendors."""
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
    """Return the registered type when unpickling, so that types can be compared by identity in each process."""
    return AcceleratorType.get(name) or AcceleratorType(name, variable, noset, resource, environment, noun)


def register_accelerator(kind: AcceleratorType) -> AcceleratorType:
    """Register a vendor under its name and return it; registering a name again replaces the vendor."""
    _types[kind.name.casefold()] = kind
    setattr(AcceleratorType, kind.name.upper(), kind)
    return kind


register_accelerator(AcceleratorType("NO_ACCEL", "", noun="node"))

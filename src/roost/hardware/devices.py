"""The registry of devices that are not accelerators: robots, cameras, and whatever else a worker may own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from roost.errors import ConfigError, Finding, Fix

__all__ = [
    "HardwareField",
    "device_key",
    "hardware_detectors",
    "hardware_fields",
    "hardware_types",
    "register_hardware",
    "values_for_worker",
]

NODE_RANK = "node_rank"
_T = TypeVar("_T")
_types: dict[str, type[Any]] = {}

_CHECKED = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}


@dataclasses.dataclass(frozen=True)
class HardwareField:
    """One field of a hardware type.

    Attributes:
        name: Its name.
        required: Whether a job must give a value.
        type_name: ``str``, ``int``, ``float`` or ``bool`` if values are checked, else empty.
    """

    name: str
    required: bool
    type_name: str

    def accepts(self, value: object) -> bool:
        """Return whether a value has this field's type; unchecked fields accept any value."""
        if not self.type_name:
            return True
        if isinstance(value, bool) and self.type_name != "bool":
            return False
        return isinstance(value, _CHECKED[self.type_name])


def register_hardware(type_name: str) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that registers a dataclass as a hardware type.

    The fields of the dataclass are the keys of an entry of ``hardware.configs`` in a node group::

        @roost.register_hardware("Franka")
        @dataclass
        class Franka:
            robot_ip: str
            camera: str = ""

    If the class has a class method ``detect`` that returns a list of instances, it is run on every node of a live
    cluster, and the devices that it returns belong to that node. A field ``node_rank`` receives the rank of the device's
    node. Registering a name again replaces the type, as happens when a notebook cell runs twice.

    Raises:
        ConfigError: The name is blank, the class is not a dataclass, or it has a field ``type``.
    """
    if not isinstance(type_name, str) or not type_name.strip():
        raise ConfigError([Finding("C308", f"a hardware type has a name, not {type_name!r}")])

    def register(cls: type[_T]) -> type[_T]:
        if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
            message = f"hardware type {type_name!r} must be a dataclass, and {cls!r} is none"
            fix = Fix("put the decorator above @dataclass", f'@roost.register_hardware("{type_name}")')
            raise ConfigError([Finding("C308", message, fixes=(fix,))])
        names = {field.name for field in dataclasses.fields(cls)}
        if "type" in names:
            message = f"hardware type {type_name!r} has a field 'type', which is the name of the type in job files"
            raise ConfigError([Finding("C308", message, fixes=(Fix("rename the field"),))])
        _types[type_name] = cls
        return cls

    return register


def hardware_detectors() -> dict[str, type[Any]]:
    """Return the registered types that have a ``detect``, by name."""
    return {name: cls for name, cls in _types.items() if callable(getattr(cls, "detect", None))}


def hardware_types() -> list[str]:
    """Return the names of all registered hardware types."""
    return sorted(_types)


def hardware_fields(type_name: str) -> list[HardwareField] | None:
    """Return the fields of a type that a job may give, without ``node_rank``; ``None`` if it is not registered."""
    cls = _types.get(type_name)
    if cls is None:
        return None
    try:
        hints = get_type_hints(cls)
    except Exception as error:  # such as a forward reference to a name of the author's function
        import logging  # slow to import, and rarely needed

        logging.getLogger("roost").debug("fields of hardware type %s are not checked: %s", type_name, error)
        hints = {}
    return [
        HardwareField(
            field.name,
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
            _checked_type(hints.get(field.name)),
        )
        for field in dataclasses.fields(cls)
        if field.init and field.name != NODE_RANK
    ]


def values_for_worker(type_name: str, values: Mapping[str, Any], node_rank: int) -> dict[str, Any]:
    """Return the values of a device, with ``node_rank`` where the class of its type has such a field."""
    cls = _types.get(type_name)
    has_rank = cls is not None and NODE_RANK in {field.name for field in dataclasses.fields(cls)}
    return {**values, NODE_RANK: node_rank} if has_rank else dict(values)


def device_key(type_name: str, values: Mapping[str, Any]) -> str:
    """Return a text that is the same for all descriptions of one device.

    A description may leave out a field or give its default, and may give 2 or 2.0. A default that a factory makes is
    known where the factory is ``list`` or ``dict``; other factories are the user's code, and are not called. Fields that
    the constructor does not take do not count, since a job cannot give them.
    """
    cls = _types.get(type_name)
    fields = {field.name: field for field in dataclasses.fields(cls)} if cls is not None else {}
    given = {}
    for name, value in values.items():
        field = fields.get(name)
        if field is None or (field.init and _text(value) != _default_text(field)):
            given[name] = value
    return _text([type_name, given])


def _default_text(field: dataclasses.Field[Any]) -> str | None:
    """The text of a field's default; ``None`` where it has none, or it is not known."""
    default = field.default_factory() if field.default_factory in (list, dict) else field.default
    return None if default is dataclasses.MISSING else _text(default)


def _text(value: Any) -> str:
    import json

    return json.dumps(_plain(value), sort_keys=True, default=repr)


def _plain(value: Any) -> Any:
    """A value as ``dataclasses.asdict`` and JSON have it, with whole numbers as integers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _checked_type(hint: object) -> str:
    """Return ``str``, ``int``, ``float`` or ``bool`` for such an annotation, else the empty text."""
    if get_origin(hint) is not None or get_args(hint):
        return ""
    name = getattr(hint, "__name__", "")
    return name if name in _CHECKED and hint in (str, int, float, bool) else ""

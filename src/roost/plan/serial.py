"""Plans as JSON: one line per process, byte-identical for equal plans."""

from __future__ import annotations

import json
from typing import Any

from roost.errors import ConfigError, Finding, RoostError, shown
from roost.hardware import AcceleratorType
from roost.placement import Placement, PlacementMode
from roost.plan.plan import ComponentPlan, Plan
from roost.plan.transport import WeightTransport
from roost.topology import Topology

__all__ = ["plan_from_json", "plan_from_plain", "plan_to_json"]

FORMAT = "roost.plan/1"


def plan_to_json(plan: Plan) -> str:
    """Return the JSON text of a plan."""
    parts = [f'{{"format": "{FORMAT}",\n "mode": "{plan.mode.value}",\n "topology": ']
    parts.append(_dump(plan.topology.to_dict()))
    notes = [{"code": note.code, "message": note.message} for note in plan.notes]
    parts.append(f',\n "notes": {_dump(notes)},\n "components": [')
    for index, component in enumerate(plan.components):
        parts.append(",\n  " if index else "\n  ")
        head = {
            "name": component.name,
            "role": component.role,
            "rule": component.rule,
            "node_groups": list(component.node_groups),
            "gpu_share": component.gpu_share,
            "cpus": component.cpus,
            "memory_gib": component.memory_gib,
            "tensor_parallel": component.tensor_parallel,
            **({"pipeline_parallel": component.pipeline_parallel} if component.pipeline_parallel > 1 else {}),
            **({"processes_per_engine": component.processes_per_engine} if component.processes_per_engine > 1 else {}),
            **({"placeholder": True} if component.placeholder else {}),
        }
        parts.append(f'{_dump(head)[:-1]}, "processes": [\n   ')
        parts.append(",\n   ".join(_rows(component, plan)))
        parts.append("]}")
    parts.append("]}\n")
    return "".join(parts)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _rows(component: ComponentPlan, plan: Plan) -> list[str]:
    encode = json.JSONEncoder(ensure_ascii=False).encode
    transports = component.transports or (None,) * len(component.placements)
    texts = plan.transport_texts(component.name)
    return [
        encode(
            {
                "rank": p.rank,
                "cluster_node_rank": p.cluster_node_rank,
                "placement_node_rank": p.placement_node_rank,
                "local_accelerator_rank": p.local_accelerator_rank,
                "accelerator_type": p.accelerator_type.name,
                "local_rank": p.local_rank,
                "local_world_size": p.local_world_size,
                "visible_accelerators": p.visible_accelerators,
                "isolate_accelerator": p.isolate_accelerator,
                "local_hardware_ranks": p.local_hardware_ranks,
                "node_group_label": p.node_group_label,
                **({"transport": transport.value} if transport is not None else {}),
                **({"weights_by": _weights_by(texts[p.rank])} if texts and "," in texts[p.rank] else {}),
            }
        )
        for p, transport in zip(component.placements, transports, strict=True)
    ]


def _weights_by(text: str) -> dict[str, str]:
    """Return the share of each transport. It follows from the rest of the plan, so that reading a plan ignores it."""
    shares = (part.split(" ") for part in text.split(", "))
    return {transport: share for share, transport in shares}


def plan_from_json(text: str) -> Plan:
    """Return the plan of a JSON text.

    Raises:
        ConfigError: If the text is not a plan (C401).
    """
    try:
        plain = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError([Finding("C401", f"not a plan: {str(error)[:200]}")]) from None
    return plan_from_plain(plain)


def plan_from_plain(plain: Any) -> Plan:
    """Return the plan of a text that ``json.loads`` has parsed.

    Raises:
        ConfigError: If the value is not a plan (C401).
    """
    try:
        found = plain.get("format")
        if found != FORMAT:
            raise ValueError(f"its format is {found!r}; this Roost reads {FORMAT!r}")
        topology = Topology.from_dict(plain["topology"])
        notes = tuple(Finding(str(note["code"]), str(note["message"]), severity="note") for note in plain["notes"])
        components = tuple(_component(entry, topology) for entry in plain["components"])
        if len({component.name for component in components}) != len(components):
            raise ValueError("two components have the same name")
        return Plan(topology, components, PlacementMode(plain["mode"]), notes)
    except RoostError:
        raise
    except KeyError as error:
        raise ConfigError([Finding("C401", f"not a plan: {error} is missing or unknown")]) from None
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ConfigError([Finding("C401", f"not a plan: {str(error)[:200]}")]) from None


_HEAD: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "role": (str,),
    "rule": (str,),
    "node_groups": (list,),
    "gpu_share": (int, float, type(None)),
    "cpus": (int, float, type(None)),
    "memory_gib": (int, float, type(None)),
    "tensor_parallel": (int,),
    "pipeline_parallel": (int,),
    "processes_per_engine": (int,),
    "placeholder": (bool,),
    "processes": (list,),
}
_DEFAULTS: dict[str, Any] = {"pipeline_parallel": 1, "processes_per_engine": 1, "placeholder": False}
"""Keys that are not written if they have these values."""
_ROW: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "cluster_node_rank": (int,),
    "placement_node_rank": (int,),
    "local_accelerator_rank": (int,),
    "accelerator_type": (str,),
    "local_rank": (int,),
    "local_world_size": (int,),
    "visible_accelerators": (list,),
    "isolate_accelerator": (bool,),
    "local_hardware_ranks": (list,),
    "node_group_label": (str,),
}


def _check(entry: Any, types: dict[str, tuple[type, ...]]) -> None:
    for key, kinds in types.items():
        value = entry[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{key} is {shown(value)}")


def _component(entry: Any, topology: Topology) -> ComponentPlan:
    entry = {**_DEFAULTS, **entry}
    _check(entry, _HEAD)
    name, rows = entry["name"], entry["processes"]
    placements = tuple(_placement(row, topology) for row in rows)
    if not placements or [placement.rank for placement in placements] != list(range(len(placements))):
        raise ValueError(f"the ranks of {name!r} are not 0, 1, 2, …")
    if entry["tensor_parallel"] < 1 or entry["pipeline_parallel"] < 1:
        raise ValueError(f"tensor_parallel and pipeline_parallel of {name!r} must be at least 1")
    if not all(isinstance(label, str) for label in entry["node_groups"]):
        raise ValueError(f"node_groups of {name!r} must be texts")
    if entry["processes_per_engine"] < 1:
        raise ValueError(f"processes_per_engine of {name!r} is {entry['processes_per_engine']}")
    transports = tuple(WeightTransport(row["transport"]) for row in rows if "transport" in row)
    if transports and len(transports) != len(placements):
        raise ValueError(f"some processes of {name!r} have a transport, and some have none")
    return ComponentPlan(
        name,
        entry["role"],
        placements,
        entry["rule"],
        tuple(entry["node_groups"]),
        entry["gpu_share"],
        entry["cpus"],
        entry["memory_gib"],
        entry["tensor_parallel"],
        transports,
        pipeline_parallel=entry["pipeline_parallel"],
        processes_per_engine=entry["processes_per_engine"],
        placeholder=entry["placeholder"],
    )


def _placement(row: Any, topology: Topology) -> Placement:
    _check(row, _ROW)
    accelerator_type = AcceleratorType.get(row["accelerator_type"])
    if accelerator_type is None:
        raise ValueError(f"there is no accelerator vendor {row['accelerator_type']!r}")
    if not 0 <= row["cluster_node_rank"] < topology.num_nodes or not topology.has_group(row["node_group_label"]):
        raise ValueError("a process is on a node or in a node group that does not exist")
    given, visible = row["local_hardware_ranks"], row["visible_accelerators"]
    if not all(type(rank) is int and rank >= 0 for rank in given) or not all(type(i) is str for i in visible):
        raise ValueError("local_hardware_ranks must be numbers from 0 up, and visible_accelerators texts")
    here = topology.nodes[row["cluster_node_rank"]].num_accelerators
    if row["local_accelerator_rank"] >= 0 and (not given or max(given) >= here):
        raise ValueError(f"a process uses accelerators {shown(given)} of a node with {here}")
    return Placement(
        row["rank"],
        row["cluster_node_rank"],
        row["placement_node_rank"],
        row["local_accelerator_rank"],
        accelerator_type,
        row["local_rank"],
        row["local_world_size"],
        tuple(visible),
        row["isolate_accelerator"],
        tuple(given),
        row["node_group_label"],
    )

"""Parse short texts for topologies: ``8x8:A800+8x8:4090+2x0``."""

from __future__ import annotations

import re

from roost.errors import Finding, Fix, Mark, Place, TopologyError
from roost.hardware import AcceleratorType
from roost.topology.model import Node, Topology, numbered_ids

MAX_NODES = 2**20
MAX_ACCELERATORS_PER_NODE = 4096

_PART = re.compile(r"\s*([0-9]{1,7})\s*[xX×]\s*([0-9]{1,4})\s*(?::\s*([^\s:+]+)\s*)?\Z", re.ASCII)
_RULE = "nodes x accelerators[:model], joined with +; model may be vendor/model"


def parse_topology(text: str) -> Topology:
    """Return the topology of a text: ``"2x8"``, ``"8x8:H200"``, ``"4x8:Ascend/910B+2x0"``.

    Raises:
        TopologyError: With every part of the text that is wrong.
    """
    if not isinstance(text, str) or not text.strip():
        raise TopologyError([_finding(str(text), 0, str(text), "a topology looks like 2x8")])
    parts: list[tuple[int, int, AcceleratorType, str]] = []
    total = 0
    findings: list[Finding] = []
    offset = 0
    for part in text.split("+"):
        match = _PART.match(part)
        if match is None:
            findings.append(_finding(text, offset, part, f"{part.strip()[:40]!r} is not like 2x8 or 8x8:H200"))
        else:
            number, count = int(match[1]), int(match[2])
            total += number
            if not number or total > MAX_NODES:
                findings.append(_finding(text, offset, part, f"{total:,} nodes: from 1 to {MAX_NODES:,} in all"))
            elif count > MAX_ACCELERATORS_PER_NODE:
                most = f"at most {MAX_ACCELERATORS_PER_NODE:,}"
                findings.append(_finding(text, offset, part, f"{count} accelerators in one node: {most}"))
            kind, model = _vendor_and_model(match[3] or "")
            parts.append((number, count, kind, model) if count else (number, 0, AcceleratorType.NO_ACCEL, ""))
        offset += len(part) + 1
    if findings:
        raise TopologyError(findings)
    nodes: list[Node] = []
    for number, count, kind, model in parts:
        first, ids = len(nodes), numbered_ids(count)
        nodes.extend(
            Node(first + i, accelerator_ids=ids, accelerator_type=kind, accelerator_model=model) for i in range(number)
        )
    return Topology(tuple(nodes))


def _vendor_and_model(text: str) -> tuple[AcceleratorType, str]:
    vendor, _, model = text.partition("/")
    kind = AcceleratorType.get(vendor)
    if kind is not None and kind.visible_devices_variable:
        return kind, model
    return AcceleratorType.NVIDIA, text


def _finding(text: str, offset: int, part: str, message: str) -> Finding:
    start = offset + len(part) - len(part.lstrip())
    return Finding(
        "T101",
        message,
        Place(file="cluster", line=1, column=start + 1, source=text),
        (Mark(start + 1, len(part.strip())),),
        rule=_RULE,
        fixes=(Fix("two nodes of eight", "2x8"), Fix("two kinds and CPU nodes", "8x8:A800+8x8:4090+2x0")),
    )

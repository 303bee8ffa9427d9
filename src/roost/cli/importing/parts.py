"""What all imports share: components with their accelerators, the file that says so, and what is left over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from roost.cli.inputs import UsageError
from roost.cli.writing import Writer, ranks
from roost.errors import Finding, Fix, Mark, Place, counted
from roost.source import Tree

__all__ = ["Imported", "Left", "Placed", "complain", "placement_text", "write_left", "write_placed", "write_sizes"]

Chunk = tuple[int, int]
"""Accelerators that lie together: the first, and how many."""

_SECRET = re.compile(r"(api|wandb|access|auth|secret|private)[-_]?(key|token)|password|passwd|secret|credential")


@dataclass(frozen=True)
class Imported:
    """A job file made of something else.

    Attributes:
        text: The job file.
        cluster: The machines that it was made for, as ``--cluster`` takes them.
        needs: Hardware types that must be registered before it can be planned.
    """

    text: str
    cluster: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """A component, and the accelerators that it gets.

    Attributes:
        name: Its name.
        chunks: Its accelerators, by rank in the cluster.
        per_process: How many of them one process has.
        members: How many processes make one engine.
        note: What to say of it.
        role: Its role, where that is not its name.
        share: Fraction of each of its accelerators.
        placeholder: Reserved only.
    """

    name: str
    chunks: tuple[Chunk, ...]
    per_process: int = 1
    members: int = 1
    note: str = ""
    role: str = ""
    share: float | None = None
    placeholder: bool = False


@dataclass
class Left:
    """What has no counterpart: why, and which.

    Attributes:
        about: Reasons, each with flags or keys.
    """

    about: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, what: str) -> None:
        """Takes one flag or key."""
        self.about.setdefault(reason, []).append(what)


def complain(
    code: str, message: str, at: Tree | None = None, fixes: Iterable[tuple[str, str]] = (), rule: str = ""
) -> Finding:
    """A finding about a value of the source: its place where it has one."""
    place: Place | None = None
    marks: tuple[Mark, ...] = ()
    if at is not None:
        place = at.place()
        marks = (at.mark(),) if place.source else ()
    return Finding(code, message, place, marks, rule=rule, fixes=tuple(Fix(*fix) for fix in fixes))


def raise_found(findings: Sequence[Finding]) -> None:
    """Raises everything that was found, if anything was."""
    if findings:
        raise UsageError(list(findings))


def placement_text(chunks: Sequence[Chunk], per_process: int) -> str:
    """The placement text of a component: one segment for each stretch of accelerators."""
    stretches: list[list[int]] = []
    for first, count in chunks:
        if stretches and sum(stretches[-1]) == first:
            stretches[-1][1] += count
        else:
            stretches.append([first, count])
    segments, process = [], 0
    for first, count in stretches:
        processes = count // per_process
        tail = f":{ranks(process, processes)}" if per_process > 1 else ""
        segments.append(ranks(first, count) + tail)
        process += processes
    return ",".join(segments)


def write_placed(writer: Writer, placed: Sequence[Placed]) -> None:
    """The ``component_placement`` of these components."""
    writer.key("component_placement", depth=1)
    for component in placed:
        writer.key(component.name, None, component.note, depth=2)
        writer.key("placement", placement_text(component.chunks, component.per_process), depth=3)
        if component.role:
            writer.key("role", component.role, depth=3)
        if component.share is not None:
            writer.key("gpu_share", component.share, depth=3)
        if component.members > 1:
            note = f"{counted(component.members, 'process')}, one per node, make one engine"
            writer.key("processes_per_engine", component.members, note, depth=3)
        if component.placeholder:
            writer.key("placeholder", True, "reserved, and nothing is started", depth=3)


def write_sizes(writer: Writer, sections: Mapping[str, Mapping[str, int]]) -> None:
    """Sections with parallel sizes, such as ``actor: {model: {tensor_model_parallel_size: 4}}``."""
    said = {name: sizes for name, sizes in sections.items() if sizes}
    if said:
        writer.blank().comment("Parallel sizes.")
    for name, sizes in said.items():
        writer.key(name)
        trained = {key: size for key, size in sizes.items() if key in _OF_MODELS}
        for key, size in sizes.items():
            if key not in _OF_MODELS:
                writer.key(key, size, depth=1)
        if trained:
            writer.key("model", depth=1)
            for key, size in trained.items():
                writer.key(key, size, depth=2)


_OF_MODELS = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")


def write_left(writer: Writer, left: Left) -> None:
    """The block of what has no counterpart; every flag and key of it is named."""
    if not left.about:
        return
    writer.blank().comment(
        "No counterpart: Roost says where processes live; the rest stays with the code that they run."
    )
    for reason, names in left.about.items():
        between = "\n  " if any(": " in name for name in names) else ", "
        writer.comment(f"\n{reason}:\n  " + between.join(names))


def masked(name: str, value: str) -> str:
    """A flag with its value; that of a secret is not repeated."""
    if not value:
        return name
    if _SECRET.search(name.casefold()):
        return f"{name} …"
    short = value if len(value) <= 60 else value[:59] + "…"
    return f"{name} {short}"

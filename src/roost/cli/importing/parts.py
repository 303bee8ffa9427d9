"""Shared parts of the imports: components with their accelerators, the job file, and the settings without counterpart."""

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
"""Consecutive accelerators: the first, and their number."""

_SECRET = re.compile(r"(api|wandb|access|auth|secret|private)[-_]?(key|token)|password|passwd|secret|credential")


@dataclass(frozen=True)
class Imported:
    """A job file that was converted from another configuration.

    Attributes:
        text: The job file.
        cluster: The value of ``--cluster`` that it was made for.
        needs: Hardware types that must be registered before it can be planned.
    """

    text: str
    cluster: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """A component and its accelerators.

    Attributes:
        name: Its name.
        chunks: Its accelerators, by rank in the cluster.
        per_process: Number of accelerators of one process.
        members: Number of processes of one engine.
        note: Comment in the job file.
        role: Its role, if that is not its name.
        share: Fraction of each of its accelerators.
        placeholder: Whether its accelerators are only reserved.
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
    """Settings without a counterpart.

    Attributes:
        about: Flags or keys by the reason why they have no counterpart.
    """

    about: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, what: str) -> None:
        """Add one flag or key."""
        self.about.setdefault(reason, []).append(what)


def complain(
    code: str, message: str, at: Tree | None = None, fixes: Iterable[tuple[str, str]] = (), rule: str = ""
) -> Finding:
    """Return a finding about a value of the configuration, with its place if it has one."""
    place: Place | None = None
    marks: tuple[Mark, ...] = ()
    if at is not None:
        place = at.place()
        marks = (at.mark(),) if place.source else ()
    return Finding(code, message, place, marks, rule=rule, fixes=tuple(Fix(*fix) for fix in fixes))


def raise_found(findings: Sequence[Finding]) -> None:
    """Raise a :class:`UsageError` with all findings, if there are any."""
    if findings:
        raise UsageError(list(findings))


def placement_text(chunks: Sequence[Chunk], per_process: int) -> str:
    """Return the placement text of a component, with a segment for each stretch of accelerators."""
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
    """Write the ``component_placement`` of components."""
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
    """Write sections with parallel sizes, such as ``actor: {model: {tensor_model_parallel_size: 4}}``."""
    given = {name: sizes for name, sizes in sections.items() if sizes}
    if given:
        writer.blank().comment("Parallel sizes.")
    for name, sizes in given.items():
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
    """Write the comment that names every setting without a counterpart."""
    if not left.about:
        return
    writer.blank().comment("No counterpart: Roost only places processes. The rest stays with the code that they run.")
    for reason, names in left.about.items():
        between = "\n  " if any(": " in name for name in names) else ", "
        writer.comment(f"\n{reason}:\n  " + between.join(names))


def masked(name: str, value: str) -> str:
    """Return a flag with its value. The value of a secret is hidden."""
    if not value:
        return name
    if _SECRET.search(name.casefold()):
        return f"{name} …"
    short = value if len(value) <= 60 else value[:59] + "…"
    return f"{name} {short}"

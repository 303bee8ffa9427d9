"""The reference page of job files and cluster files, made from the declared keys."""

from __future__ import annotations

from collections.abc import Iterator

from roost.config import keys
from roost.source.keys import Key, Section
from roost.topology.keys import ACCELERATORS, CLUSTER_FILE, NODE_GROUP

__all__ = ["job_file_page"]

_INTRODUCTION = """\
# Job files and cluster files: all keys

`make snapshots` writes this page from the declarations that also read the files, complete their keys in
[editors](../start/editors.md#complete-and-check-keys-in-an-editor) and suggest a key for a mistyped one.

A job file needs one section, `cluster`. Sections with other names are the job's own: Roost reads a few values of some of
them, which are listed below. A list with a single entry may be written without the list. Where a key is not required,
`null` counts as missing.
"""


def job_file_page() -> str:
    """Return the page as Markdown."""
    job = dict.fromkeys([keys.JOB, keys.CLUSTER, keys.COMPONENT, *_sections(keys.LAYOUT), *_sections(NODE_GROUP)])
    job |= dict.fromkeys(_sections(keys.JOB))
    cluster = dict.fromkeys([*_sections(CLUSTER_FILE), ACCELERATORS])
    both = [*job, *(section for section in cluster if section not in job)]
    return "\n".join([_INTRODUCTION, *(_table(section) for section in both)])


def _sections(section: Section) -> Iterator[Section]:
    """Yield a section and those under its keys."""
    yield section
    for key in section.keys:
        if key.kind.section is not None:
            yield from _sections(key.kind.section)


def _table(section: Section) -> str:
    lines = [f"## {section.title}", "", section.about, ""]
    if section.is_open and not section.is_own:
        lines += ["Other keys are allowed.", ""]
    lines += ["| key | value | default | meaning | example |", "|---|---|---|---|---|"]
    lines += map(_row, section.keys)
    return "\n".join(lines) + "\n"


def _row(key: Key[object]) -> str:
    default = "required" if key.required else key.default_text or "none"
    cells = [f"`{key.name}`", key.kind.words, default, key.about, f"`{key.line}`"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

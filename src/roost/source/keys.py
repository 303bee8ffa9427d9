"""Declarations of the keys of a mapping.

Each key of a job file or a cluster file is declared once, as a :class:`Key` of a :class:`Section`: its name, the kind of
its value, its default, its meaning and an example. The readers, the JSON Schema, the suggestions for mistyped keys and
the reference page all use these declarations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from roost.source.fields import Fields

if TYPE_CHECKING:
    from roost.errors import Finding
    from roost.source.tree import Tree

__all__ = [
    "TEXT_SCHEMA",
    "Key",
    "Kind",
    "Schema",
    "Section",
    "choice",
    "entries",
    "form",
    "integer",
    "integer_or",
    "nested",
    "number",
    "program",
    "switch",
    "text",
]

Schema = dict[str, Any]
"""A JSON Schema, or a part of one."""

T = TypeVar("T")

TEXT_SCHEMA: Schema = {"type": ["string", "number"], "pattern": r"\S"}
"""A text that is not blank; a number counts as the text that was written."""

_PROGRAM = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, eq=False)  # compared by identity
class Kind(Generic[T]):
    """What the value of a key may be, and how it is read.

    Attributes:
        read: Returns the value of a key of a mapping; a wrong value adds a finding and counts as missing.
        form: JSON Schema of the value, without ``null``; empty if ``section`` describes it.
        words: The kind in words, for the reference page.
        default: The default of the kind, as it is written in YAML; empty if there is none.
        section: The mapping that the value is, or that the entries of a list are.
        is_list: Whether the value is a list of such mappings. A single mapping stands for a list of one.
        reference: Name of the section under ``$defs`` of the JSON Schema; empty if it stands where it is used.
    """

    read: Callable[[Fields, str], T]
    form: Schema
    words: str
    default: str = ""
    section: Section | None = None
    is_list: bool = False
    reference: str = ""

    def schema(self) -> Schema:
        """Return the JSON Schema of the value, without ``null``."""
        if self.section is None:
            return self.form
        item = {"$ref": f"#/$defs/{self.reference}"} if self.reference else self.section.schema()
        return {"anyOf": [{"type": "array", "items": item}, item]} if self.is_list else item


def integer(minimum: int) -> Kind[int | None]:
    """A whole number from a minimum up; ``None`` if missing."""
    schema = {"type": "integer", "minimum": minimum}
    return Kind(lambda fields, name: fields.integer(name, minimum), schema, f"whole number, {minimum} or more")


def integer_or(default: int, minimum: int) -> Kind[int]:
    """A whole number from a minimum up, with a default."""

    def read(fields: Fields, name: str) -> int:
        value = fields.integer(name, minimum)
        return default if value is None else value

    schema = {"type": "integer", "minimum": minimum}
    return Kind(read, schema, f"whole number, {minimum} or more", str(default))


def number(maximum: float = math.inf) -> Kind[float | None]:
    """A number above 0, up to a maximum; ``None`` if missing."""
    schema: Schema = {"type": "number", "exclusiveMinimum": 0}
    words = "number above 0"
    if maximum != math.inf:
        schema["maximum"] = maximum
        words += f", at most {maximum:g}"
    return Kind(lambda fields, name: fields.number(name, maximum), schema, words)


def switch() -> Kind[bool]:
    """``true`` or ``false``; ``false`` if missing."""
    return Kind(lambda fields, name: fields.boolean(name), {"type": "boolean"}, "`true` or `false`", "false")


def text(schema: Schema = TEXT_SCHEMA, words: str = "text") -> Kind[str | None]:
    """A text that is not blank; ``None`` if missing. The schema may limit the texts."""
    return Kind(lambda fields, name: fields.text(name), schema, words)


def choice(*values: str) -> Kind[str]:
    """One of several words; the empty text if missing."""

    def read(fields: Fields, name: str) -> str:
        tree = fields.tree.get(name)
        if tree is None or tree.value is None:
            return ""
        if tree.value not in values:
            fields.wrong(tree, f"{name} is one of " + ", ".join(values))
            return ""
        return str(tree.value)

    return Kind(read, {"type": "string", "enum": list(values)}, ", ".join(f"`{value}`" for value in values))


def program() -> Kind[str]:
    """A function or a class, written ``module:Name``; the empty text if missing."""

    def read(fields: Fields, name: str) -> str:
        found = fields.text(name)
        if found is not None and not _PROGRAM.match(found):
            fields.wrong(fields.tree.value[name], f"{name} is written module:Name")
            return ""
        return found or ""

    pattern = "^" + _PROGRAM.pattern.removesuffix(r"\Z") + "$"
    return Kind(read, {"type": "string", "pattern": pattern}, "`module:Name`")


def form(schema: Schema, words: str) -> Kind[Tree | None]:
    """A value that the reader of its section looks at by itself; only its form is declared."""
    return Kind(lambda fields, name: fields.tree.get(name), schema, words)


def nested(section: Section, reference: str = "") -> Kind[Tree | None]:
    """A mapping with declared keys."""
    return Kind(lambda fields, name: fields.tree.get(name), {}, section.link, section=section, reference=reference)


def entries(section: Section) -> Kind[list[Tree]]:
    """A list of mappings with declared keys; empty if missing."""
    return Kind(lambda fields, name: fields.entries(name), {}, f"list: {section.link}", section=section, is_list=True)


@dataclass(frozen=True, eq=False)  # compared by identity
class Key(Generic[T]):
    """One key of a mapping.

    Attributes:
        name: The key as written.
        kind: What its value may be.
        about: What it means: one or two sentences.
        example: A value, as it is written in YAML.
        default: What counts where the key is missing, in words; empty where the kind has a default of its own, or there
            is none.
        required: Whether the key must be there.
        can_be_null: Whether ``null`` counts as missing; never for a required key.
    """

    name: str
    kind: Kind[T]
    about: str
    example: str
    default: str = ""
    required: bool = False
    can_be_null: bool = True

    @property
    def line(self) -> str:
        """The key with its example, ready to paste."""
        return f"{self.name}: {self.example}"

    @property
    def default_text(self) -> str:
        """The default for people; empty where there is none."""
        return self.default or self.kind.default

    def schema(self) -> Schema:
        """Return the JSON Schema of the value, with its description."""
        schema = self.kind.schema()
        if self.can_be_null and not self.required:
            schema = _or_null(schema)
        default = f" Default: {self.default_text}." if self.default_text not in ("", "false") else ""
        return {**schema, "description": f"{self.about}{default}"}


@dataclass(frozen=True, eq=False)  # compared by identity
class Section:
    """A mapping with declared keys.

    Attributes:
        what: The mapping in error messages, such as ``"a node group"``.
        about: What it is for: one sentence.
        keys: Its keys, in the order in which they are read.
        title: Its heading on the reference page.
        is_open: Whether it may hold other keys too.
        is_own: Whether the section is the job's own, so that anything may stand in its place.
        pattern: More of its JSON Schema, such as conditions between keys.
    """

    what: str
    about: str
    keys: tuple[Key[Any], ...]
    title: str
    is_open: bool = False
    is_own: bool = False
    pattern: Schema = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its keys."""
        return tuple(key.name for key in self.keys)

    @property
    def link(self) -> str:
        """Its title as a link on the reference page."""
        anchor = re.sub(r"[^a-z0-9 _-]", "", self.title.lower()).replace(" ", "-")
        return f"[{self.title}](#{anchor})"

    def open(self, tree: Tree, findings: list[Finding], letter: str = "C", *, what: str = "") -> Fields:
        """Return a reader of a mapping, after complaining about unknown keys.

        Args:
            tree: The mapping; anything else adds a finding.
            findings: Where problems go.
            letter: First letter of the error codes: ``C`` for job files, ``T`` for cluster files.
            what: The mapping in error messages, instead of the section's own words.
        """
        fields = Fields(tree, findings, what or self.what, letter)
        if not self.is_open:
            fields.only(self.names)
        return fields

    def schema(self) -> Schema:
        """Return the JSON Schema of the mapping."""
        schema: Schema = {"description": self.about} if self.is_own else {"type": "object", "description": self.about}
        schema["properties"] = {key.name: key.schema() for key in self.keys}
        if not self.is_open:
            schema["additionalProperties"] = False
        required = [key.name for key in self.keys if key.required]
        return {**schema, **({"required": required} if required else {}), **self.pattern}


def _or_null(schema: Schema) -> Schema:
    """Return the schema of the same values and ``null``."""
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    choices = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, **choices, "type": [*kinds, "null"]}

"""``Tree``: a configuration value with its place in the file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roost.errors import ConfigError, Finding, Fix, Mark, Place

MAX_DEPTH = 64
"""Number of levels that mappings and lists may nest."""

MAX_VALUES = 1_000_000
"""Number of values that a configuration may hold; values shared by aliases count each time."""


class Document:
    """A source text, with its name."""

    __slots__ = ("_lines", "name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self._lines: list[str] | None = None

    def line(self, number: int) -> str:
        """Return the text of a line, counted from 1; empty if there is no such line."""
        if self._lines is None:
            self._lines = self.text.splitlines()
        return self._lines[number - 1] if 0 < number <= len(self._lines) else ""


class Unresolved:
    """A placeholder for a value that could not be resolved, with the reason."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Tree:
    """A value of a configuration, and its place.

    Attributes:
        value: A dict of trees, a list of trees, or a scalar.
        key: Its key in the parent; the index as text in a list; empty for the root.
        keys: For a mapping: the keys themselves as trees, for their places.
        document: The source text; ``None`` if the value did not come from a text.
        line: Line in the document, from 1; 0 if there is none.
        column: Column, from 1.
        inner: Column of the scalar's first character, from 1, inside quotes; 0 if the line does not hold the text
            as it is, because of escapes or several lines.
    """

    __slots__ = ("_parent", "_text", "column", "document", "inner", "key", "keys", "line", "value")

    def __init__(
        self,
        value: Any,
        key: str = "",
        parent: Tree | None = None,
        text: str | None = None,
        document: Document | None = None,
        line: int = 0,
        column: int = 0,
        inner: int = 0,
    ) -> None:
        self.value = value
        self.key = key
        self._parent = parent
        self.document = document
        self.line = line
        self.column = column
        self.inner = inner
        self.keys: dict[str, Tree] = {}
        self._text = text

    @property
    def path(self) -> str:
        """Dotted keys from the root. Computed on demand: few values appear in errors."""
        keys = []
        tree: Tree | None = self
        while tree is not None:
            keys.append(tree.key if len(tree.key) <= 100 else tree.key[:99] + "…")
            tree = tree._parent
        return ".".join(key for key in reversed(keys) if key)

    @property
    def text(self) -> str:
        """The scalar as it was written, or as Python prints it if it did not come from a text."""
        if self._text is None:
            self._text = _text_of(self.value)
        return self._text

    @property
    def has_source(self) -> bool:
        """Whether :attr:`text` is the source text, not a value converted by another loader."""
        return self.document is not None or isinstance(self.value, str)

    @property
    def is_mapping(self) -> bool:
        """Whether this is a mapping."""
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        """Whether this is a list."""
        return isinstance(self.value, list)

    @property
    def is_scalar(self) -> bool:
        """Whether this is neither a mapping nor a list."""
        return not isinstance(self.value, (dict, list))

    @property
    def kind(self) -> str:
        """The value in error messages: ``a list``, ``nothing (null)``, ``the text 'x'``, ``7``."""
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        if self.value is None:
            return "nothing (null)"
        if isinstance(self.value, Unresolved):
            return "a value that could not be resolved"
        text = self.text if len(self.text) <= 40 else self.text[:39] + "…"
        return f"the text {text!r}" if isinstance(self.value, str) else text

    def get(self, key: str) -> Tree | None:
        """Return the value under a key; ``None`` if this is not a mapping or has no such key."""
        return self.value.get(key) if isinstance(self.value, dict) else None

    def find(self, dotted: str) -> Tree | None:
        """Return the value at a dotted path below this one; ``None`` if there is none."""
        tree: Tree | None = self
        for key in dotted.split("."):
            tree = tree.get(key) if tree is not None else None
        return tree

    def items(self) -> list[tuple[str, Tree]]:
        """Return keys and values of a mapping; an empty list for anything else."""
        return list(self.value.items()) if isinstance(self.value, dict) else []

    def place(self, offset: int = 0) -> Place:
        """Return the place of this value, or of a character inside its text."""
        if self.document is None:
            return Place(self.path, column=offset + 1, source=self.text) if self.is_scalar else Place(self.path)
        column = self.inner + offset if self.inner else self.column
        return Place(self.path, self.document.name, self.line, column, self.document.line(self.line))

    def mark(self, offset: int = 0, length: int | None = None, text: str = "", primary: bool = True) -> Mark:
        """Return a mark under this value, or under a part of its text."""
        first = 1 if self.document is None else self.inner
        if not first or not self.is_scalar:
            return Mark(max(1, self.column), 1, text, primary)
        length = len(self.text) - offset if length is None else length
        return Mark(first + offset, max(1, length), text, primary)

    def standing_for(self, value: Any, text: str) -> Tree:
        """Return another value, derived from this one, with the same place."""
        return Tree(value, self.key, self._parent, text, self.document, self.line, self.column)

    def replacing(self, keys: Sequence[str], value: Tree) -> Tree:
        """Return this tree with another value at a path of keys; missing mappings on the way are added.

        Nothing is changed in place: values shared by aliases stay the same elsewhere.

        Raises:
            LookupError: The path leads through a scalar, or past the end of a list.
        """
        if not keys:
            value.key, value._parent = self.key, self._parent
            return value
        key, rest = keys[0], keys[1:]
        tree = Tree(self.value, self.key, self._parent, self._text, self.document, self.line, self.column)
        tree.keys = self.keys
        if self.is_list:
            if not key.isdecimal() or int(key) >= len(self.value):
                raise LookupError(f"{self.path} is a list of {len(self.value)}, and has no item {key!r}")
            tree.value = [*self.value]
            tree.value[int(key)] = self.value[int(key)].replacing(rest, value)
            return tree
        if not self.is_mapping and self.value is not None:
            raise LookupError(f"{self.path} is {self.kind}, and has nothing under it")
        old = self.get(key) or Tree({} if rest else None, key, self, None, value.document)
        tree.value = {**(self.value or {}), key: old.replacing(rest, value)}
        tree.keys = {key: Tree(key, key, tree, None, value.document), **self.keys}
        return tree

    def plain(self) -> Any:
        """Return this value as plain Python data."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


class Config(Mapping[str, Any]):
    """A loaded configuration: a mapping with attribute access that keeps line and column.

    ``config["cluster"]["num_nodes"]`` and ``config.cluster.num_nodes`` are the same. Errors about a job that is passed
    on as a ``Config`` point into its file.
    """

    __slots__ = ("_tree",)

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def __getitem__(self, key: str) -> Any:
        return _open(self._tree.value[key])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._tree.value:
            raise AttributeError(f"no key {name!r} in {self._tree.path or 'this configuration'}")
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree.value)

    def __len__(self) -> int:
        return len(self._tree.value)

    def __repr__(self) -> str:
        return f"Config({self.to_dict()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_from_plain, (self.to_dict(),))

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain dicts, lists and scalars."""
        plain: dict[str, Any] = self._tree.plain()
        return plain


def _from_plain(plain: dict[str, Any]) -> Config:
    return Config(as_tree(plain))


def _open(tree: Tree) -> Any:
    if tree.is_mapping:
        return Config(tree)
    if tree.is_list:
        return [_open(child) for child in tree.value]
    return tree.value


def load_tree(path: str | os.PathLike[str]) -> Tree:
    """Read a YAML file.

    Raises:
        ConfigError: With every problem of the file that can be seen at once.
    """
    # PyYAML takes longer to import than all of this package, and only files need it.
    from roost.source.yaml import read_file

    return read_file(os.fspath(path))


def as_tree(config: Any) -> Tree:
    """Return the tree of a configuration: a ``Config``, a mapping or a ``DictConfig``.

    Raises:
        ConfigError: The argument is none of these, nests too deep, or contains itself.
    """
    if isinstance(config, Tree):
        return config
    if isinstance(config, Config):
        return config._tree
    if isinstance(config, (str, os.PathLike)):
        raise ConfigError([_not_a_config(f"a path or text ({str(config)[:60]!r})")])
    if not isinstance(config, Mapping) and not _is_omegaconf(config):
        raise ConfigError([_not_a_config(f"a {type(config).__name__}")])
    return _Grower().grow(config, "", None, 0)[0]


def _not_a_config(what: str) -> Finding:
    return Finding(
        "C203",
        f"a configuration is a mapping, not {what}",
        fixes=(Fix("read it from a file first", 'config = roost.load_config("job.yaml")'),),
    )


def _is_omegaconf(value: Any) -> bool:
    """Return whether this is an OmegaConf container, without importing OmegaConf."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig))


class _Grower:
    """Convert plain data into trees. Shared data is converted once, and counted each time."""

    def __init__(self) -> None:
        self._grown: dict[int, tuple[Tree, int]] = {}
        self._alive: list[Any] = []  # keeps the objects alive: Python reuses the id of an object that is gone

    def grow(self, value: Any, key: str, parent: Tree | None, depth: int) -> tuple[Tree, int]:
        """Return a tree, and the number of values that it holds."""
        if depth > MAX_DEPTH:
            message = f"the configuration nests deeper than {MAX_DEPTH} levels, or contains itself"
            raise ConfigError([Finding("C108", message, Place(parent.path[:200] if parent else ""))])
        if isinstance(value, Config):
            return value._tree, 1
        is_omegaconf = _is_omegaconf(value)
        is_mapping = not is_omegaconf and isinstance(value, Mapping)
        if not is_omegaconf and not is_mapping and not isinstance(value, (list, tuple, range)):
            return Tree(value, key, parent), 1
        known = self._grown.get(id(value))
        if known is not None:
            return known
        if is_mapping:
            grown = self._mapping(value.items(), key, parent, depth)
        elif is_omegaconf:
            grown = self._omegaconf(value, key, parent, depth)
        else:
            grown = self._list(value, key, parent, depth)
        if grown[1] > MAX_VALUES:
            raise ConfigError([Finding("C108", f"the configuration holds more than {MAX_VALUES:,} values")])
        self._grown[id(value)] = grown
        self._alive.append(value)
        return grown

    def _mapping(self, items: Any, key: str, parent: Tree | None, depth: int) -> tuple[Tree, int]:
        tree = Tree({}, key, parent)
        total = 1
        for name, child in items:
            text = name if isinstance(name, str) else _text_of(name)
            if text in tree.value:
                raise ConfigError([Finding("C107", f"two keys are both written {text[:60]!r}", tree.place())])
            tree.value[text], size = self.grow(child, text, tree, depth + 1)
            tree.keys[text] = Tree(text, text, tree)
            total += size
        return tree, total

    def _list(self, items: Any, key: str, parent: Tree | None, depth: int) -> tuple[Tree, int]:
        if len(items) > MAX_VALUES:
            raise ConfigError([Finding("C108", f"the configuration holds more than {MAX_VALUES:,} values")])
        tree = Tree([], key, parent)
        total = 1
        for index, child in enumerate(items):
            grown, size = self.grow(child, str(index), tree, depth + 1)
            tree.value.append(grown)
            total += size
        return tree, total

    def _omegaconf(self, value: Any, key: str, parent: Tree | None, depth: int) -> tuple[Tree, int]:
        """Resolve interpolations one by one: one that fails matters only if its value is read."""
        is_list = hasattr(value, "append")
        keys = range(len(value)) if is_list else list(value.keys())
        items = []
        for name in keys:
            try:
                items.append((name, value[name]))
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                items.append((name, Unresolved(reason)))
        if is_list:
            return self._list([child for _, child in items], key, parent, depth)
        return self._mapping(items, key, parent, depth)


def _text_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()  # as YAML writes them
    if isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to print some of these
        return f"a number of {value.bit_length()} bits"
    try:
        return str(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"

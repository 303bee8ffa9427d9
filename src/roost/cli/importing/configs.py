"""Read a Hydra configuration of another program, without Hydra."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from roost.cli.importing.parts import complain, masked
from roost.cli.inputs import UsageError
from roost.errors import ConfigError, Finding
from roost.source import Tree, load_tree

__all__ = ["Settings"]

_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*\}\Z")
_SELECT = re.compile(r"\$\{\s*oc\.select:\s*([A-Za-z_][\w.]*)\s*(?:,(.*))?\}\Z", re.DOTALL)
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env:\s*(\w+)\s*(?:,(.*))?\}\Z", re.DOTALL)
_OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w.@/-]*)=(.*)\Z", re.DOTALL)
_HYDRAS = ("defaults", "hydra")


class Settings:
    """Values by dotted path, with a record of the values that were read.

    References to other keys (``${trainer.nnodes}``, ``${oc.select:…}``, ``${oc.env:…,default}``) are
    resolved when a value is read. A reference that cannot be resolved is an error only then.
    """

    def __init__(self, tree: Tree, program: Sequence[str] = (), removed: Sequence[str] = ()) -> None:
        self.tree = tree
        self.program = tuple(program)
        self.removed = tuple(removed)
        self.findings: list[Finding] = []
        self.used: set[str] = set()
        self.assumed: dict[str, Any] = {}

    @staticmethod
    def read(words: Sequence[str]) -> Settings:
        """Return the settings of a command line: a file, ``key=value`` overrides, and optionally a program before them.

        Raises:
            UsageError: If a file or an override cannot be read.
        """
        from roost.source.yaml import read_value

        words = list(words)
        path = next((word for word in words if word.endswith((".yaml", ".yml")) and "=" not in word), None)
        tree = Tree({})
        if path is not None:
            words.remove(path)
            try:
                tree = load_tree(path)
            except ConfigError as error:
                if "C101" in error.codes:
                    raise UsageError(error.findings) from error
                raise
        program: list[str] = []
        removed: list[str] = []
        for word in words:
            match = _OVERRIDE.match(word)
            if match is None or word.startswith("-"):
                program.append(word)
                continue
            keys = match[2].split(".")
            try:
                value = read_value(match[3], word if len(word) <= 80 else word[:79] + "…")
            except ConfigError:  # Hydra's grammar is not YAML; such a value is kept as text
                value = Tree(match[3], text=match[3])
            if match[1] == "~":
                removed.append(match[2])
                continue
            try:
                tree = tree.replacing(keys, value)
            except LookupError as error:
                raise UsageError([complain("U140", f"{word[:80]}: {error.args[0]}")]) from error
        return Settings(tree, program, removed)

    # Reading -------------------------------------------------------------------------------

    def at(self, path: str) -> Tree | None:
        """Return the value at a path, with references resolved; ``None`` if it is missing or null."""
        self.used.add(path)
        return self._follow(self.tree.find(path), path, 0)

    def has(self, path: str) -> bool:
        """Return whether a path has a value other than null."""
        tree = self.tree.find(path)
        return tree is not None and tree.value is not None

    def integer(self, path: str, default: int, minimum: int = 1) -> int:
        """Return an integer; the default if it is missing or invalid."""
        tree = self.at(path)
        if tree is None:
            self.assumed[path] = default
            return default
        value = tree.value
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= 2**24:
            message = f"{path} must be an integer from {minimum} up, not {tree.kind}"
            self.findings.append(complain("U140", message, tree))
            return default
        return value

    def boolean(self, path: str, default: bool = False) -> bool:
        """Return a boolean; the default if it is missing or invalid."""
        tree = self.at(path)
        if tree is None:
            return default
        if not isinstance(tree.value, bool):
            self.findings.append(complain("U140", f"{path} must be true or false, not {tree.kind}", tree))
            return default
        return tree.value

    def text(self, path: str, default: str = "") -> str:
        """Return a text; the default if it is missing or not a scalar."""
        tree = self.at(path)
        return default if tree is None or not tree.is_scalar else tree.text

    def plain(self, tree: Tree, path: str) -> Any:
        """Return any value as plain data, with references resolved. Scalars keep the text of the file."""
        if tree.is_mapping:
            return {key: self.plain(child, f"{path}.{key}") for key, child in tree.items()}
        if tree.is_list:
            return [self.plain(child, f"{path}.{index}") for index, child in enumerate(tree.value)]
        found = self._follow(tree, path, 0)
        return None if found is None else found.plain()

    def clash(self, message: str, path: str, *fixes: tuple[str, str]) -> None:
        """Record that values contradict each other (U141)."""
        self.findings.append(complain("U141", message, self.tree.find(path), fixes))

    def _follow(self, tree: Tree | None, path: str, depth: int) -> Tree | None:
        if tree is None or tree.value is None:
            return None
        text = tree.value if isinstance(tree.value, str) else ""
        if text == "???":
            self._unknown(tree, path, "has no value")
            return None
        if "${" not in text:
            return tree
        if depth < 10:
            if match := _REFERENCE.match(text):
                found = self._follow(self.tree.find(match[1]), path, depth + 1)
                if found is not None:
                    return found
            elif match := _SELECT.match(text):
                if self.has(match[1]):
                    return self._follow(self.tree.find(match[1]), path, depth + 1)
                return self._otherwise(tree, match[2])
            elif (match := _ENVIRONMENT.match(text)) and (match[1] in os.environ or match[2] is not None):
                return self._otherwise(tree, os.environ.get(match[1], match[2]))
        self._unknown(tree, path, f"is {text}, which cannot be resolved here")
        return None

    def _otherwise(self, tree: Tree, text: str | None) -> Tree | None:
        from roost.source.yaml import read_value

        value = read_value((text or "null").strip(), tree.text)
        return None if value.value is None else tree.standing_for(value.value, value.text)

    def _unknown(self, tree: Tree, path: str, what: str) -> None:
        fix = ("set it after the file", f"-- {path}=8")
        self.findings.append(complain("U142", f"{path} {what}", tree, [fix]))

    # Unread values -------------------------------------------------------------------------

    def leaves(self) -> Iterator[tuple[str, Tree]]:
        """Yield every value that is not a mapping, with its path."""
        yield from _leaves(self.tree, "")

    def left(self) -> dict[str, list[str]]:
        """Return the values that were not read, as dotted keys by section."""
        left: dict[str, list[str]] = {}
        for path, tree in self.leaves():
            section, _, rest = path.partition(".")
            if path in self.used or section in _HYDRAS or any(path.startswith(f"{used}.") for used in self.used):
                continue
            left.setdefault(section, []).append(rest or masked("=", tree.text)[:40])
        return left

    @property
    def composed_of(self) -> list[str]:
        """Files that Hydra would have merged. They are not read here."""
        tree = self.tree.get("defaults")
        names = []
        for item in tree.value if tree is not None and tree.is_list else []:
            shown = item.text if item.is_scalar else ", ".join(f"{key}: {value.text}" for key, value in item.items())
            if shown != "_self_" and not shown.startswith("override hydra"):
                names.append(shown)
        return names


def _leaves(tree: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    for key, child in tree.items():
        below = f"{path}.{key}" if path else key
        if child.is_mapping and child.value:
            yield from _leaves(child, below)
        else:
            yield below, child

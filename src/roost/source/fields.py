"""Read the keys of a mapping with types; all problems are collected, with place, rule and suggestion."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from roost.errors import Finding, Fix, did_you_mean
from roost.source.tree import Unresolved

if TYPE_CHECKING:
    from roost.source.keys import Key
    from roost.source.tree import Tree

T = TypeVar("T")

_LIMIT = 10**15
"""Numbers from here on are typing errors."""


class Fields:
    """A reader for the keys of one mapping; problems are added to a list of findings.

    Args:
        tree: The mapping.
        findings: Where problems go.
        what: The mapping in error messages: ``"a node group"``.
        letter: First letter of the error codes: ``C`` for job files, ``T`` for cluster files.

    Attributes:
        ok: Whether the tree is a mapping; if not, a problem has been added.
    """

    def __init__(self, tree: Tree, findings: list[Finding], what: str, letter: str = "C") -> None:
        self.tree = tree
        self.findings = findings
        self.what = what
        self.letter = letter
        self.ok = tree.is_mapping
        if not self.ok:
            self.complain("203", f"{what} is a mapping, not {tree.kind}", tree)

    def only(self, known: Iterable[str], ignored: Iterable[str] = ()) -> None:
        """Complain about every key that is neither known nor ignored, and suggest the nearest known key."""
        known = sorted(known)
        expected = {*known, *ignored}
        for key, _ in self.tree.items():
            if key in expected:
                continue
            near = did_you_mean(key, known)
            fixes = [Fix(f"did you mean {near!r}?", f"{near}:")] if near else []
            self.complain(
                "201",
                f"unknown key {key!r} in {self.what}",
                self.tree.keys[key],
                rule="known keys: " + ", ".join(known),
                fixes=fixes,
            )

    def read(self, key: Key[T]) -> T:
        """Return the value of a declared key; a wrong value adds a finding and counts as missing."""
        return key.kind.read(self, key.name)

    def read_all(self, keys: Iterable[Key[Any]]) -> dict[str, Any]:
        """Return the values of several keys by name, without those that are missing or wrong."""
        values = ((key.name, self.read(key)) for key in keys)
        return {name: value for name, value in values if value is not None}

    def require(self, key: Key[Any], example: str = "") -> Tree | None:
        """Return the value of a key as written; complain and return ``None`` if it is missing or null.

        Args:
            key: The key.
            example: A line to paste instead of the key's own example.
        """
        value = self.tree.get(key.name)
        if value is not None and value.value is not None:
            return value
        if self.ok:
            message = f"{self.what} needs {key.name!r}"
            self.complain("202", message, value or self.tree, fixes=[Fix("add it", example or key.line)])
        return None

    def integer(self, key: str, minimum: int, default: int | None = None) -> int | None:
        """Return a whole number, or the default if the key is missing, null or wrong."""
        tree = self.tree.get(key)
        if tree is None or tree.value is None:
            return default
        value = tree.value
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.wrong(tree, f"{key} is a whole number from {minimum} up")
            return default
        if value >= _LIMIT:
            self.wrong(tree, f"{key} is a whole number below {_LIMIT:,}")
            return default
        return value

    def number(self, key: str, maximum: float = math.inf, above: float = 0.0) -> float | None:
        """Return a number above ``above`` and up to ``maximum``; ``None`` if the key is missing, null or wrong."""
        tree = self.tree.get(key)
        if tree is None or tree.value is None:
            return None
        value = tree.value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not above < value <= maximum:
            upper = "" if maximum == math.inf else f" and at most {maximum:g}"
            self.wrong(tree, f"{key} is a number above {above:g}{upper}")
            return None
        if value >= _LIMIT:
            self.wrong(tree, f"{key} is a number below {_LIMIT:,}")
            return None
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        """Return a boolean, or the default if the key is missing, null or wrong."""
        tree = self.tree.get(key)
        if tree is None or tree.value is None:
            return default
        if not isinstance(tree.value, bool):
            self.wrong(tree, f"{key} is true or false")
            return default
        return tree.value

    def text(self, key: str) -> str | None:
        """Return a text; a number counts as the text that was written (``4090``)."""
        tree = self.tree.get(key)
        if tree is None or tree.value is None:
            return None
        return self.as_text(tree, key)

    def as_text(self, tree: Tree, what: str) -> str | None:
        """Return a scalar as text; complain and return ``None`` if it is not a text, or is blank or unresolved."""
        if not tree.is_scalar or tree.value is None or isinstance(tree.value, (bool, Unresolved)):
            self.wrong(tree, f"{what} is a text")
            return None
        if not tree.text.strip():
            self.wrong(tree, f"{what} is not empty")
            return None
        return tree.text.strip()

    def entries(self, key: str) -> list[Tree]:
        """Return the items of a list; a single mapping counts as a list of one, a missing key as an empty list."""
        tree = self.tree.get(key)
        if tree is None or tree.value is None:
            return []
        if tree.is_mapping:
            return [tree]
        if not tree.is_list:
            self.wrong(tree, f"{key} is a list")
            return []
        items: list[Tree] = tree.value
        return items

    def wrong(self, tree: Tree, rule: str) -> None:
        """Add a problem about a value that breaks a rule."""
        if isinstance(tree.value, Unresolved):
            self.complain("205", f"{tree.path} could not be resolved: {tree.value.reason}", tree)
            return
        self.complain("203", f"{rule}, not {tree.kind}", tree)

    def complain(
        self, number: str, message: str, at: Tree, rule: str = "", fixes: Iterable[Fix] = (), **more: Any
    ) -> None:
        """Add a problem that points at a value. ``number`` follows the letter in the error code."""
        code = self.letter + number
        marks = (at.mark(),)
        self.findings.append(Finding(code, message, at.place(), marks, rule=rule, fixes=tuple(fixes), **more))

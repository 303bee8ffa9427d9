"""Reading a command line that was meant for another program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from roost.cli.importing.parts import complain, masked
from roost.errors import Finding

__all__ = ["Flags"]

_NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?\Z", re.IGNORECASE)


@dataclass
class Flags:
    """Flags with their values; what nobody asks for is left over.

    Attributes:
        program: The words before the first flag, such as ``python3 train.py``.
        values: Flag (with dashes) → its values; the last one counts.
        findings: What is wrong with those that were asked for.
    """

    program: tuple[str, ...] = ()
    values: dict[str, list[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    repeated: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)

    @staticmethod
    def parse(words: Sequence[str]) -> Flags:
        """Flags of a command line: ``--flag``, ``--flag value …`` and ``--flag=value``."""
        flags = Flags()
        program: list[str] = []
        current: list[str] | None = None
        for word in words:
            if word.startswith("-") and len(word) > 1 and not _NUMBER.match(word):
                name, sign, value = word.partition("=")
                name = "--" + name.lstrip("-").replace("_", "-")
                if name in flags.values:
                    flags.repeated.add(name)
                current = flags.values[name] = [value] if sign else []
            elif current is None:
                program.append(word)
            else:
                current.append(word)
        flags.program = tuple(program)
        return flags

    def has(self, flag: str) -> bool:
        """Whether a flag is there; it counts as read."""
        self.used.add(flag)
        return flag in self.values

    def switch(self, flag: str) -> bool:
        """A flag without a value; one that has a value says true or false with it."""
        if not self.has(flag):
            return False
        values = self.values[flag]
        if values and values[-1].casefold() in ("false", "0", "no"):
            return False
        if values and values[-1].casefold() not in ("true", "1", "yes"):
            self._wrong(flag, "is a switch, and has no value")
        return True

    def integer(self, flag: str, default: int | None = None, minimum: int = 1) -> int | None:
        """A whole number; the default where the flag is missing or wrong."""
        if not self.has(flag):
            return default
        values = self.values[flag]
        if len(values) != 1 or not values[0].isdecimal() or not minimum <= int(values[0]) <= 2**24:
            self._wrong(flag, f"takes a whole number from {minimum} up")
            return default
        return int(values[0])

    def text(self, flag: str) -> str | None:
        """One word."""
        if not self.has(flag):
            return None
        if len(self.values[flag]) != 1:
            self._wrong(flag, "takes one value")
            return None
        return self.values[flag][0]

    def left(self) -> list[tuple[str, str]]:
        """What nobody asked for: flags, and how to show them."""
        return [(flag, masked(flag, " ".join(v))) for flag, v in self.values.items() if flag not in self.used]

    def _wrong(self, flag: str, rule: str) -> None:
        given = " ".join(self.values[flag]) or "nothing"
        self.findings.append(complain("U140", f"{flag} {rule}, not {given[:60]!r}"))

"""Read a command line of another program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from roost.cli.importing.parts import complain, masked
from roost.errors import Finding

__all__ = ["CommandFlags"]

_NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?\Z", re.IGNORECASE)


@dataclass
class CommandFlags:
    """The flags of a command line, with a record of the flags that were read.

    Attributes:
        program: The words before the first flag, such as ``python3 train.py``.
        values: Values by flag (with dashes); of a repeated flag, the last ones.
        findings: Problems of the flags that were read.
        repeated: CommandFlags that were given more than once.
        used: CommandFlags that were read.
    """

    program: tuple[str, ...] = ()
    values: dict[str, list[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    repeated: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)

    @staticmethod
    def parse(words: Sequence[str]) -> CommandFlags:
        """Return the flags of a command line: ``--flag``, ``--flag value …`` and ``--flag=value``."""
        flags = CommandFlags()
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
        """Return whether a flag is given, and record it as read."""
        self.used.add(flag)
        return flag in self.values

    def switch(self, flag: str) -> bool:
        """Return whether a switch is on. A value such as ``false`` turns it off."""
        if not self.has(flag):
            return False
        values = self.values[flag]
        if values and values[-1].casefold() in ("false", "0", "no"):
            return False
        if values and values[-1].casefold() not in ("true", "1", "yes"):
            self._wrong(flag, "is a switch, and has no value")
        return True

    def integer(self, flag: str, default: int | None = None, minimum: int = 1) -> int | None:
        """Return an integer; the default if the flag is missing or invalid."""
        if not self.has(flag):
            return default
        values = self.values[flag]
        if len(values) != 1 or not values[0].isdecimal() or not minimum <= int(values[0]) <= 2**24:
            self._wrong(flag, f"takes an integer from {minimum} up")
            return default
        return int(values[0])

    def text(self, flag: str) -> str | None:
        """Return the value of a flag; ``None`` if it is missing or invalid."""
        if not self.has(flag):
            return None
        if len(self.values[flag]) != 1:
            self._wrong(flag, "takes one value")
            return None
        return self.values[flag][0]

    def left(self) -> list[tuple[str, str]]:
        """Return the flags that were not read, each with its text for people."""
        return [(flag, masked(flag, " ".join(v))) for flag, v in self.values.items() if flag not in self.used]

    def _wrong(self, flag: str, rule: str) -> None:
        given = " ".join(self.values[flag]) or "nothing"
        self.findings.append(complain("U140", f"{flag} {rule}, not {given[:60]!r}"))

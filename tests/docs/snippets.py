"""Reads the code blocks of a Markdown page.

* ``python`` blocks of a page run one after another in one namespace.
* ``yaml`` and ``python`` blocks whose first line is ``# file: NAME`` are written to that file first.
* ``console`` blocks hold commands (``$ roost …``) and exactly what they print, stderr included;
  a line ``...`` stands for any lines.
* ``sh`` blocks hold set-up commands for people: each must be a make target or a pip install.

All of it happens in a folder of the page's own, beside a copy of ``examples``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# file: (\S+)\n")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    start: int
    end: int

    @property
    def file(self) -> str | None:
        match = _FILE.match(self.text)
        return match[1] if match else None


@dataclass(frozen=True)
class Command:
    text: str
    expected: str


def blocks_of(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    return [
        Block(m[1], m[2], source.count("\n", 0, m.start()) + 1, m.start(2), m.end(2)) for m in _BLOCK.finditer(source)
    ]


def commands_of(block: Block) -> list[Command]:
    commands = []
    for chunk in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = chunk.partition("\n")
        while command.endswith("\\"):
            more, _, expected = expected.partition("\n")
            command = f"{command}\n{more}"
        commands.append(Command(command, expected.rstrip("\n")))
    return commands


def matches(expected: str, printed: str) -> bool:
    pattern = "\n".join(
        "(?:.*\n)*?.*" if line.strip() == "..." else re.escape(line.rstrip()) for line in expected.splitlines()
    )
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())) is not None

"""One letter and one colour per component."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["COLOURS", "component_letters"]

_UPPERCASE = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CANDIDATES = _UPPERCASE + _UPPERCASE.lower() + "0123456789"

_COMMON_LETTERS = {
    "actor": "A",
    "agent": "G",
    "critic": "C",
    "env": "E",
    "inference": "I",
    "reward": "W",
    "rollout": "R",
}
"""Letters of the names that nearly every job has."""

COLOURS = (
    "bright_cyan", "bright_magenta", "bright_green", "bright_yellow", "bright_blue", "bright_red",
    "cyan", "magenta", "green", "yellow", "blue", "red",
)  # fmt: skip


def component_letters(names: Sequence[str]) -> dict[str, str]:
    """Return a letter for each component: the usual one, else the first free one of its name, else any free one.

    The same names always get the same letters.
    """
    letters = {name: _COMMON_LETTERS[name] for name in sorted(names) if name in _COMMON_LETTERS}
    taken = set(letters.values())
    for name in sorted(names):
        if name in letters:
            continue
        own = [c for c in name.upper() if c in _UPPERCASE]
        letter = next((c for c in (*own, *_CANDIDATES) if c not in taken), str(len(taken)))
        taken.add(letter)
        letters[name] = letter
    return letters

"""One letter and one colour per component."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase, digits

__all__ = ["COLOURS", "component_letters"]

_USUAL = {"actor": "A", "agent": "G", "critic": "C", "env": "E", "inference": "I", "reward": "W", "rollout": "R"}
"""What people expect of the names that nearly every job has."""

COLOURS = (
    "bright_cyan", "bright_magenta", "bright_green", "bright_yellow", "bright_blue", "bright_red",
    "cyan", "magenta", "green", "yellow", "blue", "red",
)  # fmt: skip


def component_letters(names: Sequence[str]) -> dict[str, str]:
    """A letter per component: the usual one, else the first free one of its own name, or of all.

    The same names always get the same letters.
    """
    letters = {name: _USUAL[name] for name in sorted(names) if name in _USUAL}
    taken = set(letters.values())
    for name in sorted(names):
        if name in letters:
            continue
        own = [c for c in name.upper() if c in ascii_uppercase]
        candidates = [*own, *ascii_uppercase, *ascii_lowercase, *digits]
        letter = next((c for c in candidates if c not in taken), str(len(taken)))
        taken.add(letter)
        letters[name] = letter
    return letters

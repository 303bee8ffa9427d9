"""The task: the last digit of a sum, and a rule that judges an answer.

A prompt reads ``3 + 8 =``; the answer is ``1`` and then a stop token. There are 100 prompts and a step asks a part
of them, so what is learnt is this table: nothing is held out, and the mean reward says how much of it is known.

Chance: a new model takes all ``VOCAB`` tokens as about equally likely, and two have to be right: 1 in 169, a reward of
0.006. (The task uses the first ids of a model that knows more tokens, and its chance is so much smaller.) A model that has
learnt to write a digit and stop, and no more, gets 0.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

MODULUS = 10
"""Answers are sums modulo this; the digits are the tokens ``0`` to ``MODULUS - 1``."""

PLUS, EQUALS, STOP = MODULUS, MODULUS + 1, MODULUS + 2
VOCAB = MODULUS + 3
PROMPT_TOKENS = 4
OUTPUT_TOKENS = 2
TOKENS = PROMPT_TOKENS + OUTPUT_TOKENS
"""The longest sequence."""

CHANCE = VOCAB**-OUTPUT_TOKENS
"""The mean reward of tokens drawn blindly."""


@dataclass(frozen=True)
class Prompt:
    """A question and its right answer.

    Attributes:
        ids: The tokens of ``a + b =``.
        answer: The digit that is right.
    """

    ids: tuple[int, ...]
    answer: int


def prompts_for(seed: int, step: int, count: int) -> list[Prompt]:
    """The prompts of a step: the same ones for the same numbers, on every machine.

    No pair of digits comes twice before all have come once.
    """
    pairs = MODULUS * MODULUS
    drawn: list[int] = []
    for deal in range(-(-count // pairs)):
        drawn += sorted(range(pairs), key=lambda pair: _shuffled(seed, step, deal, pair))
    return [_prompt(*divmod(pair, MODULUS)) for pair in drawn[:count]]


def reward(prompt: Prompt, output_ids: Sequence[int]) -> float:
    """1.0 for the right digit and then the stop token; 0.0 for anything else."""
    return 1.0 if list(output_ids) == [prompt.answer, STOP] else 0.0


def text(ids: Sequence[int]) -> str:
    """Tokens for people, such as ``3 + 8 = 1 .``"""
    signs = {PLUS: "+", EQUALS: "=", STOP: "."}
    return " ".join(signs.get(token, str(token)) for token in ids)


def _prompt(a: int, b: int) -> Prompt:
    return Prompt(ids=(a, PLUS, b, EQUALS), answer=(a + b) % MODULUS)


def _shuffled(*numbers: int) -> bytes:
    return hashlib.sha256(repr(numbers).encode()).digest()

"""A model's loss on the end of a real text when all in front of it but the raw tail is sealed.

The text is a user's message; after other words the conversation goes on with its next tokens as the reply.
Only these are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from benchmarks.accuracy.chat import Template
from benchmarks.accuracy.text import LOSS_KINDS, Encode, piece_of

READ = "Read this.\n\n"
GO_ON = "Go on, word for word."
SCORED = 512
"""Tokens that are counted."""


@dataclass(frozen=True)
class LossSample:
    """One text.

    Attributes:
        tokens: of the whole prompt.
        first: position of the first one that is counted.
    """

    kind: str
    seed: int
    tokens: tuple[int, ...]
    first: int


def loss_sample(seed: int, length: int, encode: Encode, template: Template) -> LossSample:
    """Sample ``seed``: kinds in turn, ``length`` tokens in front of those that are counted."""
    kinds = list(LOSS_KINDS)
    kind = kinds[seed % len(kinds)]
    before = [*template.before, *encode(READ)]
    between = [*template.to_reply, *encode("I have read it."), *template.to_user]
    between += [*encode(GO_ON), *template.to_reply]
    room = length - len(before) - len(between)
    text = piece_of(kind, Random(f"loss/{length}/{seed}"), encode, room + SCORED)
    tokens = [*before, *text[:room], *between, *text[room:]]
    return LossSample(kind, seed, tuple(tokens), len(tokens) - SCORED)

"""The fixed texts that profiles are tried on: built-in ones with look-alike facts among their sentences.

    [ facts in the text, all of it sealed ][ window ][ text whose loss is taken ][ question, lead, answer ]

A passage is read once; each question is asked behind it as if the others had not been.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tangram.calibration.framing import Frame, encode
from tangram.calibration.lookalikes import Fact, lookalikes
from tangram.calibration.samples import CHARACTERS_PER_TOKEN, builtin_text
from tangram.config import TangramConfig
from tangram.errors import ConfigError

SEED = 20260606
SCORED = 192
"""Tokens of a passage whose loss is taken."""
QUESTION_ROOM = 96
"""Tokens for a question and its answer."""
CHUNKS = (2, 1)
"""Sealed chunks of a passage: as many as the model's length allows."""
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Asked:
    """A question behind a passage.

    Attributes:
        prompt: tokens of the question and of how its answer begins.
        answer: tokens of the code.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Passage:
    """One text.

    Attributes:
        first: position of the first token whose loss is taken; all but the window before it is sealed.
    """

    tokens: tuple[int, ...]
    first: int
    asked: tuple[Asked, ...]


def passages(frame: Frame, config: TangramConfig, room: int, count: int, facts: int) -> list[Passage]:
    """The same ones at every call for a tokenizer and a chunk size.

    Args:
        room: tokens that the model holds.

    Raises:
        ConfigError: it holds too few for anything to be sealed.
    """

    def tokens(text: str) -> list[int]:
        return encode(frame.tokenizer, text)

    beyond = config.window + SCORED
    sealed = next((n * config.chunk for n in CHUNKS if n * config.chunk + beyond + QUESTION_ROOM <= room), 0)
    if not sealed:
        least = config.chunk + beyond + QUESTION_ROOM
        raise ConfigError("MODEL", f"holds {room} tokens; trying a profile takes {least}")
    return [_passage(frame, tokens, sealed, sealed + beyond, number, facts) for number in range(count)]


def hash_of(every: Sequence[Passage]) -> str:
    """Of all that is read and asked: results can be compared between runs with the same one."""
    whole = [[one.tokens, [(q.prompt, q.answer) for q in one.asked]] for one in every]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


def _passage(frame: Frame, tokens: Encode, sealed: int, length: int, number: int, count: int) -> Passage:
    draw = Random(f"{SEED}/{number}")
    facts = lookalikes(draw, count)
    _, text = builtin_text(SEED, number, length * CHARACTERS_PER_TOKEN)
    hidden, rest = _hidden(tokens, text, draw.sample(facts, count), sealed - len(frame.before))
    read = [*frame.before, *hidden, *tokens(rest)][:length]
    if len(hidden) + len(frame.before) > sealed or len(read) < length:
        raise ConfigError("MODEL", f"has a tokenizer or a chat template that no text of {length} tokens fits")
    return Passage(tuple(read), length - SCORED, tuple(_asked(frame, tokens, fact) for fact in facts))


def _hidden(tokens: Encode, text: str, facts: Sequence[Fact], room: int) -> tuple[list[int], str]:
    """At most ``room`` tokens of the text with the facts evenly spread between its sentences and lines; and
    the text that follows."""
    said = [tokens(f" {fact.sentence}") for fact in facts]
    left = room - sum(map(len, said))
    sentences = re.split(r"(?<=[.?!\n])(?=\s)", text)
    read: list[int] = []
    placed = story = taken = 0
    for sentence in sentences:
        ids = tokens(sentence)
        if story + len(ids) > left:
            break
        read, story, taken = read + ids, story + len(ids), taken + 1
        while placed < len(said) and story >= left * (placed + 1) // (len(said) + 1):
            read, placed = read + said[placed], placed + 1
    read += [token for fact in said[placed:] for token in fact]
    return read, "".join(sentences[taken:])


def _asked(frame: Frame, tokens: Encode, fact: Fact) -> Asked:
    prompt = tokens(frame.between + fact.question + frame.after + fact.lead)
    return Asked(tuple(prompt), tuple(tokens(f" {fact.code}")))

"""Real texts: what facts are hidden in, and what a model's loss is taken on.

``prose.txt`` is an excerpt of the King James Bible of 1611 (Ruth, Esther, Jonah, Acts, Samuel), whose
copyright has expired. The other kinds are this project's own documents and sources, which no model has
seen in training.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
LOSS_KINDS: dict[str, tuple[str, ...]] = {
    "prose": ("benchmarks/accuracy/prose.txt",),
    "documents": ("README.md", "docs/*.md"),
    "code": ("tangram/*.py", "app/*.py", "db/*.py"),
}
Encode = Callable[[str], list[int]]


@cache
def real_text(kind: str) -> str:
    """All of one kind, files in the order of their names."""
    files = [path for pattern in LOSS_KINDS[kind] for path in sorted(ROOT.glob(pattern))]
    return "\n\n".join(path.read_text(encoding="utf-8").strip() for path in files)


def texts_hash() -> str:
    """Of all real texts: figures of loss can be compared between runs with the same hash only."""
    whole = "\0".join(real_text(kind) for kind in LOSS_KINDS)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


@cache
def sentences() -> tuple[str, ...]:
    """The prose in sentences, without line breaks."""
    return tuple(part for part in re.split(r"(?<=[.?!])\s+", real_text("prose")) if part)


@cache
def words() -> tuple[str, ...]:
    """Different lower-case words of the prose, of four to nine letters, in the order of the alphabet."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,9}\b", real_text("prose")))))


def prose_from(rng: Random) -> Iterator[str]:
    """Sentences without end, from a place that the seed chooses."""
    every = sentences()
    at = rng.randrange(len(every))
    while True:
        yield every[at % len(every)]
        at += 1


def prose_tokens(rng: Random, encode: Encode, count: int) -> list[int]:
    """Exactly so many tokens of prose, each sentence behind a space; the last one may be cut."""
    tokens: list[int] = []
    for sentence in prose_from(rng):
        if len(tokens) >= count:
            return tokens[:count]
        tokens += encode(f" {sentence}")
    raise AssertionError("prose has no end")


def piece_of(kind: str, rng: Random, encode: Encode, count: int) -> list[int]:
    """``count`` tokens of a real text, from the beginning of a line somewhere in it.

    Raises:
        ValueError: the text is shorter than that.
    """
    text = real_text(kind)
    room = len(text) - 8 * count  # more characters than any tokenizer needs
    starts = [0, *(match.end() for match in re.finditer(r"\n+", text[: max(0, room)]))]
    tokens = encode(text[rng.choice(starts) :][: 8 * count])[:count]
    if len(tokens) < count:
        raise ValueError(f"the {kind} have fewer than {count} tokens")
    return tokens

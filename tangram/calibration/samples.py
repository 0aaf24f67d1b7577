"""What a model reads while it is calibrated: built-in texts, or the user's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tangram.calibration.kinds import KINDS
from tangram.errors import ConfigError

CHARACTERS_PER_TOKEN = 8
"""More than any tokenizer needs, so that a text of so many is long enough at the first try."""
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Sample:
    """One context.

    Attributes:
        kind: of text, for people.
    """

    kind: str
    tokens: tuple[int, ...]

    @property
    def key(self) -> str:
        """A hash of the tokens: the same text in another tokenizer is another sample."""
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:32]


def hash_of(samples: Sequence[Sample]) -> str:
    """Of all samples, in their order."""
    return hashlib.sha256("".join(sample.key for sample in samples).encode()).hexdigest()[:32]


def builtin_text(seed: int, number: int, characters: int) -> tuple[str, str]:
    """The kind, and at least so many characters, of built-in text ``number``."""
    kind = list(KINDS)[number % len(KINDS)]
    passages, length = [], 0
    for passage in KINDS[kind](Random(f"{seed}/{number}")):
        passages.append(passage)
        length += len(passage) + 2
        if length >= characters:
            break
    return kind, "\n\n".join(passages)


def builtin(encode: Encode, count: int, length: int, seed: int) -> list[Sample]:
    """Built-in samples of exactly ``length`` tokens, the kinds in turn."""
    samples = []
    for number in range(count):
        characters = length * CHARACTERS_PER_TOKEN
        kind, text = builtin_text(seed, number, characters)
        tokens = encode(text)
        while len(tokens) < length:
            characters *= 2
            kind, text = builtin_text(seed, number, characters)
            tokens = encode(text)
        samples.append(Sample(kind, tuple(tokens[:length])))
    return samples


def from_file(path: Path, encode: Encode, count: int, length: int, least: int, seed: int) -> list[Sample]:
    """Samples from a JSONL file of objects with a ``text``, in an order by the seed.

    Args:
        count: at most so many.
        length: tokens to which longer texts are cut.
        least: tokens that a text must have.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError("data", f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("data", f"{path} is not UTF-8 text") from None
    texts = [(number, _text(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ConfigError("data", f"{path} is empty: one JSON object with a 'text' a line is wanted")
    Random(seed).shuffle(texts)
    samples = []
    for number, text in texts[:count]:
        tokens = encode(text)[:length]
        if len(tokens) < least:
            raise ConfigError(
                "data",
                f"{path}, line {number}: the text has {len(tokens)} tokens, at least {least} are needed",
            )
        samples.append(Sample(path.name, tuple(tokens)))
    return samples


def from_conversations(
    lines: Sequence[str], encode: Encode, count: int, length: int, least: int, seed: int
) -> list[Sample]:
    """Samples from conversations, one JSON object with a ``text`` a line; as :func:`from_file`, but those
    that are too short are left out: people cannot be asked to write longer ones.

    Raises:
        ConfigError: none is long enough.
    """
    texts = [str(json.loads(line)["text"]) for line in lines]
    Random(seed).shuffle(texts)
    samples: list[Sample] = []
    for text in texts:
        if len(samples) == count:
            break
        tokens = encode(text)[:length]
        if len(tokens) >= least:
            samples.append(Sample("conversations", tuple(tokens)))
    if not samples:
        raise ConfigError(
            "data", f"no conversation is long enough: at least {least} tokens of one person are needed"
        )
    return samples


def _text(path: Path, number: int, line: str) -> str:
    try:
        data = json.loads(line)
    except ValueError:
        raise ConfigError("data", f"{path}, line {number}: this is not JSON") from None
    text = data.get("text") if isinstance(data, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("data", f"{path}, line {number}: an object with a 'text' is wanted")
    return text

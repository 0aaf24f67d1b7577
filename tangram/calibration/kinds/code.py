"""Source code: small functions, queries, configurations and commands about made records."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from string import ascii_lowercase

from tangram.calibration.texts import blocks, words


def write(draw: Random) -> Iterator[str]:
    """Pieces of code, each in another shape than the one before."""
    patterns = blocks("code.txt")
    while True:
        for pattern in draw.sample(patterns, len(patterns)):
            rec, rec2 = draw.sample(words("records"), 2)
            verb, verb2 = draw.sample(words("verbs"), 2)
            field, field2 = draw.sample(words("fields"), 2)
            yield pattern.format(
                rec=rec,
                rec2=rec2,
                Rec=rec.capitalize(),
                verb=verb,
                verb2=verb2,
                Verb=verb.capitalize(),
                field=field,
                field2=field2,
                n=draw.randint(5, 500),
                big=draw.randint(1000, 99999),
                small=draw.randint(2, 30),
                port=draw.randint(3000, 9999),
                word="".join(draw.choices(ascii_lowercase, k=7)),
            )

"""Facts that must not be mixed up: many that look alike, with names and numbers, inside a story."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tangram.calibration.kinds import prose
from tangram.calibration.texts import sentences, words


def _fact(draw: Random) -> str:
    name, name2 = (f"{draw.choice(words('first'))} {draw.choice(words('last'))}" for _ in range(2))
    return draw.choice(sentences("facts")).format(
        name=name,
        name2=name2,
        place=draw.choice(words("places")),
        town=draw.choice(words("towns")),
        thing=draw.choice(words("things")),
        month=draw.choice(words("months")),
        street=draw.choice(words("streets")),
        code=draw.randint(10000, 99999),
        phone=f"0{draw.randint(100, 999)} {draw.randint(100000, 999999)}",
        price=draw.randint(20, 9000),
        day=draw.randint(4, 20),
        year=draw.randint(1850, 2020),
        small=draw.randint(1, 400),
    )


def write(draw: Random) -> Iterator[str]:
    """Paragraphs of a story with facts among their sentences, and a few facts in a list after each."""
    story = prose.write(draw)
    while True:
        parts = next(story).split(". ")
        for _ in range(draw.randint(1, 3)):
            parts.insert(draw.randint(1, len(parts) - 1), _fact(draw).rstrip("."))
        yield ". ".join(parts)
        yield "\n".join(_fact(draw) for _ in range(draw.randint(2, 5)))

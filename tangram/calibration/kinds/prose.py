"""Stories: paragraphs about a few people, things and places."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tangram.calibration.texts import sentences, words


def write(draw: Random) -> Iterator[str]:
    """Paragraphs of one long story; the people stay, things and places change."""
    first = draw.sample(words("first"), 4)
    people = [f"{first[0]} {draw.choice(words('last'))}", *first[1:]]
    town = draw.choice(words("towns"))
    while True:
        a, b, c = draw.sample(people, 3)
        values = {"a": a, "b": b, "c": c, "town": town, "month": draw.choice(words("months"))}
        for name, source in (
            ("thing", "things"),
            ("place", "places"),
            ("trade", "trades"),
            ("weather", "weather"),
        ):
            values[name], values[f"{name}2"] = draw.sample(words(source), 2)
        chosen = [
            draw.choice(sentences("openings")),
            *draw.sample(sentences("middles"), draw.randint(3, 6)),
            draw.choice(sentences("closings")),
        ]
        yield " ".join(
            sentence.format(day=draw.randint(4, 20), n=draw.randint(3, 90), **values) for sentence in chosen
        )

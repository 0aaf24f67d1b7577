"""A conversation of a user and an assistant: questions, figures, follow-ups, and things to remember."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tangram.calibration.texts import blocks, words


def write(draw: Random) -> Iterator[str]:
    """Turns, a question and its answer each."""
    turns = blocks("dialogue.txt")
    while True:
        for turn in draw.sample(turns, len(turns)):
            yield turn.format(**_values(draw))


def _values(draw: Random) -> dict[str, object]:
    a, b = draw.sample(words("first"), 2)
    thing, thing2 = draw.sample(words("things"), 2)
    n, cost = draw.randint(3, 40), draw.randint(60, 400)
    return {
        "a": a,
        "b": b,
        "thing": thing,
        "thing2": thing2,
        "n": n,
        "cost": cost,
        "half": cost // 2,
        "flour": 450 * n,
        "town": draw.choice(words("towns")),
        "place": draw.choice(words("places")),
        "trade": draw.choice(words("trades")),
        "month": draw.choice(words("months")),
        "food": draw.choice(words("foods")),
        "day": draw.randint(4, 20),
        "h": draw.randint(6, 22),
        "m": f"{draw.randrange(0, 60, 5):02d}",
        "code": f"{draw.choice('ABCDEFGH')}{draw.randint(1000, 9999)}",
    }

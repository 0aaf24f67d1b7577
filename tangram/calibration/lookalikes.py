"""Facts that differ in little, to ask a model about: what a cache that keeps too little loses first.

Without torch: the product asks its running engine about them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

PLACES = (
    "the archive",
    "the bakery",
    "the cellar",
    "the dairy",
    "the engine room",
    "the forge",
    "the garage",
    "the harbour",
)


@dataclass(frozen=True)
class Fact:
    """The code of a place, or of one of its doors."""

    place: str
    code: str

    @property
    def sentence(self) -> str:
        """As a text says it."""
        return f"The code of {self.place} is {self.code}."

    @property
    def question(self) -> str:
        """What is asked about it."""
        return f"What is the code of {self.place}? Answer with the number only."

    @property
    def lead(self) -> str:
        """How an answer begins, up to the number."""
        return f"The code of {self.place} is"


def lookalikes(draw: Random, count: int) -> list[Fact]:
    """At most 90 facts; those of more than eight share words. No two codes begin with the same two digits:
    models read numbers digit by digit, and go wrong with everything kept where several go on from what they
    have said."""
    places = list(PLACES[:count])
    if count > len(PLACES):
        numbered = [divmod(number, len(PLACES)) for number in range(count)]
        places = [f"door {door + 1} of {PLACES[place]}" for door, place in numbered]
    starts = draw.sample(range(10, 100), count)
    return [
        Fact(place, f"{start}{draw.randrange(100):02}") for place, start in zip(places, starts, strict=True)
    ]

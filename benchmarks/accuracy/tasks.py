"""Seeded generators of tasks in the manner of RULER: facts hidden in real prose, every one with look-alikes.

A generator returns the facts and the question; where they are put is :mod:`benchmarks.accuracy.samples`'s
matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from benchmarks.accuracy.chat import Question

COLOURS = ("red", "green", "blue", "yellow", "white", "black", "grey", "brown", "purple", "orange")
THINGS = ("locker", "gate", "cabinet", "garage", "cellar", "chest", "office", "workshop", "shed", "van")
MANY = 32
"""Facts of ``many_keys``. Names of its own, so that other tasks draw what they drew before."""
KINDS = (*COLOURS, "wooden", "iron", "round", "narrow", "little", "northern", "lower", "glass", "marble")
KINDS += ("silent", "heavy", "painted", "broken", "hidden", "private", "copper", "eastern", "hollow", "royal")
KINDS += ("spare", "rusty", "granite")
PLACES = (*THINGS, "storeroom", "pantry", "boathouse", "attic", "library", "stable", "kiosk", "bunker")
PLACES += ("tower", "studio", "archive", "barn", "vault", "lodge", "depot", "cottage", "hangar", "kennel")
PLACES += ("mill", "chapel", "pavilion", "terrace")
FIRST = ("Marlen", "Tobias", "Ingrid", "Rashid", "Noemi", "Casper", "Leila", "Anton", "Yusuf", "Petra")
LAST = (
    "Okafor",
    "Lindqvist",
    "Haruki",
    "Bellamy",
    "Castellan",
    "Dvorak",
    "Moreau",
    "Nakata",
    "Ruiz",
    "Varga",
)
TRADES = ("baker", "plumber", "lawyer", "pilot", "tailor", "nurse", "painter", "dentist", "farmer", "barber")
ANIMALS = ("parrot", "tortoise", "rabbit", "goat", "hamster", "ferret", "pony", "lizard", "spaniel", "canary")
TOWNS = ("Lisbon", "Oslo", "Dublin", "Vienna", "Prague", "Warsaw", "Athens", "Geneva", "Hamburg", "Seville")
SHORT, LONG = 20, 56
"""Tokens of answers of one value, and of several."""


@dataclass(frozen=True)
class Material:
    """What a task is made of.

    Attributes:
        facts: sentences to be hidden in the text; the first ``needles`` are those that are asked for.
        needles: how many.
        lead: how the answer begins.
        words: a text of its own, a list of words, instead of facts in prose.
    """

    facts: tuple[str, ...]
    needles: int
    ask: str
    lead: str
    question: Question
    words: bool = False


def numbers(rng: Random, count: int) -> list[str]:
    """Four-digit numbers of which no two begin with the same two digits: models read numbers digit by digit,
    and go wrong without any compression where several go on from what they have said."""
    return [f"{start}{rng.randrange(100):02}" for start in rng.sample(range(10, 100), count)]


def keys(rng: Random, colours: int, things: int) -> list[str]:
    """Names of things, each of which differs from others in one word only. The first is drawn too."""
    names = [f"{a} {b}" for a, b in product(rng.sample(COLOURS, colours), rng.sample(THINGS, things))]
    rng.shuffle(names)
    return names


def distinct_keys(
    rng: Random, count: int, kinds: Sequence[str] = COLOURS, things: Sequence[str] = THINGS
) -> list[str]:
    """Names that have no word in common."""
    drawn = rng.sample(kinds, count), rng.sample(things, count)
    return [f"{colour} {thing}" for colour, thing in zip(*drawn, strict=True)]


def _coded(rng: Random, names: list[str]) -> Material:
    values = numbers(rng, len(names))
    facts = [f"The code of the {name} is {value}." for name, value in zip(names, values, strict=True)]
    ask = f"What is the code of the {names[0]}? Answer with the number only."
    question = Question((values[0],), tuple(values[1:]), "first_number", SHORT)
    return Material(tuple(facts), 1, ask, f"The code of the {names[0]} is", question)


def single(rng: Random, length: int) -> Material:
    """One fact, and two of the same form about other things."""
    return _coded(rng, distinct_keys(rng, 3))


def multi_key(rng: Random, length: int) -> Material:
    """One of eight facts of the same form."""
    return _coded(rng, distinct_keys(rng, 8))


def many_keys(rng: Random, length: int) -> Material:
    """One of 32: a head that keeps the same share of every chunk as all others has no room for them."""
    return _coded(rng, distinct_keys(rng, MANY, KINDS, PLACES))


def near_keys(rng: Random, length: int) -> Material:
    """The same with names that share words: small models take one for another even without compression."""
    return _coded(rng, keys(rng, 2, 4))


def multi_value(rng: Random, length: int) -> Material:
    """All three values of one name; three other names have as many."""
    names = keys(rng, 2, 2)
    values = numbers(rng, 12)
    facts = [f"A code of the {names[i // 3]} is {value}." for i, value in enumerate(values)]
    ask = f"Name all three codes of the {names[0]}. Answer with the three numbers only."
    question = Question(tuple(values[:3]), tuple(values[3:]), "all_numbers", LONG)
    return Material(tuple(facts), 3, ask, f"The three codes of the {names[0]} are", question)


def tracking(rng: Random, length: int) -> Material:
    """The value of a variable through another one; two pairs look alike."""
    names = rng.sample("BCDFGHJKLMNPQRSTVWXZ", 6)
    values = numbers(rng, 3)
    facts = []
    for (a, b), value in zip(zip(names[::2], names[1::2], strict=True), values, strict=True):
        facts += [f"Variable {a} is {value}.", f"Variable {b} equals variable {a}."]
    ask = f"What number does the variable {names[1]} have? Answer with the number only."
    lead = f"Variable {names[1]} is"
    question = Question((values[0],), tuple(values[1:]), "first_number", SHORT)
    return Material(tuple(facts), 2, ask, lead, question)


def people(rng: Random, length: int) -> Material:
    """A question in other words about one of four people who share first names and last names."""
    everyone = [f"{a} {b}" for a, b in product(rng.sample(FIRST, 2), rng.sample(LAST, 2))]
    rng.shuffle(everyone)
    pools = {
        "town": (TOWNS, "{who} lives in {what}.", "Where is the home of {who}?", "{who} lives in"),
        "trade": (TRADES, "{who} works as a {what}.", "What is the profession of {who}?", "{who} works as a"),
        "animal": (ANIMALS, "{who} keeps a {what}.", "Which pet does {who} have?", "{who} keeps a"),
    }
    asked = rng.choice(sorted(pools))
    facts: list[str] = []
    for kind in sorted(pools, key=lambda kind: kind != asked):
        pool, says, ask, lead = pools[kind]
        values = rng.sample(pool, len(everyone))
        facts += [says.format(who=who, what=what) for who, what in zip(everyone, values, strict=True)]
        if kind == asked:
            question = Question((values[0],), tuple(values[1:]), "first_name", SHORT)
            asks, begins = (
                f"{ask.format(who=everyone[0])} Answer with one word.",
                lead.format(who=everyone[0]),
            )
    return Material(tuple(facts), 1, asks, begins, question)


def common_words(rng: Random, length: int) -> Material:
    """The five words that come most often in a list. No facts: the list is the text."""
    from benchmarks.accuracy.text import words

    drawn = tuple(rng.sample(words(), 5 + max(40, length // 8)))
    ask = "Which five words come most often in the list? Answer with the five words only."
    question = Question(drawn[:5], drawn[5:], "all_names", LONG)
    return Material((), 0, ask, "The five words that come most often are", question, words=True)


TASKS: dict[str, Callable[[Random, int], Material]] = {
    task.__name__: task
    for task in (single, multi_key, many_keys, near_keys, multi_value, tracking, people, common_words)
}

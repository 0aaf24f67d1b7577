"""Seeded generators of tasks in the manner of RULER: facts hidden in real prose, every one with look-alikes.

A generator returns the facts and the question; where they are put is :mod:`benchmarks.accuracy.samples`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from random import Random

from benchmarks.accuracy.chat import Question

COLOURS = ("red", "green", "blue", "yellow", "white", "black", "grey", "brown", "purple", "orange")
THINGS = ("locker", "gate", "cabinet", "garage", "cellar", "chest", "office", "workshop", "shed", "van")
PLACES = ("Marlow", "Tersk", "Oldham", "Brenta", "Kolding", "Vadso", "Lisburn", "Pernik", "Almelo", "Gouda")
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
        words: a text of its own, a list of words, instead of facts in prose.
    """

    facts: tuple[str, ...]
    needles: int
    ask: str
    question: Question
    words: bool = False


def numbers(rng: Random, count: int) -> list[str]:
    """Four-digit numbers of which no two begin with the same two digits: models read numbers digit by digit,
    and go wrong without any compression where several go on from what they have said."""
    return [f"{start}{rng.randrange(100):02}" for start in rng.sample(range(10, 100), count)]


def keys(rng: Random, colours: int, things: int, places: int) -> list[str]:
    """Names of things, each of which differs from others in one word only. The first is drawn too."""
    drawn = (rng.sample(COLOURS, colours), rng.sample(THINGS, things), rng.sample(PLACES, places))
    names = [f"{colour} {thing} in {place}" for colour, thing, place in product(*drawn)]
    rng.shuffle(names)
    return names


def _coded(rng: Random, names: list[str]) -> Material:
    values = numbers(rng, len(names))
    facts = [f"The code of the {name} is {value}." for name, value in zip(names, values, strict=True)]
    ask = f"What is the code of the {names[0]}? Answer with the number only."
    return Material(tuple(facts), 1, ask, Question((values[0],), tuple(values[1:]), "first_number", SHORT))


def single(rng: Random, length: int) -> Material:
    """One fact, and three whose names differ from it in one word each."""
    colours, things, places = (rng.sample(pool, 2) for pool in (COLOURS, THINGS, PLACES))
    names = [
        f"{colours[a]} {things[b]} in {places[c]}" for a, b, c in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    return _coded(rng, names)


def multi_key(rng: Random, length: int) -> Material:
    """One of 24 facts, three colours of two things in four places."""
    return _coded(rng, keys(rng, 3, 2, 4))


def multi_value(rng: Random, length: int) -> Material:
    """All four values of one name; three other names have as many."""
    names = keys(rng, 2, 1, 2)
    values = numbers(rng, 16)
    facts = [f"A code of the {names[i // 4]} is {value}." for i, value in enumerate(values)]
    ask = f"Name all four codes of the {names[0]}. Answer with the four numbers only."
    question = Question(tuple(values[:4]), tuple(values[4:]), "all_numbers", LONG)
    return Material(tuple(facts), 4, ask, question)


def tracking(rng: Random, length: int) -> Material:
    """The value of a variable through two others; three chains look alike."""
    letters = rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 12)
    names = [f"V{letter}{letter}" for letter in letters]
    values = numbers(rng, 4)
    facts = []
    for chain, value in enumerate(values):
        a, b, c = names[3 * chain : 3 * chain + 3]
        facts += [f"Variable {a} is {value}.", f"Variable {b} equals {a}.", f"Variable {c} equals {b}."]
    ask = f"What number does the variable {names[2]} have? Answer with the number only."
    return Material(tuple(facts), 3, ask, Question((values[0],), tuple(values[1:]), "first_number", SHORT))


def people(rng: Random, length: int) -> Material:
    """A question in other words about one of nine people who share first names and last names."""
    everyone = [f"{a} {b}" for a, b in product(rng.sample(FIRST, 3), rng.sample(LAST, 3))]
    rng.shuffle(everyone)
    pools = {
        "town": ("{who} lives in {what}.", "Where is the home of {who}? Answer with the town only.", TOWNS),
        "trade": (
            "{who} works as a {what}.",
            "What does {who} do for a living? Answer with one word.",
            TRADES,
        ),
        "animal": ("{who} keeps a {what}.", "Which animal does {who} have? Answer with one word.", ANIMALS),
    }
    asked = rng.choice(sorted(pools))
    facts: list[str] = []
    for kind in sorted(pools, key=lambda kind: kind != asked):
        says, _, pool = pools[kind]
        values = rng.sample(pool, len(everyone))
        facts += [says.format(who=who, what=what) for who, what in zip(everyone, values, strict=True)]
        if kind == asked:
            question = Question((values[0],), tuple(values[1:]), "first_name", SHORT)
    return Material(tuple(facts), 1, pools[asked][1].format(who=everyone[0]), question)


def common_words(rng: Random, length: int) -> Material:
    """The five words that come most often in a list. No facts: the list is the text."""
    from benchmarks.accuracy.text import words

    drawn = tuple(rng.sample(words(), 5 + max(40, length // 8)))
    ask = "Which five words come most often in the list? Answer with the five words only."
    question = Question(drawn[:5], drawn[5:], "all_names", LONG)
    return Material((), 0, ask, question, words=True)


TASKS: dict[str, Callable[[Random, int], Material]] = {
    task.__name__: task for task in (single, multi_key, multi_value, tracking, people, common_words)
}

"""Conversations of a task: the facts in the first turn, other talk, and the question when all of it is
sealed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from benchmarks.accuracy.chat import Conversation, Question, Template, Turn
from benchmarks.accuracy.tasks import SHORT, TASKS, Material, keys, numbers
from benchmarks.accuracy.text import Encode, prose_tokens

TALK = 704
"""Tokens of talk between a text and the question about it: more than the chunk and the window of the
default cache hold raw, so all of the text is sealed."""
READ = "Read this text and remember what it says.\n\n"
ASIDE = "Here is a passage from a book:"
AFTER = "\n\nTell me when you have read it."
DIALOGUE = "dialogue"
LAST_TURN, FIRST_QUESTION = 10, 5
"""Of a dialogue, counted from 1."""
COMMON = 0.4
"""The share of a word list that its most common words are."""


class Writer:
    """Makes conversations of one model's tokens."""

    def __init__(self, encode: Encode, template: Template) -> None:
        self.encode, self.template = encode, template

    def make(self, task: str, seed: int, length: int) -> Conversation:
        """Sample ``seed`` of a task, with ``length`` tokens in front of its last turn."""
        rng = Random(f"{task}/{length}/{seed}")
        if task == DIALOGUE:
            return Conversation(task, seed, length, self._dialogue(rng, length))
        material = TASKS[task](rng, length)
        aside = self._turn([*self.encode(ASIDE), *prose_tokens(rng, self.encode, TALK)], AFTER, "I have.")
        framing = self._turn(self.encode(READ), "", "I have read it.")
        room = length - len(self.template.before) - self._size(aside) - self._size(framing)
        text = self._words(rng, material, room) if material.words else self._hide(rng, material.facts, room)
        read = self._turn([*self.encode(READ), *text], "", "I have read it.")
        lead = tuple(self.encode(material.lead))
        ask = Turn(tuple(self.encode(material.ask)), question=material.question, lead=lead)
        return Conversation(task, seed, length, (read, aside, ask))

    def _turn(
        self,
        user: Sequence[int],
        more: str,
        reply: str | Sequence[int],
        question: Question | None = None,
        lead: str = "",
    ) -> Turn:
        begins = tuple(self.encode(lead)) if lead else ()
        said = self.encode(reply) if isinstance(reply, str) else reply
        return Turn((*user, *self.encode(more)), (*begins, *said), question, begins)

    def _size(self, turn: Turn) -> int:
        """Tokens that a turn adds to the history."""
        return len(turn.user) + len(self.template.to_reply) + len(turn.reply) + len(self.template.to_user)

    def _hide(self, rng: Random, facts: Sequence[str], room: int) -> list[int]:
        """Exactly ``room`` tokens: the facts in a random order, scattered in prose. They begin behind its
        first twentieth, and none comes directly behind another unless there is no room for anything else."""
        hidden = [self.encode(f" {fact}") for fact in rng.sample(facts, len(facts))]
        left = room - sum(map(len, hidden))
        if left < 0:
            raise ValueError(f"{room} tokens are too few for {len(facts)} facts")
        prose = prose_tokens(rng, self.encode, left)
        ends = self._ends_of_sentences(prose)
        places = sorted(
            rng.sample(ends, len(hidden)) if len(ends) >= len(hidden) else rng.choices(ends, k=len(hidden))
        )
        text: list[int] = []
        before = 0
        for place, fact in zip(places, hidden, strict=True):
            text += [*prose[before:place], *fact]
            before = place
        return [*text, *prose[before:]]

    def _ends_of_sentences(self, prose: Sequence[int]) -> list[int]:
        """Positions behind a sentence's end, in the later 95%; the end of all if there is none."""
        stop = {self.encode(mark)[-1] for mark in (" so.", " so?", " so!")}
        found = [at + 1 for at, token in enumerate(prose) if token in stop and at >= len(prose) // 20]
        return found or [len(prose)]

    def _words(self, rng: Random, material: Material, room: int) -> list[int]:
        """At most ``room`` tokens, and nearly as many: the expected words often, the others rarely."""
        common, others = material.question.expected, material.question.rivals
        sizes = {word: len(self.encode(f" {word}")) for word in (*common, *others)}
        often = max(4, int(COMMON * room / sum(sizes[word] for word in common)))
        every = [word for word in common for _ in range(often)]
        left = room - sum(sizes[word] for word in every)
        number = 0
        while (word := others[number % len(others)]) and sizes[word] <= left:
            every.append(word)
            left -= sizes[word]
            number += 1
        rng.shuffle(every)
        return [token for word in every for token in self.encode(f" {word}")]

    # ---- a dialogue of ten turns -------------------------------------------------------------

    def _dialogue(self, rng: Random, length: int) -> tuple[Turn, ...]:
        """The user's facts in turn 1, facts that the assistant says in turn 2, other talk, and a question a
        turn from turn 5 on, by turns about either; each question comes behind a piece of talk."""
        mine, yours = self._facts(rng, "code"), self._facts(rng, "number")
        room = length - len(self.template.before)
        note = [token for fact, _, _ in yours for token in self.encode(f" {fact}")]
        noted = self._turn(
            self.encode("Now note the numbers of the things that you look after."),
            "",
            [*self.encode("I have noted them."), *note],
        )
        opening = room * 35 // 100
        frame = self._size(self._turn(self.encode(READ), "", "I have read it."))
        read = self._turn(
            [*self.encode(READ), *self._hide(rng, [fact for fact, _, _ in mine], opening - frame)],
            "",
            "I have read it.",
        )
        turns = [read, noted]
        left = room - self._size(read) - self._size(noted)
        asked = iter(rng.sample(range(len(mine)), 3)), iter(rng.sample(range(len(yours)), 3))
        for number in range(3, LAST_TURN + 1):
            question = number >= FIRST_QUESTION
            if question:
                about = ("user", "assistant")[(number - FIRST_QUESTION) % 2]
                facts, word = ((mine, "code"), (yours, "number"))[about == "assistant"]
                _, name, value = facts[next(asked[about == "assistant"])]
                rivals = tuple(other for _, _, other in facts if other != value)
                ask = f"\n\nNow, what is the {word} of the {name}? Answer with the number only."
                asks = Question((value,), rivals, "first_number", SHORT, about)
                reply, lead = f" {value}.", f"The {word} of the {name} is"
            else:
                ask, reply, asks, lead = AFTER, "I have.", None, ""
            bare = self._turn(self.encode(ASIDE), ask, reply, asks, lead)
            # What is in front of the last message is as long as was asked for; its own talk comes on top.
            share = left // max(1, LAST_TURN - number) if number < LAST_TURN else TALK // 2
            talk = prose_tokens(rng, self.encode, max(0, share - self._size(bare)))
            turn = self._turn([*self.encode(ASIDE), *talk], ask, reply, asks, lead)
            turns.append(turn)
            left -= self._size(turn)
        return tuple(turns)

    def _facts(self, rng: Random, word: str) -> list[tuple[str, str, str]]:
        """(sentence, name, value) of twelve facts that look alike."""
        names = keys(rng, 3, 4)
        values = numbers(rng, len(names))
        return [
            (f"The {word} of the {name} is {value}.", name, value)
            for name, value in zip(names, values, strict=True)
        ]

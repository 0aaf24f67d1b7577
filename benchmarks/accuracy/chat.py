"""Conversations in tokens, by the model's own chat template.

Each part is encoded by itself and only ever appended, so that every prompt continues the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tangram.calibration.framing import encode

MARKS = tuple(f"<|part-{number}|>" for number in range(4))
"""Stand where messages will be; no tokenizer sees them."""


@dataclass(frozen=True)
class Question:
    """What a turn asks.

    Attributes:
        expected: values that a right answer names.
        rivals: values of look-alike facts, which a wrong answer may name.
        rule: how an answer is judged, a name of :data:`benchmarks.accuracy.scoring.RULES`.
        max_tokens: of the answer.
        about: whose fact it is: "user" or "assistant".
    """

    expected: tuple[str, ...]
    rivals: tuple[str, ...]
    rule: str
    max_tokens: int
    about: str = "user"


@dataclass(frozen=True)
class Turn:
    """A user's message and the reply that the history will hold, whatever the model says: so all conditions
    are asked behind the same tokens.

    Attributes:
        reply: may be empty in the last turn.
        lead: how the answer to a question begins, as in RULER: the model only has to give the value.
        ``reply``
            begins with it.
    """

    user: tuple[int, ...]
    reply: tuple[int, ...] = ()
    question: Question | None = None
    lead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Template:
    """Tokens between the messages of a conversation.

    Attributes:
        before: in front of the first message.
        to_reply: from the end of a message to where the reply begins.
        to_user: from the end of a reply to where the next message begins.
        stops: tokens that end an answer.
    """

    before: tuple[int, ...]
    to_reply: tuple[int, ...]
    to_user: tuple[int, ...]
    stops: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """One sample of a task.

    Attributes:
        length: tokens in front of the last turn, as asked for.
    """

    task: str
    seed: int
    length: int
    turns: tuple[Turn, ...] = field(repr=False)

    def history(self, template: Template, turn: int) -> list[int]:
        """All tokens in front of the message of that turn (from 0)."""
        tokens = list(template.before)
        for done in self.turns[:turn]:
            tokens += [*done.user, *template.to_reply, *done.reply, *template.to_user]
        return tokens

    def prompt(self, template: Template, turn: int) -> list[int]:
        """All tokens up to where the model goes on: the beginning of that turn's reply, or its lead's end."""
        asked = self.turns[turn]
        return [*self.history(template, turn), *asked.user, *template.to_reply, *asked.lead]


def template_of(tokenizer: Any, stops: Sequence[int] = ()) -> Template:
    """The model's chat template, with whatever system message it adds by itself.

    Raises:
        ValueError: it has none, or one in which messages cannot be found again.
    """
    first, said, then, last = MARKS
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": said},
        {"role": "user", "content": then},
    ]
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the model has no chat template")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + last
    parts = []
    for mark in MARKS:
        part, found, text = text.partition(mark)
        if not found:
            raise ValueError("the model's chat template does not show its messages in their order")
        parts.append(tuple(encode(tokenizer, part)))
    before, to_reply, to_user, again = parts
    if again != to_reply:
        raise ValueError("the model's chat template treats the last message otherwise than the first")
    return Template(before, to_reply, to_user, tuple(dict.fromkeys([*stops, tokenizer.eos_token_id])))

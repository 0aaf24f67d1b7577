"""Conditions that run one sample at a time in transformers: the replay of our cache, and kvpress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy import peer
from benchmarks.accuracy.answers import Answered, Read
from benchmarks.accuracy.chat import Conversation, Template
from benchmarks.accuracy.engine import settings
from benchmarks.accuracy.loss import LossSample
from tangram.advice import shape_of
from tangram.calibration.model import load_whole
from tangram.calibration.replay import Replay
from tangram.profile import build_geometry
from tangram.profile_file import DEFAULT_FLOOR

Decode = Callable[[list[int]], str]


class Replayed:
    """Our cache, offline. The last turn of a conversation is asked, behind the turns before."""

    def __init__(self, job: dict[str, Any], template: Template, decode: Decode) -> None:
        self.template, self.decode = template, decode
        self.config = settings(job["condition"], job["profiles"], Path(job["folder"]))
        self.reader, self.head = load_whole(job["model"], job["device"], job["dtype"])
        self.geometry = build_geometry(self.config, shape_of(self.reader.identity))
        self.dynamic = job["condition"]["budgets"] == "dynamic"

    def new(self, capacity: int) -> Replay:
        """An empty cache for so many tokens."""
        return Replay(
            self.reader, self.head, self.config, self.geometry, capacity, self.dynamic, DEFAULT_FLOOR
        )

    def converse(self, conversations: Sequence[Conversation]) -> list[list[Answered]]:
        """See :class:`benchmarks.accuracy.worker.Answerer`."""
        return [[self._ask(one)] for one in conversations]

    def _ask(self, one: Conversation) -> Answered:
        last = len(one.turns) - 1
        prompt, question = one.prompt(self.template, last), one.turns[last].question
        if question is None:
            raise ValueError(f"the last turn of {one} asks nothing")
        cache = self.new(len(prompt) + question.max_tokens)
        said = cache.answer(prompt, self.template.stops, question.max_tokens)
        return Answered(last + 1, self.decode(said), len(prompt), 0)

    def losses(self, samples: Sequence[LossSample]) -> list[Read]:
        """See :class:`benchmarks.accuracy.worker.Answerer`."""
        return [Read(self.new(len(one.tokens)).loss(one.tokens, one.first)) for one in samples]

    def kept(self, tokens: int) -> float:
        """Dynamic budgets keep the asked share of each sealed chunk, save for rounding."""
        if self.dynamic:
            sealed = self.geometry.sealed(tokens) * self.geometry.chunk
            return share_kept(sealed, self.config.retention, tokens)
        return self.geometry.kept_fraction(tokens)


class Peer:
    """kvpress. What our cache has sealed at the question is its context, the rest follows uncompressed."""

    def __init__(self, job: dict[str, Any], template: Template, decode: Decode) -> None:
        from tangram.config import TangramConfig

        self.template, self.decode = template, decode
        self.retention, self.name = job["condition"]["retention"], job["condition"]["scorer"]
        self.model = peer.load(job["model"], job["device"], job["dtype"])
        self.geometry = TangramConfig()

    def sealed_tokens(self, tokens: int) -> int:
        """Tokens that our cache has sealed of so many."""
        return max(0, tokens - self.geometry.window) // self.geometry.chunk * self.geometry.chunk

    def converse(self, conversations: Sequence[Conversation]) -> list[list[Answered]]:
        """See :class:`benchmarks.accuracy.worker.Answerer`."""
        return [[self._ask(one)] for one in conversations]

    def _ask(self, one: Conversation) -> Answered:
        last = len(one.turns) - 1
        prompt, question = one.prompt(self.template, last), one.turns[last].question
        if question is None:
            raise ValueError(f"the last turn of {one} asks nothing")
        sealed = self.sealed_tokens(len(prompt))
        press = peer.press_of(self.name, 1.0 - self.retention)
        pressed = peer.Pressed(self.model, press, prompt[:sealed])
        said = pressed.answer(prompt[sealed:], self.template.stops, question.max_tokens)
        return Answered(last + 1, self.decode(said), len(prompt), 0)

    def losses(self, samples: Sequence[LossSample]) -> list[Read]:
        """kvpress compresses once, in front of a question: no loss behind a growing history."""
        raise ValueError("kvpress is asked questions only")

    def kept(self, tokens: int) -> float:
        """The asked share of what is sealed, and all else."""
        return share_kept(self.sealed_tokens(tokens), self.retention, tokens)


def share_kept(sealed: int, retention: float, tokens: int) -> float:
    """Of a history of ``tokens``, of whose ``sealed`` ones exactly that share is kept."""
    return (sealed * retention + tokens - sealed) / tokens

"""Clients that talk to an engine in a closed loop: each waits for its answer, thinks, and goes on.

Nothing here knows an engine: what answers is given as a function. Everything that a client says is drawn from
the seed, its number, its conversation and its turn, so all engines are asked the same.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """What came of an answer at one moment."""

    tokens: list[int]
    cached: int
    """Tokens of the prompt that the engine did not have to compute."""
    preemptions: int
    """Of this request so far."""


Ask = Callable[[list[int], int, str], AsyncIterator[Part]]
"""Streams the answer to a prompt of token ids; the others are its length in tokens, and who asks."""


@dataclass(frozen=True)
class Workload:
    """What clients do.

    Attributes:
        first: least and greatest length of a conversation's first message in tokens; drawn between them with
            equal weight on each factor.
        message, answer: tokens of every later message and of every answer.
        turns: of one conversation; a new one follows.
        thinking: mean seconds, exponentially distributed, between an answer and the next message.
        vocabulary: token ids go from 0 to one below it.
        seed: of everything that is drawn.
    """

    first: tuple[int, int] = (4096, 4096)
    message: int = 512
    answer: int = 128
    turns: int = 10
    thinking: float = 1.0
    vocabulary: int = 151936
    seed: int = 0

    def first_length(self, client: int, conversation: int) -> int:
        """Tokens of this conversation's first message."""
        low, high = self.first
        share = random.Random(f"{self.seed} length {client} {conversation}").random()
        return round(low * (high / low) ** share)

    def entry(self, client: int) -> int:
        """The turn at which a client's first conversation begins. Turns are spread evenly over clients: so
        there are conversations of all lengths from the start, as there will be later."""
        return (client * 7919 + self.seed) % self.turns

    def tokens(self, client: int, conversation: int, turn: int, length: int) -> list[int]:
        """New tokens of one message."""
        generator = np.random.default_rng([self.seed, client, conversation, turn])
        drawn: list[int] = generator.integers(0, self.vocabulary, length).tolist()
        return drawn

    def thought(self, client: int, conversation: int, turn: int) -> float:
        """Seconds before the message that follows this turn."""
        if self.thinking <= 0:
            return 0.0
        return random.Random(f"{self.seed} {client} {conversation} {turn}").expovariate(1 / self.thinking)

    def prompt_length(self, turn: int, first: float | None = None) -> float:
        """Tokens of the prompt of a turn, counted from 0."""
        begin = self.mean_first() if first is None else first
        return begin + turn * (self.answer + self.message)

    def mean_first(self) -> float:
        """Mean tokens of a first message."""
        low, high = self.first
        return low if low == high else (high - low) / math.log(high / low)

    def lengths(self) -> list[float]:
        """Tokens that a conversation holds after each of its answers."""
        return [self.answer + self.prompt_length(turn) for turn in range(self.turns)]

    def mean_length(self) -> float:
        """Their mean."""
        return sum(self.lengths()) / self.turns

    def longest(self) -> float:
        """Tokens that a conversation holds at its end, at most."""
        return self.answer + self.prompt_length(self.turns - 1, self.first[1])


@dataclass
class Turn:
    """What became of one message. Times are of one clock, in seconds."""

    client: int
    number: int
    """Counted from 0."""
    prompt: int
    """Tokens, with all that was said before."""
    asked: float
    joining: bool = False
    """It brought a history that this client had not sent before: not a turn as the workload has them."""
    parts: list[tuple[float, int]] = field(default_factory=list)
    """When tokens arrived, and how many."""
    cached: int = 0
    preemptions: int = 0
    ended: float | None = None
    error: str | None = None

    @property
    def first(self) -> float | None:
        """When the first token arrived."""
        return self.parts[0][0] if self.parts else None


class Observed(NamedTuple):
    """All turns of one measurement, those before and those cut off at the end too."""

    turns: list[Turn]
    begin: float
    end: float


async def converse(
    index: int, workload: Workload, ask: Ask, log: list[Turn], clock: Callable[[], float]
) -> None:
    """One client, for ever."""
    conversation, number = 0, workload.entry(index)
    while True:
        history = workload.tokens(index, conversation, 0, workload.first_length(index, conversation))
        if number:
            # Somebody else's history, as long as this client's would be by now.
            history += workload.tokens(
                index, conversation, workload.turns, number * (workload.answer + workload.message)
            )
        joining = number > 0
        while number < workload.turns:
            turn = Turn(index, number, len(history), clock(), joining)
            log.append(turn)
            said: list[int] = []
            try:
                async for part in ask(history, workload.answer, f"client {index}"):
                    turn.parts.append((clock(), len(part.tokens)))
                    turn.cached, turn.preemptions = part.cached, part.preemptions
                    said += part.tokens
            except Exception as error:
                turn.error = f"{type(error).__name__}: {error}"
            turn.ended = clock()
            await asyncio.sleep(0.1 if turn.error else workload.thought(index, conversation, number))
            if turn.error:
                break
            number += 1
            joining = False
            history = history + said + workload.tokens(index, conversation, number, workload.message)
        conversation, number = conversation + 1, 0


async def observe(
    workload: Workload,
    ask: Ask,
    clients: int,
    warmup: float,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """Let clients talk and watch them for ``seconds``, once ``warmup`` seconds have passed and every client
    had an answer (or waited for it as long again, three times)."""
    log: list[Turn] = []

    async def begin(index: int) -> None:
        await asyncio.sleep(index / clients * min(2.0, warmup / 2))
        await converse(index, workload, ask, log, clock)

    started = clock()
    tasks = [asyncio.create_task(begin(index)) for index in range(clients)]
    try:
        await asyncio.sleep(warmup)
        while clock() - started < 4 * warmup:
            if len({turn.client for turn in log if turn.ended is not None}) == clients:
                break
            await asyncio.sleep(0.05)
        start = clock()
        await asyncio.sleep(seconds)
        end = clock()
    finally:
        for task in tasks:
            task.cancel()
        gone = await asyncio.gather(*tasks, return_exceptions=True)
    for result in gone:
        if not isinstance(result, asyncio.CancelledError):
            raise RuntimeError("a client ended by itself") from (
                result if isinstance(result, BaseException) else None
            )
    return Observed(log, start, end)

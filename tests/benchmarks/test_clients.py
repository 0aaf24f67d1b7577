"""The closed loop: what clients say and when, against an engine that answers by a script."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from benchmarks.clients import Observed, Part, Turn, Workload, observe
from tests.patience import PATIENCE, fastest

SMALL = Workload(first=(20, 20), message=5, answer=3, turns=4, thinking=0.0, vocabulary=1000)


class Scripted:
    """Answers each prompt after a while, and remembers what it was asked and how many asked at once."""

    def __init__(self, delay: float = 0.001, failing: int | None = None) -> None:
        self.delay, self.failing = delay, failing
        self.prompts: list[list[int]] = []
        self.working = self.most = self.left = 0

    async def ask(self, prompt: list[int], count: int, user: str) -> AsyncIterator[Part]:
        self.prompts.append(prompt)
        self.working += 1
        self.most = max(self.most, self.working)
        try:
            if self.failing is not None and len(self.prompts) % self.failing == 0:
                raise ValueError("no")
            for token in range(count):
                await asyncio.sleep(self.delay)
                yield Part([10_000 + token], len(prompt) // 2, 1)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.working -= 1


async def watch(
    workload: Workload, clients: int, *, more_than: int = 0, failing: int | None = None
) -> tuple[Scripted, Observed]:
    """An engine and what was seen of it, for long enough that it had more than so many prompts."""
    seconds = 0.3
    while True:
        engine = Scripted(failing=failing)
        seen = await observe(workload, engine.ask, clients, warmup=0.05, seconds=seconds)
        if len(engine.prompts) > more_than or seconds > PATIENCE:
            return engine, seen
        seconds *= 4


async def test_each_prompt_continues_the_last_answer() -> None:
    engine, seen = await watch(SMALL, 1, more_than=8)
    assert len(engine.prompts) > 8
    for before, after in itertools.pairwise(engine.prompts):
        if len(after) == 20:  # a new conversation
            assert len(before) == 20 + 3 * 8
            assert after[:5] != before[:5]
        else:
            assert after[: len(before) + 3] == [*before, 10_000, 10_001, 10_002]
            assert len(after) == len(before) + 3 + 5
    numbers = [turn.number for turn in seen.turns]
    assert numbers[:9] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [turn.prompt for turn in seen.turns] == [len(prompt) for prompt in engine.prompts]


async def test_a_client_waits_for_its_answer_and_leaves_nothing_behind() -> None:
    engine, seen = await watch(SMALL, 5)
    assert engine.most == 5
    assert engine.working == 0
    assert engine.left > 0  # some were cut off at the end
    for client in range(5):
        own = [turn for turn in seen.turns if turn.client == client]
        for before, after in itertools.pairwise(own):
            assert before.ended is not None
            assert after.asked >= before.ended


async def test_conversations_of_all_lengths_from_the_start() -> None:
    _, seen = await watch(SMALL, 8)
    firsts = [next(turn for turn in seen.turns if turn.client == client) for client in range(8)]
    assert sorted(turn.number for turn in firsts) == [0, 0, 1, 1, 2, 2, 3, 3]
    for turn in firsts:
        assert turn.joining == (turn.number > 0)
        assert turn.prompt == SMALL.prompt_length(turn.number)
    assert not any(turn.joining for turn in seen.turns if turn not in firsts)


async def test_a_failed_turn_is_noted_and_a_new_conversation_follows() -> None:
    _, seen = await watch(SMALL, 1, more_than=12, failing=3)
    failed = [index for index, turn in enumerate(seen.turns) if turn.error]
    assert failed
    assert seen.turns[failed[0]].error == "ValueError: no"
    assert all(seen.turns[index + 1].number == 0 for index in failed if index + 1 < len(seen.turns))


async def test_the_measured_time_begins_when_everybody_had_an_answer() -> None:
    async def measured() -> float:
        seen = await observe(SMALL, Scripted(delay=0.05).ask, 3, warmup=0.06, seconds=0.2)
        for client in range(3):
            assert min(t.ended for t in seen.turns if t.client == client and t.ended) <= seen.begin
        return seen.end - seen.begin

    assert 0.1 < await fastest(measured, 0.3) < 0.3


async def test_a_client_that_ends_by_itself_is_an_error() -> None:
    class Broken(Workload):
        def thought(self, client: int, conversation: int, turn: int) -> float:
            raise KeyError("thought")

    with pytest.raises(RuntimeError, match="ended by itself"):
        await observe(Broken(turns=1, first=(2, 2), answer=1), Scripted().ask, 1, 0.01, 0.05)


def test_all_engines_are_asked_the_same() -> None:
    again = Workload(first=(20, 20), message=5, answer=3, turns=4, thinking=0.5, vocabulary=1000)
    thinking = Workload(**vars(again))
    assert again.tokens(3, 1, 2, 50) == thinking.tokens(3, 1, 2, 50)
    assert again.tokens(3, 1, 2, 50) != again.tokens(3, 1, 3, 50)
    assert max(again.tokens(0, 0, 0, 5000)) < 1000
    assert again.thought(1, 2, 3) == thinking.thought(1, 2, 3)
    thoughts = [again.thought(client, 0, 0) for client in range(4000)]
    assert sum(thoughts) / len(thoughts) == pytest.approx(0.5, rel=0.1)


def test_lengths() -> None:
    chat = Workload()
    assert chat.mean_length() == 4096 + 128 + 4.5 * 640
    assert chat.longest() == 4096 + 9 * 640 + 128
    mixed = Workload(first=(20_000, 120_000), turns=1, message=64, answer=32)
    lengths = [mixed.first_length(client, 0) for client in range(4000)]
    assert 20_000 <= min(lengths) <= max(lengths) <= 120_000
    assert sum(lengths) / len(lengths) == pytest.approx(mixed.mean_first(), rel=0.03)


def test_a_turn_without_tokens_has_no_first() -> None:
    assert Turn(0, 0, 1, 0.0).first is None

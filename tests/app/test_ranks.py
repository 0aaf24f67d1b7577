"""Conversations stay in the rank of the engine that holds them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.managed_engine import ManagedEngine
from app.prompt_ranks import BLOCK, MOST_ALIKE, PromptRanks
from app.ranks import Ranks, Room
from app.settings import Settings
from db.errors import StorageUnavailable
from tangram.client import CompletionRequest, EngineClient
from tangram.errors import EngineRejected
from tests.app.conftest import Product, running_product
from tests.fake_engine import FakeConfig, FakeEngine


@pytest.fixture
def fake_engine(bundled_model_dir: Path) -> FakeEngine:
    config = FakeConfig(model=str(bundled_model_dir), name="fake-model", token_seconds=0.0005, ranks=3)
    return FakeEngine(config)


@pytest.fixture
async def product(settings: Settings) -> AsyncIterator[Product]:
    async with running_product(settings) as running:
        yield running


def asked(engine: FakeEngine) -> list[str | None]:
    """The ranks of the requests since it was last called."""
    found, engine.asked_ranks[:] = list(engine.asked_ranks), []
    return found


async def chat(product: Product, messages: list[dict[str, str]], **fields: Any) -> tuple[str, int]:
    """The answer of the stateless API, and how much of the prompt was in the cache."""
    body = {"model": "fake-model", "messages": messages, "max_tokens": 12, **fields}
    answer = (await product.http.post("/v1/chat/completions", json=body)).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached


async def test_a_conversation_keeps_its_rank_over_turns_edits_and_new_versions(
    product: Product, fake_engine: FakeEngine
) -> None:
    generation, seen = product.services.generation, {}
    for index in range(3):
        conversation = await product.conversation()
        first = await product.reply(conversation, f"/say one {index}")
        second = await product.reply(conversation, "/say two")
        assert second.stats["cached_tokens"] > 0
        again = await generation.regenerate(product.owner, conversation, second.id)
        await product.finish(again.reply.id)
        edited = await generation.edit(product.owner, conversation, first.parent_id, "/say changed")
        await product.finish(edited.reply.id)
        ranks = asked(fake_engine)
        assert len(ranks) == 4
        assert len(set(ranks)) == 1
        seen[conversation] = ranks[0]
        assert (first.stats["engine"], first.stats["engines"]) == (int(str(ranks[0])), 3)
    assert sorted(map(str, seen.values())) == ["0", "1", "2"], "they are spread"
    memory = await product.services.engine.memory()
    assert {row["engine"] for row in memory["sequences"]} == {0, 1, 2}


async def test_ranks_survive_a_restart_of_the_app(settings: Settings, fake_engine: FakeEngine) -> None:
    async with running_product(settings) as before:
        talks = [await before.conversation() for _ in range(5)]
        questions = [(await before.reply(talk, "/say hello")).parent_id for talk in talks]
        ranks = asked(fake_engine)
    async with running_product(settings) as after:
        for talk in reversed(talks[1:]):
            reply = await after.reply(talk, "/say and now")
            assert reply.stats["cached_tokens"] > 0
        assert asked(fake_engine) == ranks[:0:-1]
        # An edit of the first message shares no earlier reply with what was.
        edited = await after.services.generation.edit(after.owner, talks[0], str(questions[0]), "/say other")
        await after.finish(edited.reply.id)
        assert asked(fake_engine) == ranks[:1]


async def test_with_another_number_of_ranks_conversations_are_placed_anew(
    settings: Settings, fake_engine: FakeEngine
) -> None:
    async with running_product(settings) as before:
        talks = [await before.conversation() for _ in range(6)]
        for talk in talks:
            await before.reply(talk, "/say hello")
    fake_engine.config.ranks, fake_engine.resident = 2, []
    asked(fake_engine)
    async with running_product(settings) as fewer:
        for talk in talks:
            reply = await fewer.reply(talk, "/say again")
            assert reply.status == "complete"
        assert Counter(asked(fake_engine)) == {"0": 3, "1": 3}
    fake_engine.config.ranks, fake_engine.resident = 4, []
    async with running_product(settings) as more:
        for talk in talks:
            await more.reply(talk, "/say again")
        assert set(asked(fake_engine)) == {"0", "1", "2", "3"}, "those that are new get some too"


async def test_with_one_rank_there_is_no_header_and_nothing_is_noted(
    product: Product, fake_engine: FakeEngine
) -> None:
    assert product.services.supervisor.ranks == 3
    fake_engine.config.ranks = 1
    product.services.supervisor.ranks = 1
    conversation = await product.conversation()
    reply = await product.reply(conversation, "/say hello")
    await chat(product, [{"role": "user", "content": "/say hello"}])
    assert asked(fake_engine) == [None, None]
    assert not [name for name in reply.stats if name.startswith("engine")]


async def test_stateless_clients_come_back_to_their_rank(product: Product, fake_engine: FakeEngine) -> None:
    system = {"role": "system", "content": "Answer in the manner of a patient librarian. " * 12}
    histories: list[list[dict[str, str]]] = [
        [system, {"role": "user", "content": f"/say answer {index}"}] for index in range(6)
    ]
    for history in histories:
        answer, _ = await chat(product, history)
        history += [{"role": "assistant", "content": answer}, {"role": "user", "content": "/say more"}]
    ranks = asked(fake_engine)
    assert Counter(ranks) == {"0": 2, "1": 2, "2": 2}, "a common system prompt is no common conversation"
    for index in (3, 0, 5, 1, 4, 2):
        _, cached = await chat(product, histories[index])
        assert cached > 0
        assert asked(fake_engine) == [ranks[index]]


async def test_raw_completions_follow_what_they_continue(product: Product, fake_engine: FakeEngine) -> None:
    for prompt in ([*range(100, 240)], [*range(400, 440)], [*range(900, 905)]):
        body: dict[str, Any] = {"model": "fake-model", "prompt": prompt, "max_tokens": 4}
        assert (await product.http.post("/v1/completions", json=body)).status_code == 200
        more = body | {"prompt": [*prompt, 7, 8, 9, *range(2000, 2040)]}
        assert (await product.http.post("/v1/completions", json=more)).status_code == 200
        first, second = asked(fake_engine)
        assert first == second


async def test_a_conversation_through_the_api_has_its_own_rank(
    product: Product, fake_engine: FakeEngine
) -> None:
    conversation = await product.conversation()
    await product.reply(conversation, "/say one")
    (rank,) = asked(fake_engine)
    for _ in range(2):
        await chat(product, [{"role": "user", "content": "/say two"}], conversation_id=conversation)
    assert asked(fake_engine) == [rank, rank]


async def test_many_that_begin_at_once_are_spread(product: Product, fake_engine: FakeEngine) -> None:
    talks = [await product.conversation() for _ in range(12)]
    sent = [product.services.generation.send(product.owner, talk, "/tokens 30") for talk in talks[:8]]
    handles = await asyncio.gather(*sent)
    for handle in handles:
        await product.finish(handle.reply.id)
    counts = Counter(asked(fake_engine))
    assert sorted(counts.values()) == [2, 3, 3]


async def test_a_new_conversation_goes_where_there_is_room(product: Product, fake_engine: FakeEngine) -> None:
    long = await product.conversation()
    await product.reply(long, "/tokens 1")
    (taken,) = asked(fake_engine)
    for sequence in fake_engine.resident:
        sequence.tokens = sequence.tokens * 400  # a conversation that fills much of its rank
    product.services.ranks._looked = float("-inf")
    others = []
    for _ in range(6):
        await product.reply(await product.conversation(), "/say short")
        others += asked(fake_engine)
    assert taken not in others
    assert len(set(others)) == 2
    await product.reply(long, "/say back")
    assert asked(fake_engine) == [taken], "it stays where its pages are"


def test_room_is_told_by_share() -> None:
    def rank(total: int, free: int, idle: int, running: int) -> dict[str, Any]:
        pool = {"total_pages": total, "free_pages": free}
        return {"pool": pool, "conversations": idle, "requests": {"running": running}}

    room = Room.of([rank(100, 50, 4, 1), rank(200, 200, 0, 0)])
    assert room.held == [0.5, 0.0]
    assert room.typical == pytest.approx(0.1)
    assert Room.of([rank(100, 100, 0, 0)]).typical == 0


async def test_an_engine_that_does_not_tell_its_room_is_used_evenly() -> None:
    class Silent:
        ranks = 2

        @property
        def client(self) -> Any:
            raise EngineRejected(503, "busy")

    ranks = Ranks(Silent(), SimpleNamespace())  # type: ignore[arg-type]
    found = [await ranks.of_prompt("ann", [index] * 50) for index in range(4)]
    assert found == [0, 1, 0, 1]


async def test_a_database_that_is_away_does_not_keep_a_reply_from_its_rank() -> None:
    class Away:
        stats: Any = None

        async def latest_stats(self, *asked: Any) -> Any:
            if self.stats is None:
                raise StorageUnavailable("away")
            return self.stats

    supervisor, store = SimpleNamespace(ranks=2, client=SimpleNamespace(status=_no_answer)), Away()
    ranks = Ranks(supervisor, store)  # type: ignore[arg-type]
    assert await ranks.of_conversation("ann", "talk") == 0
    store.stats = [{"engine": 1, "engines": 2}]
    assert await ranks.of_conversation("ann", "talk") == 1, "it was not taken for known"
    store.stats = None
    assert await ranks.of_conversation("ann", "talk") == 1


async def _no_answer() -> Any:
    raise EngineRejected(503, "busy")


@pytest.mark.parametrize(("url", "expected"), [("", 3), ("http://elsewhere", 1)])
async def test_an_engine_that_does_not_tell_its_ranks_has_those_it_was_started_with(
    settings: Settings, url: str, expected: int
) -> None:
    settings = settings.model_copy(update={"data_parallel_size": 3, "engine_url": url})
    supervisor = ManagedEngine(settings)
    client: Any = SimpleNamespace(memory=_no_answer)
    await supervisor._became_ready(client, "m", 100, 1.0)
    assert supervisor.ranks == expected


def test_prompts_are_found_by_what_they_begin_with() -> None:
    ranks = PromptRanks()
    first = [*range(BLOCK * 2 + 5)]
    ranks.remember("ann", first, 1)
    assert ranks.find("ann", first) == 1
    assert ranks.find("ann", [*first, 99, 98]) == 1
    assert ranks.find("bob", first) is None
    assert ranks.find("ann", first[:-1]) is None, "what is shorter continues nothing"
    assert ranks.find("ann", [*first[:-1], 99]) is None
    assert ranks.find("ann", [99, *first[1:]]) is None
    longer = [*first, *range(500, 540)]
    ranks.remember("ann", longer, 2)
    assert ranks.find("ann", [*longer, 1]) == 2, "the longest one counts"
    assert ranks.find("ann", [*first, 1]) == 1
    ranks.clear()
    assert ranks.find("ann", first) is None


def test_few_prompts_are_kept() -> None:
    ranks = PromptRanks(most=10)
    for index in range(30):
        ranks.remember("ann", [index] * BLOCK, index)
        assert ranks.find("ann", [0] * BLOCK) == 0, "what is used stays"
    assert len(ranks) == 10
    assert ranks.find("ann", [5] * BLOCK) is None
    for index in range(MOST_ALIKE + 3):
        ranks.remember("ann", [7] * BLOCK + [index], index)
    assert ranks.find("ann", [7] * BLOCK + [2]) is None
    assert ranks.find("ann", [7] * BLOCK + [MOST_ALIKE]) == MOST_ALIKE


async def test_the_client_names_the_rank(fake_engine: FakeEngine, engine_url: str) -> None:
    async with EngineClient(engine_url) as client:
        for rank in (None, 0, 2):
            request = CompletionRequest("fake-model", [1, 2, 3], 2, rank=rank)
            assert [chunk async for chunk in client.stream(request)]
        assert asked(fake_engine) == [None, "0", "2"]
        with pytest.raises(EngineRejected, match="out of range"):
            await anext(client.stream(CompletionRequest("fake-model", [1], 2, rank=3)))

"""A whole `tangram serve` of two engines: a conversation lies in one of them, and what is told is of both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tangram.client import CompletionRequest, EngineClient
from tangram.completion import Usage
from tangram.errors import EngineRejected
from tests.engine.serving import LASTING, serving
from tests.patience import PATIENCE
from tests.tiny_models import random_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SETTINGS = ["--tangram-retention=0.4", "--tangram-chunk=64", "--tangram-window=32", "--tangram-rewind=32"]
POOL = 32 << 20


@pytest.fixture(scope="module")
def url(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ranks")
    model = folder / "model"
    random_llama(model, bundled_model_dir)
    options = [*SETTINGS, "--tangram-profile=none", "--data-parallel-size", "2"]
    with serving(model, [*options, "--kv-cache-memory-bytes", str(POOL)], folder) as url:
        yield url


async def say(
    client: EngineClient, prompt: list[int], salt: str, rank: int | None, answer: int = 12
) -> tuple[list[int], Usage]:
    """The ids of a greedy answer, and what was counted."""
    request = CompletionRequest(
        "tiny", prompt, answer, temperature=0.0, cache_salt=salt, rank=rank, extra={"ignore_eos": True}
    )
    chunks = [chunk async for chunk in client.stream(request)]
    usage = next(chunk.usage for chunk in chunks if chunk.usage is not None)
    return [token for chunk in chunks for token in chunk.token_ids], usage


def words(first: int, count: int) -> list[int]:
    return [1000 + (first + 37 * place) % 40000 for place in range(count)]


async def test_conversations_live_in_the_rank_that_was_named(url: str) -> None:
    async with EngineClient(url) as client:
        await client.evict(everything=True)
        talks = [words(7 + 1000 * rank, 300 + 50 * rank) for rank in range(2)]
        firsts = await asyncio.gather(*(say(client, talk, "ann", rank) for rank, talk in enumerate(talks)))
        assert [usage.cached_tokens for _, usage in firsts] == [0, 0]
        for talk, (ids, _) in zip(talks, firsts, strict=True):
            talk += [*ids, *words(5, 40)]
        seconds = await asyncio.gather(*(say(client, talk, "ann", rank) for rank, talk in enumerate(talks)))
        for rank, (_, usage) in enumerate(seconds):
            held = 300 + 50 * rank + 11
            assert usage.cached_tokens == held // 16 * 16, "up to a page's edge"

        memory = await client.memory()
        rows = {row["engine"]: row for row in memory["sequences"]}
        assert len(memory["sequences"]) == 2
        for rank in range(2):
            assert rows[rank]["tokens"] == len(talks[rank]) + 11
            own = memory["engines"][rank]
            assert (own["engine"], own["conversations"]) == (rank, 1)
            assert own["pool"]["resident_pages"] == rows[rank]["pages"] > 0
        assert memory["pool"]["resident_pages"] == sum(row["pages"] for row in rows.values())
        assert memory["pool"]["total_pages"] == sum(one["pool"]["total_pages"] for one in memory["engines"])
        assert memory["counters"]["takeovers"] >= 2
        alone = [await client.memory(rows[rank]["id"]) for rank in range(2)]
        for layer, row in enumerate(memory["heads"]["tokens_kept"]):
            for head, kept in enumerate(row):
                assert kept == sum(one["heads"]["tokens_kept"][layer][head] for one in alone) > 0

        # Elsewhere nothing of it is found, and the same comes out.
        other, usage = await say(client, talks[0], "ann", 1)
        assert usage.cached_tokens == 0
        assert other == seconds[0][0]


async def test_pinning_evicting_and_metrics_reach_both_engines(url: str) -> None:
    async with EngineClient(url) as client:
        await client.evict(everything=True)
        for rank in range(2):
            await say(client, words(rank, 120), "bob", rank)
        rows = {row["engine"]: row for row in (await client.memory())["sequences"]}
        for rank in range(2):
            assert await client.pin(rows[rank]["id"]) == {"conversations": 1}
        assert await client.evict(everything=True) == {"conversations": 0, "pages": 0}, "both are pinned"
        assert await client.evict(sequence=rows[1]["id"]) == {"conversations": 1, "pages": rows[1]["pages"]}
        assert [row["engine"] for row in (await client.memory())["sequences"]] == [0]
        seen = await metrics(client)
        for rank in ("0", "1"):
            assert seen["tangram_up", rank, "scheduler"] == seen["tangram_up", rank, "worker"] == 1
        assert seen["tangram_conversations_resident", "0"] == 1
        assert seen["tangram_conversations_resident", "1"] == 0
        assert seen["tangram_pages", "0", "resident"] == rows[0]["pages"]
        assert seen["tangram_pages", "1", "resident"] == 0
        assert await client.evict(sequence=rows[0]["id"]) == {"conversations": 1, "pages": rows[0]["pages"]}

        status = await client.status()
        for name, total in (
            ("tangram_seal_seconds_count", status["seals"]["count"]),
            ("tangram_seals_total", status["counters"]["seals"]),
        ):
            of_each = [seen[name, rank] for rank in ("0", "1")]
            assert all(of_each), "both have sealed"
            assert sum(of_each) == total


async def metrics(client: EngineClient) -> dict[tuple[str, ...], float]:
    """Our samples by name and labels, the engine first."""
    labels = ("engine", "part", "kind")
    return {
        (sample.name, *(sample.labels[name] for name in labels if name in sample.labels)): sample.value
        for family in text_string_to_metric_families(await client.metrics_text())
        for sample in family.samples
        if sample.name.startswith("tangram_") and "le" not in sample.labels
    }


async def test_vllm_chooses_where_nobody_did_and_refuses_what_is_not_there(url: str) -> None:
    async with EngineClient(url) as client:
        await client.evict(everything=True)
        await asyncio.gather(*(say(client, words(100 * index, 80), "eve", None, 40) for index in range(6)))
        seen: list[Any] = [row["engine"] for row in (await client.memory())["sequences"]]
        # How many each is given is vLLM's choice, from counts that reach it between the requests.
        assert len(seen) == 6
        assert set(seen) == {0, 1}
        with pytest.raises(EngineRejected, match="data_parallel_rank 2 is out of range") as error:
            await say(client, words(0, 20), "eve", 2)
        assert error.value.status == 400


async def test_what_is_stopped_leaves_its_rank(url: str) -> None:
    """An abort is sent to the rank that works on the request."""
    async with EngineClient(url) as client:
        for rank in range(2):
            prompt = words(rank, 50)
            request = CompletionRequest("tiny", prompt, 900, cache_salt="joe", rank=rank, extra=LASTING)
            async with contextlib.aclosing(client.stream(request)) as chunks:
                await anext(chunks)
                running = [one["requests"]["running"] for one in (await client.status())["engines"]]
            assert running == [int(rank == 0), int(rank == 1)]
            async with asyncio.timeout(PATIENCE):
                while (await client.status())["requests"]["running"]:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.1)

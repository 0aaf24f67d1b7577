"""The app on the real engine: what the imitated one can only promise."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from app.events import Sampling
from app.settings import Settings
from tests.app.conftest import Product, running_product
from tests.patience import PATIENCE, fastest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
OPTIONS = "--max-model-len 2048 --kv-cache-memory-bytes 600000000 --max-num-seqs 2 --tangram-retention 0.5"
GREEDY = Sampling(temperature=0.0)
LONG = "Tell me about the sea and the ships. " * 190


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def product(
    bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Product]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANGRAM_CHECK_INTEGRITY", "1")
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tangram" / "kernels"
        patch.setenv("TANGRAM_KERNEL_CACHE", os.environ.get("TANGRAM_KERNEL_CACHE", str(cache)))
        settings = Settings(
            home=tmp_path_factory.mktemp("home"), model=str(bundled_model_dir), engine_args=OPTIONS
        )
        async with running_product(settings) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(product: Product) -> AsyncIterator[openai.AsyncOpenAI]:
    key, _ = await product.services.accounts.create_api_key(product.owner, "openai")
    async with openai.AsyncOpenAI(base_url=f"{product.url}/v1", api_key=key, max_retries=0) as found:
        yield found


def asked(product: Product, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    model = product.services.supervisor.status.model
    return {"model": model, "messages": list(messages), "temperature": 0, **fields}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def test_a_stateless_client_finds_its_conversation(
    product: Product, client: openai.AsyncOpenAI
) -> None:
    history = [{"role": "system", "content": "You know the sea."}, user("Name three fishes 🐟 of the sea.")]
    before = 0
    for question in ("And birds 🕊️?", "Which of them dives deepest?", "Why?"):
        answer = await client.chat.completions.create(**asked(product, *history, max_tokens=60))
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        page = 16  # the last token was never fed, and a page that is not full is computed again
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= (before - 1) // page * page
        if before:
            assert (usage.prompt_tokens_details.cached_tokens or 0) >= before - page
        before = usage.prompt_tokens + usage.completion_tokens
        history += [{"role": "assistant", "content": answer.choices[0].message.content}, user(question)]


async def test_answers_of_every_kind(product: Product, client: openai.AsyncOpenAI) -> None:
    create = client.chat.completions.create
    question = user("Write one sentence about ships, in French.")
    whole = await create(**asked(product, question, max_tokens=40, logprobs=True, top_logprobs=3))
    choice = whole.choices[0]
    text = choice.message.content
    assert text
    assert choice.logprobs is not None
    told = choice.logprobs.content
    assert told is not None
    spelled = b"".join(bytes(one.bytes or ()) for one in told).decode()
    assert spelled.removesuffix("<|im_end|>") == text
    for one in told:
        assert one.token == one.top_logprobs[0].token, "greedy takes the likeliest"
        assert one.logprob == one.top_logprobs[0].logprob

    # A stop string that begins in one token and ends in another.
    middle = len("".join(one.token for one in told[:4]))
    stop = text[middle - 2 : middle + 2]
    cut = (await create(**asked(product, question, max_tokens=40, stop=[stop]))).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(stop)], "stop")
    streamed, usage = "", None
    stream: Any = await create(
        **asked(product, question, max_tokens=40, stop=[stop], stream=True),
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        streamed += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert streamed == cut.message.content
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens  # type: ignore[union-attr]

    several = await create(**asked(product, question, max_tokens=12, n=3) | {"temperature": 1.5, "seed": 7})
    assert [one.index for one in several.choices] == [0, 1, 2]
    assert len({one.message.content for one in several.choices}) > 1
    again = await create(**asked(product, question, max_tokens=12, n=3) | {"temperature": 1.5, "seed": 7})
    assert [o.message.content for o in again.choices] == [o.message.content for o in several.choices]

    schema = {
        "type": "object",
        "properties": {"name": {"const": "ship"}, "crew": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["name", "crew"],
        "additionalProperties": False,
    }
    shaped = await create(
        **asked(product, question, max_tokens=40),
        response_format={"type": "json_schema", "json_schema": {"name": "ship", "schema": schema}},
    )
    said = json.loads(shaped.choices[0].message.content or "")
    assert said.keys() == {"name", "crew"}
    assert said["name"] == "ship"
    with pytest.raises(openai.BadRequestError):
        await create(
            **asked(product, question, max_tokens=5),
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "no such type"}},
            },
        )
    plain = await client.completions.create(
        model=product.services.supervisor.status.model,
        prompt=["The sea is", "A ship is"],
        max_tokens=6,
        temperature=0,
        echo=True,
    )
    assert [
        c.text.startswith(p) for c, p in zip(plain.choices, ("The sea is", "A ship is"), strict=True)
    ] == [True] * 2


async def test_a_reply_that_goes_on_says_what_it_would_have_said(product: Product) -> None:
    generation = product.services.generation
    conversation = await product.conversation()
    short = Sampling(temperature=0.0, max_tokens=11)
    first = await product.reply(conversation, "Tell a story about a lighthouse 🗼.", sampling=short)
    assert (first.finish_reason, len(first.token_ids)) == ("length", 11)
    await generation.continue_reply(
        product.owner, conversation, first.id, Sampling(temperature=0.0, max_tokens=29)
    )
    whole = await product.finish(first.id)
    handle = await generation.regenerate(
        product.owner, conversation, first.id, Sampling(temperature=0.0, max_tokens=40)
    )
    at_once = await product.finish(handle.reply.id)
    assert whole.token_ids == at_once.token_ids
    assert whole.content == at_once.content


async def freed(product: Product) -> None:
    """Wait until nothing runs in the engine and no page is a running request's."""
    async with asyncio.timeout(PATIENCE):
        while True:
            memory = await product.services.engine.memory()
            running = [s for s in memory["sequences"] if s["state"] == "running"]
            if not running and not memory["pool"]["running_pages"]:
                return
            await asyncio.sleep(0.02)


async def running_requests(product: Product, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            memory = await product.services.engine.memory()
            if sum(s["state"] == "running" for s in memory["sequences"]) >= count:
                return
            await asyncio.sleep(0.02)


async def test_stop_frees_the_engine_at_any_phase(product: Product) -> None:
    generation, owner = product.services.generation, product.owner

    async def send(content: str) -> str:
        handle = await generation.send(owner, await product.conversation(), content, sampling=GREEDY)
        return handle.reply.id

    async def stop(reply_id: str, answered: bool) -> float:
        """Seconds; infinitely many if the reply went on to its next phase, or to its end, before the stop."""
        began = time.monotonic()
        await generation.stop(owner, reply_id)
        took = time.monotonic() - began
        reply = await product.services.store.get_message(owner, reply_id)
        assert reply.is_final
        return took if (reply.status, bool(reply.token_ids)) == ("stopped", answered) else math.inf

    async def timed_stop(reply_id: str, answered: bool) -> float:
        """The longer of the two: until the reply is settled, and then until the engine is free."""
        took, began = await stop(reply_id, answered), time.monotonic()
        await freed(product)
        return max(took, time.monotonic() - began)

    async def decoding() -> float:
        reply_id = await send("Write a very long story about a lighthouse keeper.")
        await product.wait_for_text(reply_id)
        return await timed_stop(reply_id, answered=True)

    async def prefilling() -> float:
        """Thousands of tokens, stopped before the first one of the answer."""
        reply_id = await send(f"{LONG}{time.time()}")
        await running_requests(product, 1)
        return await timed_stop(reply_id, answered=False)

    async def queued() -> float:
        """Behind two others."""
        busy = [await send(f"Write a very long story about the number {number}.") for number in (1, 2)]
        for reply_id in busy:
            await product.wait_for_text(reply_id)
        waiting = await send("And about the number 3.")
        await asyncio.sleep(0.3)
        took = [await stop(waiting, answered=False), await stop(busy[0], answered=True)]
        return max(*took, await timed_stop(busy[1], answered=True))

    for phase in (decoding, prefilling, queued):
        assert await fastest(phase, 1.0) < 1.0, phase.__name__
    text = await product.services.engine.metrics_text()
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(f"{name}{{")]
        assert values
        assert all(float(value) == 0 for value in values), name


async def test_a_full_context_goes_on(product: Product) -> None:
    conversation = await product.conversation(system_prompt="You are brief.")
    sampling = Sampling(temperature=0.0, max_tokens=16)
    cut = []
    for turn in range(5):
        reply = await product.reply(conversation, f"{turn}: " + LONG[:2700], sampling=sampling)
        assert reply.status == "complete", reply.error
        cut.append(reply.stats.get("left_out", 0))
    meter = await product.services.generation.context(product.owner, conversation)
    assert cut[0] == 0
    assert cut[-1] > 0
    assert meter.left_out == cut[-1]
    assert meter.limit == 2048
    assert meter.kept_fraction is not None
    assert 0.4 < meter.kept_fraction < 1, "sealed chunks keep half"

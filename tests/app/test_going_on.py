"""Replies that were cut short go on: when somebody asks, and by themselves after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path
from typing import Any

import pytest

from app.context import can_continue
from app.errors import BadRequest
from app.events import Event, Sampling
from app.resuming import MOST_RESUMPTIONS
from app.sampling import BUNDLED_MAX_TOKENS
from app.settings import Settings
from app.supervisor import EngineState
from db.errors import Conflict, NotFound
from tests.app.conftest import Product, eventually, running_product
from tests.fake_engine import LOREM, FakeEngine
from tests.patience import PATIENCE


def lorem(product: Product, count: int) -> str:
    """What the imitated engine says to "/tokens COUNT"."""
    text = product.services.templating.text
    words = " ".join(LOREM[i % len(LOREM)] for i in range(count))
    return text.decode(text.encode(words)[:count])


async def test_a_reply_of_limited_length_goes_on(product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation()
    first = await product.reply(conversation, "/tokens 40", sampling=Sampling(max_tokens=15))
    assert (first.status, first.finish_reason, len(first.token_ids)) == ("complete", "length", 15)
    generation = product.services.generation
    handle = await generation.continue_reply(product.owner, conversation, first.id)
    assert handle.reply.id == first.id
    assert (handle.reply.status, handle.reply.content) == ("pending", first.content)
    whole = await product.finish(first.id)
    assert (whole.status, whole.finish_reason) == ("complete", "stop")
    assert whole.content == lorem(product, 40)
    assert whole.token_ids[:15] == first.token_ids
    assert fake_engine.requests[1]["prompt"] == [*fake_engine.requests[0]["prompt"], *first.token_ids]
    assert whole.stats["completion_tokens"] == len(whole.token_ids) == 41
    assert whole.stats["prompt_tokens"] == first.stats["prompt_tokens"]
    assert whole.stats["cached_tokens"] == first.stats["prompt_tokens"] + 14
    with pytest.raises(BadRequest, match="finished"):
        await generation.continue_reply(product.owner, conversation, first.id)
    follow_up = await product.reply(conversation, "/say yes")
    assert follow_up.stats["cached_tokens"] == len(handle.user.token_ids) + 40


async def test_a_stopped_reply_goes_on_over_http(product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation()
    fake_engine.up_to = 20
    handle = await product.services.generation.send(product.owner, conversation, "/tokens 50")
    await product.wait_for_text(handle.reply.id)
    path = f"/api/replies/{handle.reply.id}"
    stopped = (await product.http.post(f"{path}/stop")).json()
    assert stopped["status"] == "stopped"
    fake_engine.up_to = math.inf
    async with product.http.stream("POST", f"{path}/continue", json={}) as response:
        lines = [line async for line in response.aiter_lines()]
    assert [line[7:] for line in lines if line.startswith("event: ")][:3] == ["message", "snapshot", "queued"]
    stored = (await product.http.get(path)).json()
    assert (stored["status"], stored["content"]) == ("complete", lorem(product, 50))
    refused = await product.http.post(f"{path}/continue")
    assert refused.status_code == 400
    async with await product.stranger() as other:
        assert (await other.post(f"{path}/continue")).status_code == 404


async def test_only_the_last_reply_goes_on(product: Product) -> None:
    conversation = await product.conversation()
    first = await product.reply(conversation, "/tokens 40", sampling=Sampling(max_tokens=5))
    await product.reply(conversation, "/say more")
    with pytest.raises(Conflict, match="only the last one"):
        await product.services.generation.continue_reply(product.owner, conversation, first.id)
    kept = await product.services.store.get_message(product.owner, first.id)
    assert (kept.status, kept.content) == ("complete", first.content)


async def test_a_failed_reply_without_text_goes_on(product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation()
    handle = await product.services.generation.send(product.owner, conversation, "/prefill 300 /say late")
    await eventually(lambda: len(fake_engine.running) == 1)
    await product.services.generation.stop(product.owner, handle.reply.id)
    await eventually(lambda: not fake_engine.running)
    fake_engine.plan = lambda prompt: (
        [*fake_engine.tokenizer.encode("late").ids, fake_engine.end],
        0,
        0,
        0,
        0,
    )  # type: ignore[method-assign,assignment,return-value]
    await product.services.generation.continue_reply(product.owner, conversation, handle.reply.id)
    assert (await product.finish(handle.reply.id)).content == "late"


async def interrupted(settings: Settings, fake_engine: FakeEngine, content: str) -> tuple[str, str, str]:
    """(conversation, reply, its text) that the end of the app interrupted."""
    fake_engine.up_to = 20
    async with running_product(settings) as product:
        conversation = await product.conversation()
        handle = await product.services.generation.send(product.owner, conversation, content)
        await product.wait_for_text(handle.reply.id)
        await product.services.generation.close()
        stored = await product.services.store.get_message(product.owner, handle.reply.id)
        assert stored.status == "interrupted"
    await eventually(lambda: not fake_engine.running and fake_engine.aborted == 1)
    fake_engine.up_to = math.inf
    return conversation, handle.reply.id, stored.content


async def test_an_interrupted_reply_goes_on_after_a_restart(
    settings: Settings, fake_engine: FakeEngine
) -> None:
    conversation, reply, text = await interrupted(settings, fake_engine, "/tokens 60")
    fake_engine.healthy = False
    async with running_product(settings, engine=False) as product:
        services = product.services
        assert services.generation.running(product.owner, conversation) == reply
        events: list[Event] = []

        async def watch() -> None:
            async for event in services.generation.subscribe(product.owner, reply):
                events.append(event)

        watching = asyncio.create_task(watch())
        await eventually(lambda: len(events) == 2)
        assert [(event.kind, event.text) for event in events] == [("snapshot", text), ("queued", "")]
        fake_engine.healthy = True
        await watching
        assert events[-1].kind == "done"
        assert events[-1].text == lorem(product, 60)
        assert [event.kind for event in events[2:-1]] == ["delta"] * (len(events) - 3)
        whole = await services.store.get_message(product.owner, reply)
        assert (whole.status, whole.content, whole.stats["resumed"]) == ("complete", lorem(product, 60), 1)
        assert len(whole.token_ids) == 61


async def test_what_waits_for_the_engine_can_be_stopped(settings: Settings, fake_engine: FakeEngine) -> None:
    conversation, reply, text = await interrupted(settings, fake_engine, "/tokens 60")
    fake_engine.healthy = False
    async with running_product(settings, engine=False) as product:
        await product.services.generation.stop(product.owner, reply)
        stored = await product.services.store.get_message(product.owner, reply)
        assert (stored.status, stored.content, stored.error) == ("stopped", text, None)
        assert product.services.generation.running(product.owner, conversation) is None


async def test_an_engine_that_is_given_up_leaves_it_interrupted(
    settings: Settings, fake_engine: FakeEngine
) -> None:
    _, reply, text = await interrupted(settings, fake_engine, "/tokens 60")
    fake_engine.healthy = False
    async with running_product(settings, engine=False) as product:
        product.services.supervisor._set(EngineState.FAILED, detail="no")
        stored = await product.finish(reply)
        assert (stored.status, stored.content) == ("interrupted", text)


async def test_who_goes_on_and_how_often(settings: Settings, fake_engine: FakeEngine) -> None:
    conversation, reply, _ = await interrupted(settings, fake_engine, "/tokens 60")
    async with running_product(settings.model_copy(update={"resume_replies": False})) as product:
        store, generation = product.services.store, product.services.generation
        assert await generation.resume_interrupted() == 0
        generation._resume_replies = True
        assert [found.id for found in await store.resumable_replies(0)] == [reply]
        later = await store.get_message(product.owner, reply)
        assert await store.resumable_replies(later.updated_at + 1) == []

        await store.reopen_reply(product.owner, reply, {"resumed": MOST_RESUMPTIONS})
        await store.recover_interrupted()
        assert await generation.resume_interrupted() == 0, "it may be what ends the app"

        await store.delete_conversation(product.owner, conversation)
        assert await store.resumable_replies(0) == []
        with pytest.raises(NotFound):
            await store.reopen_reply(product.owner, reply)
        await store.restore_conversation(product.owner, conversation)
        another = await generation.regenerate(product.owner, conversation, reply)
        assert await store.resumable_replies(0) == [], "another branch is the active one"
        await product.finish(another.reply.id)


async def test_a_wanted_restart_of_the_engine_is_survived(product: Product, fake_engine: FakeEngine) -> None:
    generation = product.services.generation
    generation._drain_seconds, fake_engine.up_to = 0.1, 20
    conversation = await product.conversation()
    handle = await generation.send(product.owner, conversation, "/tokens 60")
    await product.wait_for_text(handle.reply.id)
    await generation.drain()
    assert generation.running(product.owner, conversation) == handle.reply.id
    fake_engine.up_to = math.inf
    whole = await product.finish(handle.reply.id)
    assert (whole.status, whole.content, whole.stats["resumed"]) == ("complete", lorem(product, 60), 1)


async def test_positions_in_the_queue_are_told(product: Product, fake_engine: FakeEngine) -> None:
    """With one place at the engine, taken by somebody else."""
    generation, queue = product.services.generation, product.services.queue
    queue._running = 1
    first, second = queue.rejoin("somebody"), queue.rejoin("somebody else")
    conversation = await product.conversation()
    handle = await generation.send(product.owner, conversation, "/say hi")
    seen: list[Any] = []
    async with contextlib.aclosing(generation.subscribe(product.owner, handle.reply.id)) as events:
        async for event in events:
            seen.append((event.kind, event.position))
            if event.position == 2:
                assert generation.position(product.owner, handle.reply.id) == 2
                assert generation.position("somebody else", handle.reply.id) is None
                first.leave()
            elif event.position == 1:
                assert fake_engine.requests == []
                second.leave()
    assert [place for kind, place in seen if kind == "queued"][:2] == [2, 1]
    assert seen[-1][0] == "done"
    assert generation.position(product.owner, handle.reply.id) is None


async def test_a_failed_reply_has_the_engine_looked_at_at_once(
    settings: Settings, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.remote_engine._POLL_READY", 10 * PATIENCE)
    async with running_product(settings) as product:
        supervisor = product.services.supervisor
        conversation = await product.conversation()
        await asyncio.sleep(0.05)  # the watcher is in its pause
        fake_engine.healthy = False
        reply = await product.reply(conversation, "/fail /tokens 20")
        assert reply.status == "error"
        await eventually(lambda: supervisor.status.state is EngineState.RESTARTING)


async def test_the_bundled_model_ends_sooner_and_can_go_on(
    settings: Settings, fake_engine: FakeEngine, bundled_model_dir: Path
) -> None:
    """It often repeats itself until the end; who sets a limit gets that one, for it too."""
    fake_engine.config.token_seconds = 0.0
    settings.models_dir.parent.mkdir(parents=True)
    settings.models_dir.symlink_to(bundled_model_dir.parent)
    nobody_chose = settings.model_copy(update={"model": ""})
    async with running_product(nobody_chose) as product:
        reply = await product.reply(await product.conversation(), "/tokens 3000")
        assert (reply.finish_reason, len(reply.token_ids)) == ("length", BUNDLED_MAX_TOKENS)
        assert can_continue(reply)
        ask = {"model": "fake-model", "messages": [{"role": "user", "content": "/tokens 3000"}]}
        answer = (await product.http.post("/v1/chat/completions", json=ask)).json()
        assert answer["usage"]["completion_tokens"] == BUNDLED_MAX_TOKENS
    for changed in ({"max_reply_tokens": 1500}, {"model": str(bundled_model_dir)}):
        async with running_product(nobody_chose.model_copy(update=changed)) as product:
            reply = await product.reply(await product.conversation(), "/tokens 1400")
            assert (reply.finish_reason, len(reply.token_ids)) == ("stop", 1401)

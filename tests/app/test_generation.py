"""Replies as jobs: their text reaches the database whatever happens to those who watch, or to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import pytest

from app.errors import BadRequest, ContextTooLong, ConversationBusy, EngineNotReady, ReplyUnsaved
from app.events import Event, Sampling
from app.generation import MAX_CONTENT
from app.settings import Settings
from db.errors import NotFound, OutcomeUnknown, StorageUnavailable
from tests.app.conftest import Product, eventually, running_product
from tests.fake_engine import FakeEngine
from tests.patience import PATIENCE


async def test_second_turn_reads_only_what_is_new(product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation(system_prompt="Be kind.")
    first = await product.reply(conversation, "Hello 🦜")
    assert (first.status, first.finish_reason) == ("complete", "stop")
    assert first.content.startswith("You said: Hello 🦜.")
    second = await product.reply(conversation, "/say 👩‍👩‍👧 and more")
    assert second.content == "👩‍👩‍👧 and more"
    path = await product.services.store.path(product.owner, conversation)
    assert [message.role for message in path] == ["user", "assistant", "user", "assistant"]
    sent = fake_engine.requests[1]["prompt"]
    assert sent == [token for message in path[:3] for token in message.token_ids]
    assert second.stats["cached_tokens"] == len(path[0].token_ids) + len(path[1].token_ids) - 1
    assert second.stats["prompt_tokens"] == len(sent)
    assert second.stats["completion_tokens"] == len(second.token_ids)
    assert second.stats["kept_fraction"] == 1.0
    assert fake_engine.tokenizer.decode(sent, skip_special_tokens=False).startswith(
        "<|im_start|>system\nBe kind.<|im_end|>"
    )
    assert (await product.services.store.get_conversation(product.owner, conversation)).title == "Hello 🦜"


async def test_message_is_stored_before_the_engine_is_asked(
    product: Product, fake_engine: FakeEngine
) -> None:
    conversation = await product.conversation()
    fake_engine.up_to = 1
    handle = await product.services.generation.send(product.owner, conversation, "/say hi")
    assert fake_engine.requests == []
    path = await product.services.store.path(product.owner, conversation)
    assert [(message.role, message.status) for message in path] == [
        ("user", "complete"),
        ("assistant", "pending"),
    ]
    assert product.services.generation.running(product.owner, conversation) == handle.reply.id
    fake_engine.up_to = math.inf
    await product.finish(handle.reply.id)
    assert product.services.generation.running(product.owner, conversation) is None


async def test_stop_aborts_in_the_engine_and_keeps_the_text(
    product: Product, fake_engine: FakeEngine
) -> None:
    conversation = await product.conversation()
    handle = await product.services.generation.send(product.owner, conversation, "/tokens 2000 /delay 0.05")
    text = await product.wait_for_text(handle.reply.id)
    await product.services.generation.stop(product.owner, handle.reply.id)
    stored = await product.services.store.get_message(product.owner, handle.reply.id)
    assert stored.status == "stopped"
    assert stored.content.startswith(text)
    assert 0 < len(stored.token_ids) < 2000
    await eventually(lambda: not fake_engine.running and fake_engine.aborted == 1)
    await product.services.generation.stop(product.owner, handle.reply.id)  # stopping again is no error

    again = await product.reply(conversation, "/say done")
    sent = fake_engine.tokenizer.decode(fake_engine.requests[1]["prompt"], skip_special_tokens=False)
    assert f"{stored.content}<|im_end|>\n<|im_start|>user\n/say done" in sent
    assert again.stats["cached_tokens"] >= stored.stats["prompt_tokens"] + len(stored.token_ids) - 1


async def test_a_reply_that_was_stored_without_anybody_knowing_can_be_stopped(
    product: Product, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = await product.conversation()
    first = await product.reply(conversation, "/say one")
    store, generation = product.services.store, product.services.generation
    add_turn = store.add_turn

    async def unknown(*arguments: Any) -> Any:
        await add_turn(*arguments)
        raise OutcomeUnknown("it may be stored or not")

    with monkeypatch.context() as broken:
        broken.setattr(store, "add_turn", unknown)
        with pytest.raises(OutcomeUnknown):
            await generation.send(product.owner, conversation, "/say two")
    lost = (await store.path(product.owner, conversation))[-1]
    assert (lost.parent_id != first.id, lost.status) == (True, "pending")
    for _ in range(2):
        answer = await product.http.post(f"/api/replies/{lost.id}/stop")
        assert answer.status_code < 300, answer.text
    assert (await store.get_message(product.owner, lost.id)).status == "stopped"
    again = await generation.regenerate(product.owner, conversation, lost.id)
    assert (await product.finish(again.reply.id)).content == "two"
    with monkeypatch.context() as broken:
        broken.setattr(store, "add_turn", unknown)
        with pytest.raises(OutcomeUnknown):
            await generation.send(product.owner, conversation, "/say three")
    assert (await product.reply(conversation, "/say four")).content == "four", "the next message ends it too"


async def test_stop_before_the_first_token(product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation()
    handle = await product.services.generation.send(product.owner, conversation, "/prefill 300 hi")
    await eventually(lambda: len(fake_engine.running) == 1)
    await product.services.generation.stop(product.owner, handle.reply.id)
    await eventually(lambda: not fake_engine.running and fake_engine.aborted == 1)
    stored = await product.services.store.get_message(product.owner, handle.reply.id)
    assert (stored.status, stored.content, stored.token_ids) == ("stopped", "", ())
    await product.reply(conversation, "/say second")
    sent = fake_engine.tokenizer.decode(fake_engine.requests[1]["prompt"], skip_special_tokens=False)
    assert "/prefill 300 hi<|im_end|>\n<|im_start|>user\n/say second<|im_end|>" in sent


async def test_watchers_come_and_go(product: Product) -> None:
    conversation = await product.conversation()
    generation = product.services.generation
    handle = await generation.send(product.owner, conversation, "/tokens 120 /delay 0.005")

    async def watch(after: int = 0, leave: int | None = None) -> list[Event]:
        seen = []
        async with contextlib.aclosing(generation.subscribe(product.owner, handle.reply.id, after)) as events:
            async for event in events:
                seen.append(event)
                if leave is not None and event.seq >= leave:
                    break
        return seen

    whole, left = await asyncio.gather(watch(), watch(leave=40))
    rest = await watch(after=left[-1].seq)
    stored = await product.services.store.get_message(product.owner, handle.reply.id)
    assert stored.status == "complete"
    assert len(stored.token_ids) == 121

    def shown(events: list[Event], text: str = "") -> str:
        for event in events:
            text = event.text if event.kind in ("snapshot", "done") else text + event.text
            assert len(text) == event.seq
        return text

    assert [event.kind for event in whole][:2] == ["queued", "snapshot"]
    assert whole[-1].kind == rest[-1].kind == "done"
    assert whole[-1].stats == stored.stats
    assert shown(whole) == shown(rest[:-1], shown(left)) == stored.content
    assert {event.kind for event in rest[:-1]} == {"delta"}
    after = await watch(after=10)
    assert [event.kind for event in after] == ["delta", "done"]
    assert [event.kind for event in await watch(after=10**6)] == ["snapshot", "done"]


async def test_text_is_saved_while_the_reply_runs(product: Product) -> None:
    conversation = await product.conversation()
    product.services.generation._runner.flush_seconds = 0.05
    handle = await product.services.generation.send(product.owner, conversation, "/tokens 2000 /delay 0.05")
    async with asyncio.timeout(PATIENCE):
        while not (
            stored := await product.services.store.get_message(product.owner, handle.reply.id)
        ).content:
            await product.wait_for_text(handle.reply.id)
    assert stored.status == "streaming"
    templating = product.services.templating
    assert templating.text.decode(stored.token_ids).strip() == stored.content.strip()
    await product.services.generation.stop(product.owner, handle.reply.id)


async def test_regenerate_and_edit_add_siblings(product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation()
    generation, store = product.services.generation, product.services.store
    first = await product.reply(conversation, "/say one")
    handle = await generation.regenerate(product.owner, conversation, first.id)
    second = await product.finish(handle.reply.id)
    assert (second.sibling_index, second.sibling_count) == (1, 2)
    assert second.parent_id == first.parent_id
    assert fake_engine.requests[0]["prompt"] == fake_engine.requests[1]["prompt"]

    handle = await generation.edit(product.owner, conversation, first.parent_id, "/say two")
    third = await product.finish(handle.reply.id)
    assert third.content == "two"
    assert (handle.user.sibling_index, handle.user.sibling_count) == (1, 2)
    assert [message.content for message in await store.path(product.owner, conversation)] == [
        "/say two",
        "two",
    ]

    with pytest.raises(BadRequest):
        await generation.edit(product.owner, conversation, third.id, "x")
    with pytest.raises(BadRequest):
        await generation.regenerate(product.owner, conversation, handle.user.id)
    branch = await product.reply(conversation, "/say three", parent_id=first.id)
    path = await store.path(product.owner, conversation)
    assert [message.id for message in path][:2] == [first.parent_id, first.id]
    assert path[-1].id == branch.id


async def test_one_reply_at_a_time_in_a_conversation(product: Product) -> None:
    conversation, other = await product.conversation(), await product.conversation()
    generation = product.services.generation
    handle = await generation.send(product.owner, conversation, "/tokens 2000 /delay 0.05")
    with pytest.raises(ConversationBusy):
        await generation.send(product.owner, conversation, "more")
    with pytest.raises(ConversationBusy):
        await generation.regenerate(product.owner, conversation, handle.reply.id)
    assert (await product.reply(other, "/say free")).content == "free"
    results = await asyncio.gather(
        *(generation.send(product.owner, other, "/say twice") for _ in range(2)), return_exceptions=True
    )
    assert [type(result).__name__ for result in results].count("ConversationBusy") == 1
    await generation.stop(product.owner, handle.reply.id)


async def test_what_cannot_be_sent_leaves_nothing_behind(product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation()
    generation, store = product.services.generation, product.services.store
    with pytest.raises(BadRequest, match="empty"):
        await generation.send(product.owner, conversation, " \n")
    with pytest.raises(BadRequest, match="longer than"):
        await generation.send(product.owner, conversation, "x" * (MAX_CONTENT + 1))
    with pytest.raises(ContextTooLong, match="at most 8192"):
        await generation.send(product.owner, conversation, "word " * 9000)
    with pytest.raises(NotFound):
        await generation.send(product.owner, "missing", "hi")
    fake_engine.healthy = False
    while product.services.supervisor.status.ready:
        await product.services.supervisor.changed()
    with pytest.raises(EngineNotReady, match="being restarted"):
        await generation.send(product.owner, conversation, "hi")
    assert await store.path(product.owner, conversation) == []
    assert fake_engine.requests == []
    fake_engine.healthy = True
    await product.services.supervisor.wait_ready()
    assert (await product.reply(conversation, "/say back")).content == "back"


async def test_engine_that_breaks_off_leaves_the_text_and_says_so(product: Product) -> None:
    conversation = await product.conversation()
    reply = await product.reply(conversation, "/die /tokens 50")
    assert reply.status == "error"
    assert reply.content.startswith("lorem")
    assert len(reply.token_ids) == 3
    assert "engine stopped" in reply.error
    reply = await product.reply(conversation, "/fail /tokens 50")
    assert (reply.status, len(reply.token_ids)) == ("error", 3)
    assert "engine stopped" in reply.error
    reply = await product.reply(conversation, "/refuse")
    assert (reply.status, reply.content) == ("error", "")
    assert reply.error == "The engine refused the request: no, thank you"


async def test_sampling_comes_from_request_then_conversation_then_defaults(
    product: Product, fake_engine: FakeEngine
) -> None:
    conversation = await product.conversation(settings={"temperature": 0.25, "max_tokens": 5})
    reply = await product.reply(conversation, "a b c", sampling=Sampling(top_p=0.5, seed=3))
    body = fake_engine.requests[0]
    assert (body["temperature"], body["top_p"], body["seed"], body["max_tokens"]) == (0.25, 0.5, 3, 5)
    assert (reply.status, reply.finish_reason, len(reply.token_ids)) == ("complete", "length", 5)
    user = await product.services.store.user_by_id(product.owner)
    assert user is not None
    assert body["cache_salt"] == user.cache_salt


async def test_closing_does_not_miss_a_turn_that_is_being_stored(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = await product.conversation()
    generation, store = product.services.generation, product.services.store
    storing, go_on, add_turn = asyncio.Event(), asyncio.Event(), store.add_turn

    async def slow(*arguments: Any) -> Any:
        storing.set()
        await go_on.wait()
        return await add_turn(*arguments)

    monkeypatch.setattr(store, "add_turn", slow)
    sending = asyncio.create_task(generation.send(product.owner, conversation, "/tokens 2000 /delay 0.05"))
    await storing.wait()
    closing = asyncio.create_task(generation.close())
    go_on.set()
    handle = await sending
    await closing
    assert (await store.get_message(product.owner, handle.reply.id)).status == "interrupted"
    with pytest.raises(EngineNotReady, match="shutting down"):
        await generation.send(product.owner, conversation, "more")


async def test_strangers_see_nothing(product: Product) -> None:
    conversation = await product.conversation()
    generation = product.services.generation
    handle = await generation.send(product.owner, conversation, "/tokens 2000 /delay 0.05")
    other = (await product.services.accounts.create_user("bob", "password of bob")).id
    with pytest.raises(NotFound):
        await generation.stop(other, handle.reply.id)
    with pytest.raises(NotFound):
        await anext(generation.subscribe(other, handle.reply.id))
    with pytest.raises(NotFound):
        await generation.send(other, conversation, "x")
    assert generation.running(other, conversation) is None
    assert generation.running(product.owner, conversation) == handle.reply.id
    await generation.stop(product.owner, handle.reply.id)


async def test_end_of_the_app_interrupts_and_keeps(settings: Settings, fake_engine: FakeEngine) -> None:
    async with running_product(settings) as product:
        conversation = await product.conversation()
        fake_engine.up_to = 100
        handle = await product.services.generation.send(product.owner, conversation, "/tokens 150")
        text = await product.wait_for_text(handle.reply.id)
    await eventually(lambda: not fake_engine.running and fake_engine.aborted == 1)
    fake_engine.up_to = math.inf
    settings = settings.model_copy(update={"resume_replies": False})
    async with running_product(settings) as product:
        stored = await product.services.store.get_message(product.owner, handle.reply.id)
        assert stored.status == "interrupted"
        assert stored.content.startswith(text)
        again = await product.finish(
            (await product.services.generation.regenerate(product.owner, conversation, stored.id)).reply.id
        )
        assert again.status == "complete"


async def test_drain_waits_for_replies_then_interrupts(product: Product) -> None:
    generation, get = product.services.generation, product.services.store.get_message
    generation._resume_replies = False
    for seconds in (1.0, 4.0, 16.0):  # a busy machine may want more for ten tokens
        short, endless = await product.conversation(), await product.conversation()
        generation._drain_seconds = seconds
        one = await generation.send(product.owner, short, "/tokens 10")
        two = await generation.send(product.owner, endless, "/tokens 2000 /delay 0.05")
        await generation.drain()
        assert generation.active == 0
        assert (await get(product.owner, two.reply.id)).status == "interrupted"
        if (waited_for := (await get(product.owner, one.reply.id)).status) == "complete":
            break
    assert waited_for == "complete"


class FullDisk:
    """Takes the place of the store's `finish_reply`; refuses while `full`."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        self.attempts = 0
        self._finish = store.finish_reply
        monkeypatch.setattr(store, "finish_reply", self.finish_reply)

    async def finish_reply(self, *arguments: Any, **options: Any) -> Any:
        self.attempts += 1
        if self.full:
            raise StorageUnavailable("the database refused the write: database or disk is full")
        return await self._finish(*arguments, **options)


async def last_event(product: Product, reply_id: str) -> Event:
    events = product.services.generation.subscribe(product.owner, reply_id)
    return [event async for event in events][-1]


async def test_reply_that_ends_on_a_full_disk_is_saved_later(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = await product.conversation()
    generation, store = product.services.generation, product.services.store
    generation._runner.retry_seconds = 0.01
    disk = FullDisk(store, monkeypatch)
    handle = await generation.send(product.owner, conversation, "/say all of it")
    for _ in range(2):  # who watches to the end, and who comes later
        done = await last_event(product, handle.reply.id)
        assert (done.kind, done.text, done.status) == ("done", "all of it", "error")
        assert "disk full" in str(done.error)
    assert generation.running(product.owner, conversation) is None
    assert generation.active == 0
    with pytest.raises(ReplyUnsaved, match="disk full"):
        await generation.send(product.owner, conversation, "more")
    await eventually(lambda: disk.attempts > 5)
    disk.full = False
    await eventually(lambda: not generation._runner._trying)
    stored = await store.get_message(product.owner, handle.reply.id)
    assert (stored.status, stored.content, stored.error) == ("complete", "all of it", None)
    assert product.services.templating.text.decode(stored.token_ids, skip_special_tokens=True) == "all of it"
    assert (await product.reply(conversation, "/say more")).status == "complete"


@pytest.mark.parametrize("action", ["send", "stop"])
async def test_asking_again_saves_the_reply_at_once(
    product: Product, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    conversation = await product.conversation()
    generation, store = product.services.generation, product.services.store
    generation._runner.retry_seconds = 3600.0
    disk = FullDisk(store, monkeypatch)
    handle = await generation.send(product.owner, conversation, "/tokens 2000 /delay 0.05")
    text = await product.wait_for_text(handle.reply.id)
    with pytest.raises(ReplyUnsaved):
        await generation.stop(product.owner, handle.reply.id)
    disk.full = False
    if action == "send":
        assert (await product.reply(conversation, "/say on")).content == "on"
    else:
        await generation.stop(product.owner, handle.reply.id)
    stored = await store.get_message(product.owner, handle.reply.id)
    assert stored.status == "stopped"
    assert stored.content.startswith(text)
    assert stored.token_ids


async def test_end_of_the_app_tries_once_more_to_save(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = await product.conversation()
    generation, store = product.services.generation, product.services.store
    generation._runner.retry_seconds = 3600.0
    disk = FullDisk(store, monkeypatch)
    handle = await generation.send(product.owner, conversation, "/say kept")
    await last_event(product, handle.reply.id)
    await generation.drain()  # a restart of the engine does not wait for the disk
    disk.full = False
    await generation.close()
    assert not generation._runner._trying
    stored = await store.get_message(product.owner, handle.reply.id)
    assert (stored.status, stored.content) == ("complete", "kept")


async def test_reply_that_can_never_be_saved_frees_the_conversation(
    product: Product,
) -> None:
    conversation = await product.conversation()
    generation, store = product.services.generation, product.services.store
    handle = await generation.send(product.owner, conversation, "/tokens 2000 /delay 0.05")
    await product.wait_for_text(handle.reply.id)
    await store.recover_interrupted()  # gives it a final status behind the service's back
    await generation.stop(product.owner, handle.reply.id)
    assert not generation._runner._trying
    assert (await product.reply(conversation, "/say on")).content == "on"

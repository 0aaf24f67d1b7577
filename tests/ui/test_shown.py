"""Nothing that was shown before is painted over what came after it, in whatever order things happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import gradio as gr
import pytest

from app.events import Event
from app.ui import shown
from app.ui.handlers import ChatHandlers
from app.ui.screen import Update
from app.ui.shown import Pages, Shown
from db.store import Store
from tests.patience import PATIENCE
from tests.ui.test_handlers import asks, event, page, store

__all__ = ["page", "store"]  # fixtures


class Reply:
    """Events of a reply, given one by one to whoever subscribes."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, text: str) -> None:
        self.events.append(Event("snapshot", text, "streaming", len(text)))

    def end(self, text: str) -> None:
        self.events.append(Event("done", text, "stopped", len(text)))

    async def subscribe(self, owner: str, reply_id: str) -> AsyncIterator[Event]:
        place = 0
        while not place or self.events[place - 1].kind != "done":
            while place == len(self.events):  # noqa: ASYNC110 - as often as tests write
                await asyncio.sleep(0.01)
            yield self.events[place]
            place += 1


class Watched:
    """A page whose reader has sent a message and follows the reply."""

    def __init__(self, page: ChatHandlers, store: Store, owner: str, sent: Update, reply: Reply) -> None:
        self.page, self.store, self.owner, self.reply = page, store, owner, reply
        self.conversation = str(sent[page.parts.conversation])
        self.leaf = str(sent[page.parts.leaf])
        self.live = str(sent[page.parts.live])

    def follow(self, live: str | None = None) -> AsyncIterator[Update]:
        return self.page.follow(self.live if live is None else live, asks(self.owner))

    def tick(self) -> Awaitable[Update]:
        return self.page.tick("", self.conversation, self.leaf, self.live, "50", "", asks(self.owner))

    def paints(self, update: Update) -> bool:
        return self.page.parts.chatbot in update


@pytest.fixture
async def watched(page: ChatHandlers, store: Store, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(shown, "SENT_SECONDS", 2 * PATIENCE)
    generation: Any = page.services.generation
    reply = Reply()
    generation.subscribe = reply.subscribe
    generation.growing_context = lambda owner, reply_id: None
    me = (await store.create_user("me", "x")).id
    sent = await page.send("Hello", "", "", "", asks(me))
    return Watched(page, store, me, sent, reply)


async def reader_leaves(watched: Watched, how: str) -> Update:
    """Whatever shows something else than the reply that is followed."""
    page, ask = watched.page, asks(watched.owner)
    if how == "delete":
        return await page.delete_chat(watched.conversation, "", event(id=watched.conversation), ask)
    if how == "open":
        other = await watched.store.create_conversation(watched.owner)
        return await page.open_chat("", event(id=other.id), ask)
    if how == "version":
        own, _ = await watched.store.path(watched.owner, watched.conversation)
        await watched.store.add_turn(watched.owner, watched.conversation, None, "Hello again", [1], "m")
        return await page.show_version(watched.conversation, event(id=own.id, step=1), ask)
    if how == "load":
        return await page.load("", ask)
    return await page.new_chat("", ask)


LEAVES = ["delete", "open", "version", "load", "new"]


@pytest.mark.parametrize("how", LEAVES)
async def test_a_change_waits_for_what_is_being_sent_and_nothing_is_painted_after_it(
    watched: Watched, how: str
) -> None:
    updates = watched.follow()
    watched.reply.write("A story")
    assert watched.paints(await anext(updates))  # given to Gradio, and not sent before the next is asked for
    leaving = asyncio.create_task(reader_leaves(watched, how))
    await asyncio.sleep(0.2)
    assert not leaving.done()
    watched.reply.write("A story of a lighthouse")
    left = [update async for update in updates]
    assert not any(map(watched.paints, left))
    async with asyncio.timeout(PATIENCE):
        assert watched.paints(await leaving)


@pytest.mark.parametrize("how", LEAVES)
async def test_following_that_begins_late_paints_nothing(watched: Watched, how: str) -> None:
    await reader_leaves(watched, how)
    watched.reply.write("A story")
    (nothing,) = [update async for update in watched.follow()]
    assert not watched.paints(nothing)


async def test_a_reply_deleted_at_its_very_end_stays_away(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last picture of a reply that was stopped is made while its conversation is deleted."""
    context = watched.page.screen.context
    leaving: list[asyncio.Task[Update]] = []

    async def slow(*arguments: Any) -> Update:
        update = await context(*arguments)
        leaving.append(asyncio.create_task(reader_leaves(watched, "delete")))
        await asyncio.wait(leaving)
        return update

    monkeypatch.setattr(watched.page.screen, "context", slow)
    await watched.store.finish_reply(watched.owner, watched.leaf, "stopped", "A story", [2])
    watched.reply.end("A story")
    (nothing,) = [update async for update in watched.follow()]
    assert not watched.paints(nothing)
    assert watched.paints(await leaving[0])


@pytest.mark.parametrize("case", ["ends", "fails", "left", "late", "nothing"])
async def test_gradio_repeats_the_last_update_of_a_generator_so_it_is_of_now_or_empty(
    watched: Watched, case: str
) -> None:
    if case == "fails":
        await watched.store.delete_conversation(watched.owner, watched.conversation)
    if case == "late":
        await reader_leaves(watched, "new")
    watched.reply.write("A story")
    updates = watched.follow("" if case == "nothing" else None)
    seen = [await anext(updates)]
    if case == "left":
        watched.page.pages.of(asks(watched.owner).session_hash).tell("")
    await watched.store.create_conversation(watched.owner)
    watched.reply.end("A story")
    seen += [update async for update in updates]
    if case in ("ends", "fails"):
        assert seen[-1][watched.page.parts.live] == ""
    else:
        assert seen[-1] == {watched.page.parts.notice: gr.skip()}
    assert any(map(watched.paints, seen)) == (case in ("ends", "left"))


async def test_a_tick_leaves_a_followed_reply_alone_and_helps_one_that_is_not(watched: Watched) -> None:
    assert watched.paints(await watched.tick())  # nothing follows it: the event got lost
    told = await watched.tick()
    watched.live = told[watched.page.parts.live]
    updates = watched.follow()
    watched.reply.write("A story")
    await anext(updates)
    assert not watched.paints(await watched.tick())
    await updates.aclose()  # type: ignore[attr-defined]
    assert watched.paints(await watched.tick())


async def test_a_tick_that_comes_before_following_has_begun_does_not_prevent_it(watched: Watched) -> None:
    told = await watched.tick()
    updates = watched.follow()
    watched.reply.write("A story")
    assert watched.paints(await anext(updates))
    assert not watched.paints(await watched.tick())
    # What the page asks for next takes its place.
    later = watched.follow(told[watched.page.parts.live])
    assert watched.paints(await anext(later))
    watched.reply.write("A story of a lighthouse")
    (nothing,) = [update async for update in updates]
    assert not watched.paints(nothing)
    assert watched.paints(await anext(later))


async def test_a_page_that_is_gone_holds_up_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "SENT_SECONDS", 0.05)
    open_page = Shown()
    with open_page.painting():
        await open_page.change("")


async def test_pages_are_forgotten_only_when_there_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "MAX_PAGES", 3)
    pages = Pages()
    first = pages.of("first")
    for name in ("second", "third", "first", "fourth"):
        pages.of(name)
    assert pages.of("first") is first
    assert pages.of("second").changes == 0
    assert len(pages._pages) == 3

"""Handlers against the real store: what belongs to somebody else is not there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import httpx
import pytest

from app.context import ContextMeter
from app.errors import ConversationBusy
from app.ui.chat import _layout
from app.ui.guard import BROKEN, GONE
from app.ui.handlers import ChatHandlers
from app.ui.render import notice
from db.database import Database
from db.errors import StorageUnavailable
from db.store import Store
from db.transfer import NewConversation, NewTurn
from tests.patience import PATIENCE
from tests.ui.support import Product


class Generation:
    """Commits turns as the real service does, and can refuse. answer: the reply at once; None: no reply."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.refuse: Exception | None = None
        self.answer: str | None = None

    async def send(self, owner: str, conversation_id: str, content: str, parent_id: str | None) -> None:
        if self.refuse:
            raise self.refuse
        _, reply = await self.store.add_turn(owner, conversation_id, parent_id, content, [1], "m")
        if self.answer is not None:
            await self.store.finish_reply(owner, reply.id, "complete", self.answer, [2])

    def running(self, owner: str, conversation_id: str) -> None:
        return None

    async def stop_conversation(self, owner: str, conversation_id: str) -> None:
        await self.store.get_conversation(owner, conversation_id)

    async def context(self, owner: str, conversation_id: str, leaf_id: str) -> ContextMeter:
        await self.store.path(owner, conversation_id, leaf_id)
        return ContextMeter(10, 100, 0.5, 5, 0, None)

    async def continue_reply(self, owner: str, conversation_id: str, reply_id: str) -> None:
        await self.store.path(owner, conversation_id, reply_id)

    regenerate = continue_reply


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    database = Database(tmp_path / "chat.sqlite3", tmp_path / "backups")
    database.migrate()
    yield Store(database)
    await database.aclose()


@pytest.fixture
async def page(store: Store) -> ChatHandlers:
    status = SimpleNamespace(state="ready", detail="")
    services: Any = SimpleNamespace(
        store=store,
        generation=Generation(store),
        supervisor=SimpleNamespace(status=status, max_reply_tokens=777),
    )
    with gr.Blocks(analytics_enabled=False):
        _, parts = _layout()
    return ChatHandlers(services, parts)


def asks(owner: str) -> Any:
    return SimpleNamespace(username=owner, session_hash=f"page of {owner}")


def event(**data: Any) -> Any:
    return gr.EventData(None, data)


async def test_the_first_message_makes_the_conversation(page: ChatHandlers, store: Store) -> None:
    me = (await store.create_user("me", "x")).id
    update = await page.send("  Hello\nthere ", "", "", "", asks(me))
    (conversation,) = await store.list_conversations(me)
    assert update[page.parts.conversation] == conversation.id
    assert update[page.parts.composer]["value"] == ""
    user, reply = await store.path(me, conversation.id)
    assert user.content == "Hello\nthere"
    assert update[page.parts.live].startswith(f"{reply.id}:")
    assert (update[page.parts.composer]["stop_btn"], update[page.parts.composer]["submit_btn"]) == (
        True,
        False,
    )


async def test_a_reply_that_has_ended_before_the_page_is_drawn_can_be_answered(
    page: ChatHandlers, store: Store
) -> None:
    me = (await store.create_user("me", "x")).id
    page.services.generation.answer = "Yes."  # type: ignore[attr-defined]
    update = await page.send("Ready?", "", "", "", asks(me))
    assert update[page.parts.live] == ""
    composer = update[page.parts.composer]
    assert (composer["value"], composer["stop_btn"], composer["submit_btn"]) == ("", False, True)


async def test_the_longest_reply_is_the_served_model_s(page: ChatHandlers, store: Store) -> None:
    me = (await store.create_user("me", "x")).id
    made = await page.send("Hello", "", "", "", asks(me))
    for number in (777, 2000):  # a model may be changed while the app runs
        page.services.supervisor.max_reply_tokens = number  # type: ignore[misc]
        for update in (
            await page.load("", asks(me)),
            await page.new_chat("", asks(me)),
            await page.open_chat("", event(id=made[page.parts.conversation]), asks(me)),
        ):
            assert f'data-longest="{number}"' in update[page.parts.top]


async def test_a_refused_first_message_leaves_nothing_and_keeps_the_text(
    page: ChatHandlers, store: Store
) -> None:
    me = (await store.create_user("me", "x")).id
    page.services.generation.refuse = ConversationBusy()  # type: ignore[attr-defined]
    update = await page.send("Hello", "", "", "", asks(me))
    assert list(update) == [page.parts.notice]
    assert "still being written" in update[page.parts.notice]
    assert await store.list_conversations(me) == []


async def test_not_ready_is_said_until_the_engine_is(page: ChatHandlers, store: Store) -> None:
    me = (await store.create_user("me", "x")).id
    status: Any = page.services.supervisor.status
    status.state = "starting"
    said = (await page.send("Hello", "", "", "", asks(me)))[page.parts.notice]
    assert "not ready yet" in said
    assert page.parts.notice not in page.engine(said)
    status.state = "ready"
    assert page.engine(said) == {page.parts.banner: "", page.parts.notice: ""}
    assert page.engine(notice(GONE)) == {page.parts.banner: ""}


async def test_an_unexpected_error_is_logged_and_not_shown(
    page: ChatHandlers, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    me = (await store.create_user("me", "x")).id
    page.services.generation.refuse = KeyError("secret detail")  # type: ignore[attr-defined]
    update = await page.send("Hello", "", "", "", asks(me))
    assert BROKEN in update[page.parts.notice]
    assert "secret detail" not in update[page.parts.notice]
    assert "secret detail" in caplog.text


async def test_where_the_database_is_is_for_the_log(
    page: ChatHandlers, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    me = (await store.create_user("me", "x")).id

    async def away(*arguments: Any, **options: Any) -> Any:
        raise StorageUnavailable("PostgreSQL (chat at secret.host) does not answer")

    for name in ("create_conversation", "get_message", "list_conversations"):
        monkeypatch.setattr(store, name, away)
    (followed,) = [update async for update in page.follow("some-reply:50:1", asks(me))]
    for update in (
        await page.send("Hello", "", "", "", asks(me)),
        await page.search("", "", asks(me)),
        followed,
    ):
        assert "The history cannot be read or written now." in update[page.parts.notice]
        assert "secret.host" not in str(update)
    assert caplog.text.count("secret.host") == 3


async def test_a_stranger_gets_nothing(page: ChatHandlers, store: Store) -> None:
    me, stranger = [(await store.create_user(name, "x")).id for name in ("me", "stranger")]
    await page.send("My secret", "", "", "", asks(me))
    (mine,) = await store.list_conversations(me)
    path = await store.path(me, mine.id)
    leaf = path[-1].id
    ask = asks(stranger)
    updates = [
        await page.open_chat("", event(id=mine.id), ask),
        await page.rename_chat(mine.id, "", event(id=mine.id, title="Taken"), ask),
        await page.delete_chat(mine.id, "", event(id=mine.id), ask),
        await page.restore_chat("", "", event(id=mine.id), ask),
        await page.show_version(mine.id, event(id=leaf, step=1), ask),
        await page.archive_chat(mine.id, "", event(id=mine.id), ask),
        await page.unarchive_chat(mine.id, "", event(id=mine.id), ask),
        await page.refresh("", mine.id, ask),
        await page.show_earlier(mine.id, leaf, "50", ask),
        await page.measure(mine.id, leaf, ask),
        await page.regenerate_reply(mine.id, event(id=leaf), ask),
        await page.continue_reply(mine.id, event(id=leaf), ask),
        await page.edit_message(mine.id, leaf, "50", gr.EditData(None, _edit(0, "x")), ask),
    ]
    for update in updates:
        assert list(update) == [page.parts.notice]
        assert GONE in update[page.parts.notice]
    ticked = await page.tick("", mine.id, leaf, f"{leaf}:50:1", "50", "secret", ask)
    assert GONE in ticked[page.parts.notice]
    assert "My secret" not in str(ticked)
    assert "My secret" not in str(await page.search("secret", "", ask))
    assert "My secret" not in str(await page.load(mine.id, ask))
    followed = [update async for update in page.follow(f"{leaf}:1", ask)]
    assert "My secret" not in str(followed)
    assert (await store.get_conversation(me, mine.id)).title == "My secret"


def _edit(index: int, value: str) -> dict[str, Any]:
    return {"index": index, "value": value, "previous_value": ""}


async def test_nobody_signed_in_gets_nothing(page: ChatHandlers) -> None:
    for update in (
        await page.load("", asks("")),
        await page.new_chat("", asks("")),
        await page.send("Hello", "", "", "", asks("")),
    ):
        assert list(update) == [page.parts.notice]


@pytest.mark.ui
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/config"),
        ("GET", "/gradio_api/info"),
        ("POST", "/gradio_api/queue/join"),
        ("POST", "/gradio_api/upload"),
        ("GET", "/gradio_api/file=/etc/passwd"),
    ],
)
def test_gradios_own_routes_ask_who_it_is(served: Product, method: str, path: str) -> None:
    accept = {"accept": "application/json"}
    answer = httpx.request(method, served.url + path, headers=accept, json={}, timeout=PATIENCE)
    assert answer.status_code in (401, 403, 404, 422), answer.text
    assert "root:" not in answer.text


async def test_a_tick_shows_what_another_tab_did(page: ChatHandlers, store: Store) -> None:
    me = (await store.create_user("me", "x")).id
    await page.send("One", "", "", "", asks(me))
    (conversation,) = await store.list_conversations(me)
    old = (await store.path(me, conversation.id))[-1]
    await store.finish_reply(me, old.id, "complete", "Hello", [1])
    shown = (conversation.id, old.id, "", "50", "", asks(me))
    assert list(await page.tick("", *shown)) == [page.parts.banner]
    _, reply = await store.add_turn(me, conversation.id, old.id, "Two", [1], "m")
    update = await page.tick("", *shown)
    assert update[page.parts.leaf] == reply.id
    assert update[page.parts.live].startswith(f"{reply.id}:50:")


async def test_a_tick_never_shows_what_was_before_a_change(
    page: ChatHandlers, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = (await store.create_user("me", "x")).id
    await page.send("One", "", "", "", asks(me))
    (conversation,) = await store.list_conversations(me)
    thread = page.screen.thread

    async def slow(*arguments: Any, **options: Any) -> Any:
        update = await thread(*arguments, **options)
        monkeypatch.undo()
        await page.new_chat("", asks(me))  # the reader goes elsewhere meanwhile
        return update

    monkeypatch.setattr(page.screen, "thread", slow)
    assert list(await page.tick("", conversation.id, "", "x:50:1", "50", "", asks(me))) == [page.parts.banner]


async def test_versions_far_up_stay_in_sight(page: ChatHandlers, store: Store) -> None:
    me = (await store.create_user("me", "x")).id
    turns = [NewTurn("assistant" if i % 2 else "user", f"m{i}", i - 1 if i else None) for i in range(200)]
    (own,) = await store.import_conversations(me, [NewConversation("long", tuple(turns))])
    path = await store.path(me, own)
    update = await page.open_chat("", event(id=own), asks(me))
    assert len(update[page.parts.chatbot]) == 50
    assert "show_earlier" in str(update[page.parts.chatbot][0])
    update = await page.show_earlier(own, path[-1].id, update[page.parts.span], asks(me))
    assert len(update[page.parts.chatbot]) == 100
    update = await page.show_version(own, event(id=path[10].id, step=0), asks(me))
    assert path[10].content in str(update[page.parts.chatbot])
    update = await page.show_earlier(own, path[-1].id, "1000", asks(me))
    assert len(update[page.parts.chatbot]) == 200
    assert "show_earlier" not in str(update[page.parts.chatbot][0])

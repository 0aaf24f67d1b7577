"""Handlers against the real store: what belongs to somebody else is not there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import httpx
import pytest

from app.errors import ConversationBusy
from app.ui.chat import _layout
from app.ui.guard import BROKEN, GONE
from app.ui.handlers import ChatHandlers
from app.ui.render import notice
from db.database import Database
from db.store import Store
from tests.ui.support import Product


class Generation:
    """Commits turns as the real service does, writes no reply, and can refuse."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.refuse: Exception | None = None

    async def send(self, owner: str, conversation_id: str, content: str, parent_id: str | None) -> None:
        if self.refuse:
            raise self.refuse
        await self.store.add_turn(owner, conversation_id, parent_id, content, [1], "m")

    def running(self, owner: str, conversation_id: str) -> None:
        return None


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
        store=store, generation=Generation(store), supervisor=SimpleNamespace(status=status)
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
        await page.edit_message(mine.id, leaf, gr.EditData(None, _edit(0, "x")), ask),
    ]
    for update in updates:
        assert list(update) == [page.parts.notice]
        assert GONE in update[page.parts.notice]
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
    answer = httpx.request(method, served.url + path, headers={"accept": "application/json"}, json={})
    assert answer.status_code in (401, 403, 404, 422), answer.text
    assert "root:" not in answer.text

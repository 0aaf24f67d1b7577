from typing import Any

import pytest

from db import Store
from db.errors import InvalidInput, NotFound
from db.views import ConversationView, UserView
from tests.db.helpers import exchange


async def test_a_conversation_reads_back_as_it_was_made(store: Store, owner: UserView) -> None:
    settings = {"temperature": 0.5, "nested": {"list": [1, None, "ü"]}}
    made = await store.create_conversation(owner.id, " My\ntitle ", "Be brief.\n", settings)
    assert made == await store.get_conversation(owner.id, made.id)
    assert (made.title, made.system_prompt, made.settings) == ("My title", "Be brief.\n", settings)
    assert (made.user_id, made.active_leaf_id, made.deleted_at) == (owner.id, None, None)
    assert made.created_at == made.updated_at
    plain = await store.create_conversation(owner.id)
    assert (plain.title, plain.system_prompt, plain.settings) == ("", "", {})


@pytest.mark.parametrize("settings", [{"x": float("nan")}, {"x": object()}])
async def test_bad_settings_are_refused(store: Store, owner: UserView, settings: dict[str, Any]) -> None:
    made = await store.create_conversation(owner.id)
    with pytest.raises(InvalidInput, match="settings: is not JSON"):
        await store.create_conversation(owner.id, settings=settings)
    with pytest.raises(InvalidInput, match="settings: is not JSON"):
        await store.set_conversation_settings(owner.id, made.id, settings)
    assert await store.list_conversations(owner.id) == [made]


async def test_an_unknown_owner_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound, match="user not found"):
        await store.create_conversation("nobody")


async def test_rename_and_settings(store: Store, owner: UserView) -> None:
    made = await store.create_conversation(owner.id, "old")
    renamed = await store.rename_conversation(owner.id, made.id, "new")
    assert renamed.title == "new"
    # Renaming is no activity, so the list keeps its order.
    assert renamed.updated_at == made.updated_at
    changed = await store.set_conversation_settings(owner.id, made.id, {"top_p": 0.9})
    assert changed.settings == {"top_p": 0.9}
    assert await store.get_conversation(owner.id, made.id) == changed
    for title in ("", "  ", "x" * 201):
        with pytest.raises(InvalidInput, match="title: "):
            await store.rename_conversation(owner.id, made.id, title)
    with pytest.raises(NotFound, match="conversation not found"):
        await store.rename_conversation(owner.id, "missing", "x")


async def test_deleted_conversations_are_gone_until_restored(store: Store, owner: UserView) -> None:
    made = await store.create_conversation(owner.id, "precious")
    user, reply = await exchange(store, owner.id, made.id, None, "a question", "an answer")
    before = await store.get_conversation(owner.id, made.id)
    await store.delete_conversation(owner.id, made.id)
    calls = {
        "get": lambda: store.get_conversation(owner.id, made.id),
        "rename": lambda: store.rename_conversation(owner.id, made.id, "x"),
        "settings": lambda: store.set_conversation_settings(owner.id, made.id, {}),
        "delete": lambda: store.delete_conversation(owner.id, made.id),
        "path": lambda: store.path(owner.id, made.id),
        "path to": lambda: store.path(owner.id, made.id, reply.id),
        "message": lambda: store.get_message(owner.id, reply.id),
        "siblings": lambda: store.siblings(owner.id, reply.id),
        "turn": lambda: store.add_turn(owner.id, made.id, reply.id, "more", [], None),
        "reply": lambda: store.add_reply(owner.id, made.id, user.id, None),
        "tokens": lambda: store.set_user_tokens(owner.id, user.id, []),
        "branch": lambda: store.change_conversation(owner.id, made.id, active_message_id=user.id),
        "leaf": lambda: store.set_active_leaf(owner.id, made.id, user.id),
    }
    for call in calls.values():
        with pytest.raises(NotFound):
            await call()
    assert await store.list_conversations(owner.id) == []
    assert await store.list_conversations(owner.id, "precious") == []
    assert await store.list_conversations(owner.id, "answer") == []
    (deleted,) = await store.list_conversations(owner.id, deleted=True)
    assert deleted.id == made.id
    assert deleted.deleted_at is not None
    assert await store.restore_conversation(owner.id, made.id) == before
    assert await store.restore_conversation(owner.id, made.id) == before
    assert [message.id for message in await store.path(owner.id, made.id)] == [user.id, reply.id]
    assert await store.list_conversations(owner.id, "answer") == [before]


async def test_the_latest_activity_comes_first(store: Store, owner: UserView) -> None:
    made = [await store.create_conversation(owner.id, f"number {number}") for number in range(4)]
    assert await store.list_conversations(owner.id) == made[::-1]
    await exchange(store, owner.id, made[1].id, None, "hello", "hi")
    listed = await store.list_conversations(owner.id)
    assert [item.id for item in listed] == [made[i].id for i in (1, 3, 2, 0)]


@pytest.mark.parametrize("query", [None, "number"])
async def test_pages_cover_the_list_once(store: Store, owner: UserView, query: str | None) -> None:
    made = [await store.create_conversation(owner.id, f"number {number}") for number in range(11)]
    pages: list[list[ConversationView]] = []
    before = None
    while page := await store.list_conversations(owner.id, query, limit=4, before=before):
        pages.append(page)
        before = page[-1].cursor
    assert [len(page) for page in pages] == [4, 4, 3]
    assert [item for page in pages for item in page] == made[::-1]


async def test_bad_pages_are_refused(store: Store, owner: UserView) -> None:
    for limit in (0, -1, 1001):
        with pytest.raises(InvalidInput, match="limit: must be from 1 to 1000"):
            await store.list_conversations(owner.id, limit=limit)
    for before in ("", "x", "12", ":", "12:", "-1:a", "1" * 30 + ":a", "²:a"):
        with pytest.raises(InvalidInput, match="before: is not the cursor of a conversation"):
            await store.list_conversations(owner.id, before=before)

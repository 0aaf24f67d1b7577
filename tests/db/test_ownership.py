"""Nobody reaches another user's records: checked for every method of the store by its signature alone.

A method that takes `owner_id` is called as a stranger, with one of the owner's ids at a time and the
stranger's own for the rest. It must answer just as for an id that does not exist, and change nothing. A new
method is covered as soon as it exists: an unknown argument, or a new method without an owner, fails here
until somebody has thought about it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from db import Database, Store
from db.errors import NotFound
from db.repository import message_view
from db.transfer import NewConversation, NewTurn
from db.views import ConversationView, MessageView
from tests.db.helpers import dump, exchange

# Their subject is not a user's record, or it is the look-up of the user in question.
WITHOUT_OWNER = {
    "create_user",
    "create_first_user",
    "user_by_name",
    "user_by_id",
    "count_users",
    "set_password_hash",
    "change_user",
    "disable_user",
    "enable_user",
    "set_admin",
    "list_users",
    "set_quota",
    "list_quotas",
    "create_invitation",
    "create_reset",
    "open_link",
    "accept_invitation",
    "accept_reset",
    "list_links",
    "revoke_link",
    "create_session",
    "session_user",
    "session_and_user",
    "delete_session",
    "api_key_user",
    "recover_interrupted",
    "discard_unfinished_imports",
    "resumable_replies",
    "get_setting",
    "set_setting",
    "add_audit",
    "list_audit",
    "calibration_texts",
    "prune_audit",
}
IDS = (
    "conversation_id",
    "parent_id",
    "leaf_id",
    "message_id",
    "active_message_id",
    "user_message_id",
    "reply_id",
    "key_id",
    "session_id",
)
VALUES: dict[str, Any] = {
    "title": "new title",
    "system_prompt": "new prompt",
    "settings": {"new": True},
    "query": "mine",
    "limit": 10,
    "conversations": [NewConversation("new title", (NewTurn("user", "new content", None),))],
    "before": None,
    "deleted": False,
    "archived": False,
    "rating": 1,
    "content": "new content",
    "user_token_ids": [1],
    "token_ids": [1, 2],
    "model": "new model",
    "stats": {},
    "status": "complete",
    "finish_reason": None,
    "error": None,
    "name": "new name",
    "key_hash": "new hash",
    "given": True,
    "but": None,
}


@dataclass
class World:
    """A user with a record of every kind, each of which says whose it is."""

    owner_id: str
    ids: dict[str, str] = field(default_factory=dict)

    @classmethod
    async def create(cls, store: Store, name: str) -> "World":
        user = await store.create_user(name, f"{name} password")
        conversation = await store.create_conversation(user.id, f"mine, says {name}", settings={"of": name})
        first, reply = await exchange(store, user.id, conversation.id, None, f"mine: {name}", f"for {name}")
        second, pending = await store.add_turn(user.id, conversation.id, reply.id, f"more {name}", [1], name)
        key = await store.create_api_key(user.id, f"key of {name}", f"hash of {name}")
        session = await store.create_session(user.id, f"token of {name}", 2**52)
        return cls(
            user.id,
            {
                "conversation_id": conversation.id,
                "parent_id": reply.id,
                "leaf_id": reply.id,
                "message_id": second.id,
                "active_message_id": first.id,
                "user_message_id": first.id,
                "reply_id": pending.id,
                "key_id": key.id,
                "session_id": session.id,
            },
        )


def methods(store_class: type[Store]) -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for name, method in inspect.getmembers(store_class, inspect.iscoroutinefunction)
        if not name.startswith("_")
    }


def parameters(method: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(method).parameters)[1:]


def owned_methods(store_class: type[Store]) -> list[str]:
    return [name for name, method in methods(store_class).items() if "owner_id" in parameters(method)]


async def call(store: Store, name: str, owner_id: str, ids: dict[str, str]) -> Any:
    arguments = {}
    for parameter in parameters(getattr(type(store), name)):
        if parameter == "owner_id":
            arguments[parameter] = owner_id
        elif parameter in IDS:
            arguments[parameter] = ids[parameter]
        else:
            assert parameter in VALUES, f"say here what to pass for {name}({parameter}=...)"
            arguments[parameter] = VALUES[parameter]
    return await getattr(store, name)(**arguments)


async def check_method(database: Database, store: Store, name: str, owner: World, stranger: World) -> None:
    """Fail when the method lets the stranger see or change what is the owner's."""
    used = [parameter for parameter in parameters(getattr(type(store), name)) if parameter in IDS]
    before = dump(database)
    for foreign in used:
        with pytest.raises(NotFound) as hidden:
            await call(store, name, stranger.owner_id, stranger.ids | {foreign: owner.ids[foreign]})
        with pytest.raises(NotFound) as missing:
            await call(store, name, stranger.owner_id, stranger.ids | {foreign: "missing"})
        assert str(hidden.value) == str(missing.value)
    if used:
        with pytest.raises(NotFound):
            await call(store, name, stranger.owner_id, owner.ids)
    assert dump(database) == before

    # The same call is fine with the caller's own ids, and shows nothing of the other.
    if name == "reopen_reply":  # which is for a reply that has ended
        await store.finish_reply(stranger.owner_id, stranger.ids["reply_id"], "stopped", "text", [1])
    result = repr(await call(store, name, stranger.owner_id, stranger.ids))
    for secret in ("Ada", owner.owner_id, *owner.ids.values()):
        assert secret not in result
    after = dump(database)
    for table, rows in before.items():
        assert {row for row in rows if owner.owner_id in row} <= set(after[table])


@pytest.fixture
async def worlds(store: Store) -> tuple[World, World]:
    return await World.create(store, "Ada"), await World.create(store, "Eve")


def test_every_method_is_known() -> None:
    assert set(methods(Store)) == WITHOUT_OWNER | set(owned_methods(Store))
    assert len(owned_methods(Store)) >= 20


@pytest.mark.parametrize("name", owned_methods(Store))
async def test_a_stranger_finds_nothing(
    database: Database, store: Store, worlds: tuple[World, World], name: str
) -> None:
    await check_method(database, store, name, *worlds)


class LeakyStore(Store):
    """What the check must find: look-ups and changes that forget the owner."""

    async def get_message(self, owner_id: str, message_id: str) -> MessageView:
        owner = next(row[2] for row in dump(self._database)["messages"] if message_id in row[:2])
        return await self._database.read(lambda session: message_view(session, owner, message_id))

    async def siblings(self, owner_id: str, message_id: str) -> list[str]:
        return [row[1] for row in dump(self._database)["messages"]]

    async def list_conversations(self, owner_id: str, query: str | None = None) -> Any:
        return dump(self._database)["conversations"]

    async def rename_conversation(self, owner_id: str, conversation_id: str, title: str) -> ConversationView:
        everybody = text("UPDATE conversations SET title = :title")
        await self._database.write(lambda session: session.execute(everybody, {"title": title}) and None)
        return await super().get_conversation(owner_id, conversation_id)


@pytest.mark.parametrize(
    ("name", "symptom"),
    [
        ("get_message", "DID NOT RAISE"),
        ("siblings", "DID NOT RAISE"),
        ("list_conversations", "not in"),
        ("rename_conversation", "new title"),
    ],
)
async def test_the_check_finds_a_leak(
    database: Database, worlds: tuple[World, World], name: str, symptom: str
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=symptom):
        await check_method(database, LeakyStore(database), name, *worlds)


async def test_a_new_database_is_not_shared(tmp_path: Path, worlds: tuple[World, World]) -> None:
    other = Database(tmp_path / "other" / "chat.sqlite3")
    other.migrate()
    with pytest.raises(NotFound):
        await Store(other).get_conversation(worlds[0].owner_id, worlds[0].ids["conversation_id"])
    await other.aclose()

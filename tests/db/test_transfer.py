"""Conversations that are taken in appear all at once, or not at all."""

from collections.abc import Sequence
from typing import Any

import pytest

from db import Database, Store
from db.errors import InvalidInput, NotFound
from db.transfer import NewConversation, NewTurn
from tests.db.helpers import check_integrity, dump

TALK = (
    NewTurn("user", "What is C++?", None, created_at=5),
    NewTurn("assistant", "A language.", 0, rating=1, model="m"),
    NewTurn("user", "Older?", 1),
    NewTurn("assistant", "Than some.", 2, status="interrupted"),
    NewTurn("assistant", "Another.", 0),
)


async def test_a_tree_comes_back_as_it_was(store: Store, database: Database) -> None:
    me = (await store.create_user("me", "x")).id
    new = NewConversation(
        " On\nlanguages ", TALK, "Be brief.", {"temperature": 0.5}, active=1, created_at=3, archived=True
    )
    (own,) = await store.import_conversations(me, [new])
    conversation = await store.get_conversation(me, own)
    assert (conversation.title, conversation.system_prompt) == ("On languages", "Be brief.")
    assert conversation.settings == {"temperature": 0.5}
    assert (conversation.created_at, conversation.updated_at) == (3, 3)
    assert conversation.archived_at
    path = await store.path(me, own)
    assert [message.content for message in path] == ["What is C++?", "A language.", "Older?", "Than some."]
    assert [message.status for message in path][2:] == ["complete", "interrupted"]
    assert (path[0].created_at, path[1].rating, path[1].model, path[1].sibling_count) == (5, 1, "m", 2)
    for query in ("C++", "langu", "Another"):
        assert [found.id for found in await store.list_conversations(me, query)] == [own]
    assert await store.list_conversations(me, archived=False) == []
    check_integrity(database)


async def test_a_title_is_made_of_the_first_message(store: Store) -> None:
    me = (await store.create_user("me", "x")).id
    ids = await store.import_conversations(me, [NewConversation("", TALK), NewConversation("", ())])
    titles = [(await store.get_conversation(me, own)).title for own in ids]
    assert titles == ["What is C++?", ""]
    assert await store.path(me, ids[1]) == []


@pytest.mark.parametrize(
    "messages",
    [
        (NewTurn("assistant", "first", None),),
        (NewTurn("user", "x", None), NewTurn("user", "x", 0)),
        (NewTurn("user", "x", None), NewTurn("assistant", "x", 1)),
        (NewTurn("user", "x", None, rating=1),),
        (NewTurn("user", "x", None, status="streaming"),),
    ],
)
async def test_what_is_no_conversation_is_refused_whole(
    store: Store, database: Database, messages: Sequence[Any]
) -> None:
    me = (await store.create_user("me", "x")).id
    before = dump(database)
    with pytest.raises(InvalidInput):
        await store.import_conversations(
            me, [NewConversation("good", TALK), NewConversation("", (*messages,))]
        )
    assert dump(database) == before


async def test_nothing_is_left_of_an_import_that_fails_in_the_middle(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = (await store.create_user("me", "x")).id
    await store.import_conversations(me, [NewConversation("kept", TALK)])
    before = dump(database)
    monkeypatch.setattr("db.transfer._BATCH_CHARACTERS", 10)
    shown: list[int] = []
    calls = 0
    add_all = store.import_conversations.__globals__["_add_all"]

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the lights went out")
        return add_all(*arguments)

    monkeypatch.setattr("db.transfer._add_all", failing)
    with pytest.raises(RuntimeError):
        await store.import_conversations(me, [NewConversation(f"new {i}", TALK) for i in range(4)])
    shown.append(len(await store.list_conversations(me)))
    assert shown == [1]
    assert dump(database) == before

    # Cut off by the end of the process, nothing could be removed: nobody sees it, and the next import does.
    def stays(*_: Any) -> None:
        pass

    discard = store.import_conversations.__globals__["_discard"]
    monkeypatch.setattr("db.transfer._discard", stays)
    calls = 0
    with pytest.raises(RuntimeError):
        await store.import_conversations(me, [NewConversation(f"new {i}", TALK) for i in range(4)])
    assert dump(database) != before
    assert len(await store.list_conversations(me)) == 1
    assert await store.list_conversations(me, deleted=True) == []
    monkeypatch.setattr("db.transfer._discard", discard)
    await store.import_conversations(me, [])
    assert dump(database) == before


async def test_nobody_takes_in_for_somebody_who_is_not_there(store: Store, database: Database) -> None:
    with pytest.raises(NotFound):
        await store.import_conversations("missing", [NewConversation("x", TALK)])
    check_integrity(database)

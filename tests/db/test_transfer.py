"""Conversations that are taken in appear all at once, or not at all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update
from sqlalchemy.orm import Session

from db import Database, Store
from db.errors import InvalidInput, NotFound
from db.maintenance import export_owner
from db.models import Conversation
from db.repository import execute
from db.transfer import NewConversation, NewTurn
from tests.db.conftest import StartPython
from tests.db.helpers import check_integrity, dump, only_sqlite

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
    assert len((await export_owner(database, me))["conversations"]) == 1
    monkeypatch.setattr("db.transfer._discard", discard)
    await store.import_conversations(me, [])
    assert dump(database) == before


LONG = tuple(
    NewTurn(("user", "assistant")[place % 2], f"{place} " + "word " * 20, place - 1 if place else None)
    for place in range(1000)
)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("db.transfer._BATCH_CHARACTERS", 5_000)


def transactions(database: Database, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each transaction of the writer changes from now on."""
    sizes: list[int] = []
    write = database.write

    async def counting(fn: Any) -> Any:
        def counted(session: Session) -> Any:
            count = text("SELECT total_changes()")
            before = session.scalar(count)
            result = fn(session)
            session.flush()
            sizes.append((session.scalar(count) or 0) - (before or 0))
            return result

        return await write(counted)

    monkeypatch.setattr(database, "write", counting)
    return sizes


@only_sqlite
@pytest.mark.usefixtures("small_batches")
async def test_no_transaction_takes_in_or_removes_much(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation of any length is written, and removed again, in pieces between which others write."""
    me = (await store.create_user("me", "x")).id
    sizes = transactions(database, monkeypatch)
    ids = await store.import_conversations(
        me, [NewConversation("a", TALK), NewConversation("long", LONG), NewConversation("b", TALK)]
    )
    assert [len(await store.path(me, own)) for own in ids] == [2, 1000, 2]
    path = await store.path(me, ids[1])
    assert [message.content for message in path] == [turn.content for turn in LONG]
    check_integrity(database)
    assert len(sizes) > 20
    assert max(sizes) < sum(sizes) / 10

    await database.write(
        lambda session: execute(session, update(Conversation).values(deleted_at=-1, title="cut off"))
    )
    sizes.clear()
    assert await store.discard_unfinished_imports() == 3
    assert len(sizes) > 20
    assert max(sizes) < sum(sizes) / 10
    assert await store.discard_unfinished_imports() == 0
    check_integrity(database)
    assert dump(database)["messages"] == dump(database)["conversations"] == []


@pytest.mark.usefixtures("small_batches")
async def test_a_message_longer_than_a_batch_is_taken_in(store: Store) -> None:
    me = (await store.create_user("me", "x")).id
    turns = (NewTurn("user", "x" * 6000, None), NewTurn("assistant", "y" * 6000, 0))
    ids = await store.import_conversations(me, [NewConversation("", turns), NewConversation("", turns)])
    assert [[len(each.content) for each in await store.path(me, own)] for own in ids] == [[6000, 6000]] * 2


KILLED = """
import asyncio, sys
from pathlib import Path
from db import Database, Store, transfer
from tests.db.test_transfer import LONG
from db.transfer import NewConversation

transfer._BATCH_CHARACTERS = 5_000
add_all = transfer._add_all
calls = 0

def stopping(*arguments):
    global calls
    calls += 1
    if calls == 5:
        print("half", flush=True)
        sys.stdin.read()
    return add_all(*arguments)

async def main():
    transfer._add_all = stopping
    database = Database(Path(sys.argv[1]))
    database.migrate()
    await Store(database).import_conversations(sys.argv[2], [NewConversation("long", LONG)])

asyncio.run(main())
"""


async def test_nothing_is_left_of_an_import_that_is_killed(tmp_path: Path, start_python: StartPython) -> None:
    file = tmp_path / "chat.sqlite3"
    database = Database(file)
    database.migrate()
    me = (await Store(database).create_user("me", "x")).id
    before = dump(database)
    await database.aclose()

    process = start_python(KILLED, file, me)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.wait()

    database = Database(file)
    database.migrate()
    store = Store(database)
    assert await store.list_conversations(me) == []
    assert dump(database) != before
    assert await store.discard_unfinished_imports() == 1
    assert dump(database) == before
    check_integrity(database)
    await database.aclose()


async def test_nobody_takes_in_for_somebody_who_is_not_there(store: Store, database: Database) -> None:
    with pytest.raises(NotFound):
        await store.import_conversations("missing", [NewConversation("x", TALK)])
    check_integrity(database)

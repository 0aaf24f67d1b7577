import asyncio
import json

import pytest
from sqlalchemy import text

from db import Database, Store, maintenance
from db.errors import InvalidInput, NotFound, StorageUnavailable
from db.views import UserView
from tests.db.helpers import check_integrity, dump, exchange, only_sqlite, rows


async def test_export_of_a_conversation(
    store: Store, owner: UserView, stranger: UserView, database: Database
) -> None:
    made = await store.create_conversation(owner.id, "Title", "Be brief.", {"temperature": 1})
    user, reply = await exchange(store, owner.id, made.id, None, "one", "1")
    other = await store.add_reply(owner.id, made.id, user.id, "smol")
    await exchange(store, owner.id, (await store.create_conversation(owner.id)).id, None, "elsewhere", "x")
    export = await maintenance.export_conversation(database, owner.id, made.id)
    assert json.loads(json.dumps(export)) == export
    assert export["format"] == "tangram-chat/1"
    (conversation,) = export["conversations"]
    assert conversation["title"] == "Title"
    assert conversation["system_prompt"] == "Be brief."
    assert conversation["settings"] == {"temperature": 1}
    assert conversation["active_leaf_id"] == other.id
    assert [
        (m["id"], m["parent_id"], m["role"], m["content"], m["token_ids"], m["status"])
        for m in conversation["messages"]
    ] == [
        (user.id, None, "user", "one", [1, 2], "complete"),
        (reply.id, user.id, "assistant", "1", [3, 4, 5], "complete"),
        (other.id, user.id, "assistant", "", [], "pending"),
    ]
    for owner_id, conversation_id in ((stranger.id, made.id), (owner.id, "missing")):
        with pytest.raises(NotFound, match="conversation not found"):
            await maintenance.export_conversation(database, owner_id, conversation_id)
    await store.delete_conversation(owner.id, made.id)
    with pytest.raises(NotFound, match="conversation not found"):
        await maintenance.export_conversation(database, owner.id, made.id)


async def test_export_of_an_owner(
    store: Store, owner: UserView, stranger: UserView, database: Database
) -> None:
    for who, name in ((owner, "Ada's"), (stranger, "Eve's")):
        for number in range(2):
            made = await store.create_conversation(who.id, f"{name} {number}")
            await exchange(store, who.id, made.id, None, f"{name} question", f"{name} answer")
    await store.create_api_key(owner.id, "laptop", "hash of a key")
    await store.delete_conversation(owner.id, (await store.list_conversations(owner.id))[0].id)
    export = await maintenance.export_owner(database, owner.id)
    assert export["user"] == {"id": owner.id, "name": "Ada", "created_at": owner.created_at}
    assert [item["title"] for item in export["conversations"]] == ["Ada's 0", "Ada's 1"]
    assert [item["deleted_at"] is None for item in export["conversations"]] == [True, False]
    assert [len(item["messages"]) for item in export["conversations"]] == [2, 2]
    written = json.dumps(export)
    for secret in ("Eve", owner.password_hash, owner.cache_salt, "hash of a key"):
        assert secret not in written
    with pytest.raises(NotFound, match="user not found"):
        await maintenance.export_owner(database, "nobody")


async def test_backup_during_writes(store: Store, owner: UserView, database: Database) -> None:
    made = await store.create_conversation(owner.id, "before")
    _, reply = await exchange(store, owner.id, made.id, None, "one", "1")

    async def talk() -> None:
        parent = reply.id
        for number in range(40):
            _, answer = await exchange(store, owner.id, made.id, parent, f"{number}", "word " * 500)
            parent = answer.id

    talking = asyncio.create_task(talk())
    backups = [await maintenance.back_up_now(database) for _ in range(3)]
    await talking
    final = await maintenance.back_up_now(database)
    assert len({*backups, final}) == 4
    assert sorted(database.backup_dir.iterdir()) == sorted([*backups, final])
    for backup in backups:
        check_integrity(Database(backup))
        assert len(dump(Database(backup))["messages"]) >= 2
    assert rows(Database(final)) == rows(database)


async def test_backup_that_cannot_be_written(database: Database) -> None:
    database.backup_dir.write_text("a file in the place of the folder")
    with pytest.raises(StorageUnavailable, match="cannot back up"):
        await maintenance.back_up_now(database)


async def test_memory_samples_are_bounded(database: Database) -> None:
    assert await maintenance.memory_samples(database) == []
    for number in range(12):
        await maintenance.add_memory_sample(database, {"time": number, "free_pages": number * 2}, keep=5)
    samples = await maintenance.memory_samples(database)
    assert [(row["time"], row["free_pages"]) for row in samples] == [(n, n * 2) for n in range(7, 12)]
    assert [row["time"] for row in await maintenance.memory_samples(database, limit=2)] == [10, 11]
    await maintenance.add_memory_sample(database, {"used_bytes": 2**40, "state": "ready"}, keep=5)
    latest = (await maintenance.memory_samples(database))[-1]
    assert (latest["used_bytes"], latest["state"], latest["free_pages"]) == (2**40, "ready", None)
    assert latest["time"] > 10**12
    assert len(await maintenance.memory_samples(database)) == 5


@only_sqlite
async def test_samples_leave_the_writer_as_it_was(store: Store, owner: UserView, database: Database) -> None:
    await asyncio.gather(
        *(maintenance.add_memory_sample(database, {f"column_{number % 3}": number}) for number in range(9)),
        *(store.create_conversation(owner.id, f"{number}") for number in range(9)),
    )
    assert len(await store.list_conversations(owner.id)) == 9
    assert len(await maintenance.memory_samples(database)) == 9
    for pragma, value in (("foreign_keys", 1), ("recursive_triggers", 0)):
        query = text(f"PRAGMA {pragma}")
        assert await database.write(lambda session, query=query: session.scalar(query)) == value
    await database.aclose()
    check_integrity(database)
    later = Database(database.path, database.backup_dir)
    assert later.migrate() is None


@pytest.mark.parametrize("name", ["id", "rowid", "two words", 'x"; DROP TABLE users; --', "", "größe"])
async def test_names_of_samples_are_checked(database: Database, name: str) -> None:
    with pytest.raises(InvalidInput, match=r"sample: .* cannot name a column"):
        await maintenance.add_memory_sample(database, {name: 1})
    assert await maintenance.memory_samples(database) == []


async def test_limits_are_checked(database: Database) -> None:
    with pytest.raises(InvalidInput, match="keep: must be at least 1"):
        await maintenance.add_memory_sample(database, {}, keep=0)
    with pytest.raises(InvalidInput, match="limit: must be at least 1"):
        await maintenance.memory_samples(database, limit=0)


async def test_memory_samples_are_thinned_with_age(database: Database) -> None:
    now, second = 10_000_000, 1000
    for moment in range(now - 600 * second, now, 10 * second):
        await maintenance.add_memory_sample(database, {"time": moment, "free": moment // second})
    rules = (
        maintenance.Thinning(100 * second, 60 * second),
        maintenance.Thinning(400 * second, 200 * second),
    )
    removed = await maintenance.thin_memory_samples(database, rules, now)
    kept = [row["time"] // second for row in await maintenance.memory_samples(database)]
    assert removed == 60 - len(kept)
    assert kept[-10:] == list(range(now // second - 100, now // second, 10)), "what is young stays"
    older = [moment for moment in kept if moment < now // second - 100]
    assert len({moment // 60 for moment in older if moment >= now // second - 400}) == len(
        [moment for moment in older if moment >= now // second - 400]
    )
    assert len([moment for moment in older if moment < now // second - 400]) <= 3
    assert await maintenance.thin_memory_samples(database, rules, now) == 0, "a second time changes nothing"

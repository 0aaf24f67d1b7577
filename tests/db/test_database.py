import asyncio
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db import Database, Store
from db.connection import CHECKPOINT_PAGES
from db.errors import DatabaseClosed, DatabaseInUse, DbError, StorageUnavailable
from tests.db.helpers import check_integrity, dump, only_sqlite, twin
from tests.patience import PATIENCE

PUT = text(
    "INSERT INTO settings (key, value, updated_at) VALUES (:key, '1', (SELECT count(*) FROM settings))"
)


def put(key: str):
    def work(session: Session) -> str:
        session.execute(PUT, {"key": key})
        return key

    return work


def keys(session: Session) -> list[str]:
    return list(session.scalars(text("SELECT key FROM settings ORDER BY updated_at")))


class Gate:
    """Holds the writer inside a transaction until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, session: Session) -> None:
        session.execute(PUT, {"key": "gate"})
        self.entered.set()
        self.opened.wait()


async def test_write_returns_after_its_commit(database: Database) -> None:
    assert await database.write(put("a")) == "a"
    other = twin(database)
    other.migrate()
    assert await other.read(keys) == ["a"]
    await other.aclose()


async def test_writes_keep_their_order(database: Database) -> None:
    await asyncio.gather(*(database.write(put(f"{number}")) for number in range(200)))
    assert await database.read(keys) == [f"{number}" for number in range(200)]


async def test_a_write_that_raises_is_rolled_back(database: Database) -> None:
    class Unexpected(Exception):
        pass

    def work(session: Session) -> None:
        session.execute(PUT, {"key": "lost"})
        raise Unexpected("here")

    with pytest.raises(Unexpected, match="here"):
        await database.write(work)
    await database.write(put("kept"))
    assert await database.read(keys) == ["kept"]


async def test_a_broken_constraint_is_rolled_back_and_hides_the_values(database: Database) -> None:
    await database.write(put("secret-key"))
    with pytest.raises(IntegrityError) as caught:
        await database.write(put("secret-key"))
    assert "secret-key" not in str(caught.value)
    await database.write(put("next"))
    assert await database.read(keys) == ["secret-key", "next"]


async def test_no_exception_ends_the_writer(database: Database) -> None:
    def work(session: Session) -> None:
        session.execute(PUT, {"key": "lost"})
        raise GeneratorExit

    with pytest.raises(GeneratorExit):
        await database.write(work)
    await database.write(put("kept"))
    assert await database.read(keys) == ["kept"]


async def test_deferred_constraint_fails_at_the_commit(store: Store, database: Database) -> None:
    user = await store.create_user("Ada", "hash")
    conversation = await store.create_conversation(user.id)
    dangle = text("UPDATE conversations SET active_leaf_id = 'nothing'")
    with pytest.raises(IntegrityError):
        await database.write(lambda session: session.execute(dangle) and None)
    assert (await store.get_conversation(user.id, conversation.id)).active_leaf_id is None


async def test_readers_do_not_wait_for_the_writer(database: Database) -> None:
    await database.write(put("before"))
    gate = Gate()
    writing = asyncio.create_task(database.write(gate))
    await asyncio.to_thread(gate.entered.wait)
    try:
        assert await asyncio.wait_for(database.read(keys), PATIENCE) == ["before"]
        assert not writing.done()
    finally:
        gate.opened.set()
    await writing
    assert await database.read(keys) == ["before", "gate"]


async def test_a_read_sees_one_moment(database: Database) -> None:
    await database.write(put("first"))
    begun, go_on = threading.Event(), threading.Event()

    def twice(session: Session) -> tuple[list[str], list[str]]:
        before = keys(session)
        begun.set()
        go_on.wait()
        return before, keys(session)

    reading = asyncio.create_task(database.read(twice))
    await asyncio.to_thread(begun.wait)
    await database.write(put("second"))
    go_on.set()
    assert await reading == (["first"], ["first"])
    assert await database.read(keys) == ["first", "second"]


async def test_readers_cannot_write(database: Database) -> None:
    with pytest.raises(StorageUnavailable, match=r"read-?only"):
        await database.read(put("sneaked in"))
    assert await database.read(keys) == []


async def test_cancelled_callers_leave_the_writer_in_order(database: Database) -> None:
    gate = Gate()
    running = asyncio.create_task(database.write(gate))
    await asyncio.to_thread(gate.entered.wait)
    waiting = asyncio.create_task(database.write(put("never begun")))
    following = asyncio.create_task(database.write(put("following")))
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    for task in (running, waiting):
        with pytest.raises(asyncio.CancelledError):
            await task
    gate.opened.set()
    assert await following == "following"
    assert await database.read(keys) == ["gate", "following"]
    check_integrity(database)


async def test_close_settles_what_is_queued(database: Database) -> None:
    gate = Gate()
    tasks = [asyncio.create_task(database.write(gate))]
    await asyncio.to_thread(gate.entered.wait)
    tasks += [asyncio.create_task(database.write(put(f"{number}"))) for number in range(50)]
    await asyncio.sleep(0)
    closing_down = asyncio.create_task(database.aclose())
    gate.opened.set()
    await closing_down
    assert (await asyncio.gather(*tasks))[1:] == [f"{number}" for number in range(50)]
    assert not Path(f"{database.path}-wal").exists()
    assert len(dump(database)["settings"]) == 51


async def test_closed_database_refuses(database: Database) -> None:
    await database.write(put("a"))
    database.close()
    database.close()
    with pytest.raises(DatabaseClosed):
        await database.write(put("b"))
    with pytest.raises(DatabaseClosed):
        await database.read(keys)


async def test_migrate_comes_first(tmp_path: Path) -> None:
    database = Database(tmp_path / "chat.sqlite3")
    with pytest.raises(DbError, match="call migrate"):
        await database.read(keys)
    with pytest.raises(DbError, match="call migrate"):
        await database.write(put("a"))
    assert list(tmp_path.iterdir()) == []
    database.close()


async def test_there_is_one_writer(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("db.dialect.LOCK_SECONDS", 0.1)
    await database.write(put("first"))
    second = twin(database)
    second.migrate()
    assert await second.read(keys) == ["first"]
    with pytest.raises(DatabaseInUse, match="another process writes to this database"):
        await second.write(put("second"))
    await database.aclose()
    assert await second.write(put("after the first has closed")) == "after the first has closed"
    await second.aclose()


async def test_a_child_process_does_not_keep_the_lock(database: Database) -> None:
    await database.write(put("a"))
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False
    )
    try:
        await database.aclose()
        second = twin(database)
        second.migrate()
        assert await second.write(put("b")) == "b"
        await second.aclose()
    finally:
        child.communicate()


@only_sqlite
async def test_a_lock_of_a_foreign_tool_is_reported(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("db.connection.connect.__kwdefaults__", {"busy_seconds": 0.05})
    with closing(sqlite3.connect(database.path, isolation_level=None)) as foreign:
        foreign.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageUnavailable, match="the database refused the write: database is locked"):
            await database.write(put("a"))
        foreign.execute("ROLLBACK")
    assert await database.write(put("b")) == "b"


@only_sqlite
async def test_a_missing_file_is_reported_and_not_made_anew(database: Database) -> None:
    database.path.unlink()
    with pytest.raises(StorageUnavailable, match="unable to open"):
        await database.write(put("a"))
    with pytest.raises(StorageUnavailable, match="unable to open"):
        await database.read(keys)
    assert not database.path.exists()


@only_sqlite
async def test_raw_writes_cannot_change_later_ones(database: Database) -> None:
    def rude(connection: sqlite3.Connection) -> str:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO settings VALUES ('left open', '1', 0)")
        return "done"

    assert await database.write_raw(rude) == "done"
    assert await database.read(keys) == []
    assert await database.write(lambda s: s.scalar(text("PRAGMA foreign_keys"))) == 1


@only_sqlite
async def test_the_writer_checkpoints(database: Database) -> None:
    wal = Path(f"{database.path}-wal")
    filler = text("INSERT INTO settings VALUES (:key, json_quote(hex(randomblob(200000))), 0)")
    for number in range(40):
        await database.write(lambda session, key=f"{number}": session.execute(filler, {"key": key}) and None)
    # 16 MB were written; without checkpoints all of it would be in the WAL.
    assert wal.stat().st_size < 3 * CHECKPOINT_PAGES * 4096
    await database.aclose()
    assert not wal.exists()

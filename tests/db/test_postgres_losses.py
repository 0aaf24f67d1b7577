"""The server is lost at bad moments: what was answered is there, and nothing is stored twice."""

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pg8000.dbapi
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from db import Database
from db.errors import DatabaseInUse, OutcomeUnknown, StorageUnavailable
from db.postgres.connection import connect
from db.postgres.migrator import migrate
from tests.db.helpers import twin
from tests.patience import PATIENCE
from tests.postgres_server import TEMPLATE, PostgresServer, serve

PUT = text("INSERT INTO settings (key, value, updated_at) VALUES (:key, '1', 0)")
KEYS = text("SELECT key FROM settings ORDER BY key")


def put(key: str) -> Any:
    return lambda session: session.execute(PUT, {"key": key}) and key


def keys(session: Session) -> list[str]:
    return list(session.scalars(KEYS))


@pytest.fixture(scope="module")
def mortal() -> Iterator[PostgresServer]:
    """A server that tests kill and start again."""
    for server in serve():
        server.execute(f"CREATE DATABASE {TEMPLATE}")
        migrate(server.url(TEMPLATE), lambda: Path("there is nothing to back up"))
        yield server


@pytest.fixture
async def database(mortal: PostgresServer, tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(tmp_path / "chat.sqlite3", tmp_path / "backups", mortal.emptied())
    database.migrate()
    yield database
    await database.aclose()


class CutOff:
    """In the place of the driver's commit: kills the server before or after the next one."""

    def __init__(self, server: PostgresServer, monkeypatch: pytest.MonkeyPatch, *, done: bool) -> None:
        self.commit = pg8000.dbapi.Connection.commit
        self.server, self.done, self.armed = server, done, True
        monkeypatch.setattr(pg8000.dbapi.Connection, "commit", lambda connection: self(connection))

    def __call__(self, connection: Any) -> None:
        if not self.armed:
            self.commit(connection)
            return
        self.armed = False
        if self.done:
            self.commit(connection)
        self.server.kill()
        if self.done:
            raise pg8000.dbapi.InterfaceError("network error")
        self.commit(connection)


@pytest.mark.parametrize("done", [True, False])
async def test_a_commit_that_was_cut_off_is_looked_for(
    mortal: PostgresServer, database: Database, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    await database.write(put("before"))
    CutOff(mortal, monkeypatch, done=done)
    monkeypatch.setattr("db.postgres.dialect.ASK_SECONDS", 2 * PATIENCE)
    writing = asyncio.create_task(database.write(put("cut off")))
    following = asyncio.create_task(database.write(put("following")))
    await asyncio.sleep(0.5)
    assert not writing.done(), "it waits until somebody can be asked"
    await asyncio.to_thread(mortal.start)
    if done:
        assert await writing == "cut off"
    else:
        with pytest.raises(StorageUnavailable, match="the connection to the server was lost") as caught:
            await writing
        assert not isinstance(caught.value, OutcomeUnknown)
    assert await following == "following"
    assert await database.read(keys) == ["before", *(["cut off"] if done else []), "following"]


@pytest.mark.parametrize("lost", ["_flush", "_read"], ids=["asked", "answered"])
def test_a_server_that_is_lost_while_one_connects_leaves_no_socket_open(
    mortal: PostgresServer, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """An open one is told of when it is collected, which fails the test."""

    def fails(*_: Any) -> None:
        raise pg8000.dbapi.InterfaceError("network error")

    with monkeypatch.context() as patch:
        patch.setattr(pg8000.core, lost, fails)
        with pytest.raises(StorageUnavailable, match="network error"):
            connect(mortal.url("postgres"))
    with pytest.raises(StorageUnavailable, match="no_such_setting"):
        connect(mortal.url("postgres"), "SET no_such_setting = 1")
    gc.collect()


async def test_an_unknown_outcome_is_neither_success_nor_failure(
    mortal: PostgresServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("db.postgres.dialect.ASK_SECONDS", 0.3)
    await database.write(put("before"))
    CutOff(mortal, monkeypatch, done=True)
    try:
        with pytest.raises(OutcomeUnknown, match="may be stored or not"):
            await database.write(put("cut off"))
        for refused in (database.write(put("later")), database.read(keys)):
            with pytest.raises(StorageUnavailable, match="cannot be reached"):
                await refused
    finally:
        await asyncio.to_thread(mortal.start)
    assert await database.read(keys) == ["before", "cut off"]
    assert await database.write(put("after")) == "after"


async def test_a_read_whose_connection_breaks_is_done_again(
    mortal: PostgresServer, database: Database
) -> None:
    await database.write(put("there"))
    tries = 0

    def work(session: Session) -> list[str]:
        nonlocal tries
        tries += 1
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        if tries == 1:
            mortal.execute(f"SELECT pg_terminate_backend({pid}, 30000)")
        return keys(session)

    assert await database.read(work) == ["there"]
    assert tries == 2


async def test_a_write_whose_connection_breaks_is_undone_and_not_repeated(
    mortal: PostgresServer, database: Database
) -> None:
    tries = 0

    def work(session: Session) -> None:
        nonlocal tries
        tries += 1
        session.execute(PUT, {"key": "lost"})
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        mortal.execute(f"SELECT pg_terminate_backend({pid}, 30000)")
        session.execute(PUT, {"key": "lost too"})

    with pytest.raises(StorageUnavailable, match="the database refused the write"):
        await database.write(work)
    assert tries == 1
    assert await database.write(put("next")) == "next"
    assert await database.read(keys) == ["next"]


async def test_a_failed_statement_cannot_be_committed(database: Database) -> None:
    """PostgreSQL answers COMMIT in a failed transaction with a ROLLBACK, and no error."""

    def work(session: Session) -> str:
        session.execute(PUT, {"key": "lost"})
        cursor = session.connection().connection.cursor()
        with pytest.raises(pg8000.dbapi.DatabaseError):
            cursor.execute("SELECT 1 / 0")
        return "done"

    with pytest.raises(Exception, match="current transaction is aborted"):
        await database.write(work)
    assert await database.read(keys) == []


async def test_the_lock_is_lost_with_its_connection_and_another_may_take_it(
    mortal: PostgresServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("db.dialect.LOCK_SECONDS", 0.2)
    await database.write(put("first"))
    pid = await database.write(lambda session: session.scalar(text("SELECT pg_backend_pid()")))
    other = twin(database)
    other.migrate()
    with pytest.raises(DatabaseInUse, match="another process writes to this database"):
        await other.write(put("second"))
    mortal.execute(f"SELECT pg_terminate_backend({pid}, 30000)")
    assert await other.write(put("second")) == "second"
    with pytest.raises(DatabaseInUse):
        await database.write(put("third"))
    await other.aclose()
    assert await database.write(put("fourth")) == "fourth"
    assert await database.read(keys) == ["first", "fourth", "second"]


async def test_killed_again_and_again_while_it_is_written_to(
    mortal: PostgresServer, database: Database
) -> None:
    dice = random.Random(8)
    stored: set[str] = set()
    refused: set[str] = set()
    unknown: set[str] = set()
    ending = threading.Event()

    async def write() -> None:
        number = 0
        while not ending.is_set():
            number += 1
            key = f"{number:05}"
            try:
                stored.add(await database.write(put(key)))
            except OutcomeUnknown:
                unknown.add(key)
            except StorageUnavailable:
                refused.add(key)
                await asyncio.sleep(0.02)

    writing = asyncio.create_task(write())

    async def at_work(more: int) -> None:
        """Until so many more are stored."""
        enough = len(stored) + more
        async with asyncio.timeout(PATIENCE):
            while len(stored) < enough:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)

    for _ in range(3):
        await at_work(15)
        await asyncio.sleep(dice.uniform(0.1, 0.4))
        await asyncio.to_thread(mortal.kill)
        await asyncio.to_thread(mortal.start)
    await at_work(15)
    ending.set()
    await writing
    found = set(await database.read(keys))
    assert len(stored) > 50
    assert refused
    assert stored <= found
    assert not refused & found
    assert found <= stored | unknown

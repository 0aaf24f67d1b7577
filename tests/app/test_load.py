"""Everything at once: fifty streams, searches, backups, a vacuum, samples of the memory map. Nothing is lost.

It is also the proof of the single-writer rule, which `db.connection` needs with SQLite before 3.51.3: every
statement that any connection to the database runs meanwhile is recorded with its thread.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from db.check import check
from db.connection import connect
from db.maintenance import add_memory_sample, back_up_now, export_owner, vacuum
from tests.app.conftest import running_product

USERS, STREAMS, TOKENS = 10, 50, 60
WRITES = re.compile(
    r"\s*(INSERT|UPDATE|DELETE|REPLACE|CREATE|DROP|ALTER|VACUUM|REINDEX|BEGIN IMMEDIATE"
    r"|PRAGMA\s+(wal_checkpoint|journal_mode|user_version\s*=|optimize))",
    re.IGNORECASE,
)


class Recorder:
    """Notes (connection, thread, statement) of every connection to one file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._connect = sqlite3.connect
        self.statements: list[tuple[int, str, str]] = []
        self.opened = 0

    def __call__(self, database: Any, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        made = self._connect(database, *args, **kwargs)
        if self._path in str(database):
            self.opened += 1
            number = self.opened
            made.set_trace_callback(
                lambda sql: self.statements.append((number, threading.current_thread().name, sql))
            )
        return made

    def writers(self) -> dict[str, set[int]]:
        """Connections that wrote or checkpointed, by thread."""
        found: dict[str, set[int]] = defaultdict(set)
        for connection, thread, sql in self.statements:
            if WRITES.match(sql):
                found[thread].add(connection)
        return dict(found)

    def first(self, count: int) -> dict[int, list[str]]:
        """The first statements of each connection."""
        found: dict[int, list[str]] = defaultdict(list)
        for connection, _, sql in self.statements:
            if len(found[connection]) < count:
                found[connection].append(sql)
        return dict(found)


async def test_fifty_streams_search_and_backups_at_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with running_product(settings) as product:
        recorder = Recorder(settings.database_path)
        monkeypatch.setattr(sqlite3, "connect", recorder)
        store, database = product.services.store, product.services.database
        users = [await store.create_user(f"user {number}", "hash") for number in range(USERS)]
        done = asyncio.Event()

        async def stream(number: int) -> tuple[str, str, str]:
            owner = users[number % USERS].id
            conversation = await store.create_conversation(owner, f"conversation {number}")
            handle = await product.services.generation.send(owner, conversation.id, f"/tokens {TOKENS}")
            events = product.services.generation.subscribe(owner, handle.reply.id)
            seen = [event async for event in events]
            assert seen[-1].status == "complete"
            return owner, handle.reply.id, seen[-1].text

        rounds: dict[Any, int] = {}

        async def again(work: Any, pause: float) -> None:
            while not done.is_set():
                await work()
                rounds[work] = rounds.get(work, 0) + 1
                await asyncio.sleep(pause)

        async def search() -> None:
            for query in ("lorem ipsum", "do", "conversation 4"):
                await store.list_conversations(users[4].id, query=query)

        async def sample() -> None:
            await add_memory_sample(database, {"free_pages": 1})

        others = [
            asyncio.create_task(again(work, pause))
            for work, pause in (
                (search, 0.01),
                (lambda: back_up_now(database), 0.2),
                (lambda: vacuum(database), 0.3),
                (sample, 0.02),
                (lambda: export_owner(database, users[0].id), 0.05),
                (lambda: asyncio.to_thread(check, database.path), 0.3),
            )
        ]
        replies = []
        while not replies or len(rounds) < len(others) or min(rounds.values()) < 2:
            replies += await asyncio.gather(*map(stream, range(STREAMS)))
            if any(other.done() for other in others):
                break  # with its error
        done.set()
        await asyncio.gather(*others)
        assert min(rounds.values()) >= 2
        for owner, reply, text in replies:
            stored = await store.get_message(owner, reply)
            assert (stored.status, stored.content) == ("complete", text)
            assert len(text.split()) > TOKENS / 4
        newest = await back_up_now(database)
        assert check(newest) == []
    assert check(settings.database_path) == []
    assert not [record.getMessage() for record in caplog.records if "locked" in record.getMessage()]

    # One thread wrote. It used one connection after the other, and every other connection could not have.
    writers = recorder.writers()
    assert set(writers) == {"db-writer"}, writers
    for connection, statements in recorder.first(2).items():
        if connection not in writers["db-writer"]:
            assert statements[1] == "PRAGMA query_only = ON", (connection, statements)
    assert len(recorder.statements) > 500


def test_a_reader_cannot_write_or_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite3"
    with sqlite3.connect(path) as made:
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("CREATE TABLE t (a)")
        made.execute("INSERT INTO t VALUES (1)")
        made.commit()
        reader = connect(path, read_only=True)
        before = Path(f"{path}-wal").stat().st_size
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.execute("INSERT INTO t VALUES (2)")
        reader.execute("SELECT * FROM t").fetchall()
        reader.close()
        assert Path(f"{path}-wal").stat().st_size == before > 0
    made.close()


def test_connections_are_made_in_one_place() -> None:
    """What opens the database elsewhere would not be held to the rule."""
    root = Path(__file__).resolve().parents[2]
    found = {
        f"{path.relative_to(root)}: {line.strip()}"
        for folder in ("app", "admin", "db")
        for path in (root / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if "sqlite3.connect(" in line
    }
    assert {line.split(":")[0] for line in found} == {
        "db/backup.py",  # the copy that it makes
        "db/check.py",  # the copy that it looks at
        "db/connection.py",
        "db/postgres/backup.py",  # the copy that it makes, and the one that it reads
        "db/restore.py",  # the copy, before it takes the place of the database
    }, found

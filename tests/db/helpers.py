"""What several test files of the storage layer need."""

from contextlib import closing
from typing import Any

import pytest

from db import Database, Store
from db.connection import connect
from db.postgres import connection as postgres
from db.postgres.copy import tables
from db.postgres.dialect import PostgresDialect
from db.views import MessageView

only_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
only_postgres = pytest.mark.parametrize("database", ["postgres"], indirect=True)


async def exchange(
    store: Store, owner_id: str, conversation_id: str, parent_id: str | None, question: str, answer: str
) -> tuple[MessageView, MessageView]:
    """A whole turn: the user's message and its complete reply."""
    user, reply = await store.add_turn(owner_id, conversation_id, parent_id, question, [1, 2], "model")
    reply = await store.finish_reply(owner_id, reply.id, "complete", answer, [3, 4, 5], {}, "stop")
    return user, reply


def twin(database: Database) -> Database:
    """Another object for the same database, as another process would have it."""
    url = database.dialect.url if isinstance(database.dialect, PostgresDialect) else None
    return Database(database.path, database.backup_dir, url)


def rows(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """As `dump`, alike for both kinds of database: in one order, truth as a number, without samples."""
    return {
        table: sorted((tuple(int(v) if isinstance(v, bool) else v for v in row) for row in found), key=repr)
        for table, found in dump(database).items()
        if table != "memory_samples"
    }


def dump(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every ordinary table, as committed; with PostgreSQL in the order of the first column."""
    if isinstance(database.dialect, PostgresDialect):
        return _dump_postgres(database.dialect)
    with closing(connect(database.path, read_only=True)) as connection:
        names = [
            name
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE '%search%'"
            )
        ]
        return {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}


def _dump_postgres(dialect: PostgresDialect) -> dict[str, list[tuple[Any, ...]]]:
    with closing(postgres.connect(dialect.url)) as connection:
        cursor, found = connection.cursor(), {}
        for table, columns in tables(cursor).items():
            names = ", ".join(f"{name}::text" if kind == "json" else name for name, kind in columns.items())
            cursor.execute(f"SELECT {names} FROM {table} ORDER BY 1")
            found[table] = [tuple(row) for row in cursor.fetchall()]
        return found


def check_integrity(database: Database) -> None:
    """Fail when the file, a foreign key or the search index is not in order."""
    if isinstance(database.dialect, PostgresDialect):
        found = database.dialect.check()
        assert [line for line in found if "without an enabled administrator" not in line] == []
        return
    with closing(connect(database.path, read_only=False)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        for index in ("messages_search", "conversations_search"):
            # With rank 1 the index is compared with the texts; it raises when they differ.
            connection.execute(f"INSERT INTO {index} ({index}, rank) VALUES ('integrity-check', 1)")

"""What several test files of the storage layer need."""

from contextlib import closing
from typing import Any

from db import Database, Store
from db.connection import connect
from db.views import MessageView


async def exchange(
    store: Store, owner_id: str, conversation_id: str, parent_id: str | None, question: str, answer: str
) -> tuple[MessageView, MessageView]:
    """A whole turn: the user's message and its complete reply."""
    user, reply = await store.add_turn(owner_id, conversation_id, parent_id, question, [1, 2], "model")
    reply = await store.finish_reply(owner_id, reply.id, "complete", answer, [3, 4, 5], {}, "stop")
    return user, reply


def dump(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every ordinary table, as committed."""
    with closing(connect(database.path, read_only=True)) as connection:
        tables = [
            name
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE '%search%'"
            )
        ]
        return {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in tables}


def check_integrity(database: Database) -> None:
    """Fail when the file, a foreign key or the search index is not in order."""
    with closing(connect(database.path, read_only=False)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        for index in ("messages_search", "conversations_search"):
            # With rank 1 the index is compared with the texts; it raises when they differ.
            connection.execute(f"INSERT INTO {index} ({index}, rank) VALUES ('integrity-check', 1)")

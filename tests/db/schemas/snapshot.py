"""Writes the snapshot of today's schema, with some rows of every kind, as SQL text.

python -m tests.db.schemas.snapshot DIRECTORY
"""

import asyncio
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from db import Database, Store
from db.migrations import MIGRATIONS
from db.views import QuotaView
from tests.db.helpers import exchange

LATER = 2**42


async def fill(store: Store) -> None:
    """Rows in every table, with branches, every final status, and texts that search must find."""
    ann = await store.create_user("Ann", "$argon2id$ann", is_admin=True)
    bob = await store.create_user("Bob", "$argon2id$bob")
    await store.create_session(ann.id, "hash of a session", LATER)
    await store.create_api_key(ann.id, "laptop", "hash of a key")
    await store.disable_user(bob.id)
    made = await store.create_conversation(ann.id, "Lighthouses", "Be brief.", {"temperature": 0.5})
    first, reply = await exchange(store, ann.id, made.id, None, "What is a lighthouse?", "A tower. 灯塔")
    other = await store.add_reply(ann.id, made.id, first.id, "model")
    await store.finish_reply(ann.id, other.id, "stopped", "A tow", [9, 8], {"prompt_tokens": 3})
    await exchange(store, ann.id, made.id, reply.id, "And C++?", "A language.")
    gone = await store.create_conversation(ann.id, "Deleted")
    await store.delete_conversation(ann.id, gone.id)
    await store.set_setting("engine", {"retention": 0.25})
    await store.add_audit(ann.id, "engine.tune", {"retention": 0.5}, {"retention": 0.25})
    await store.set_quota(ann.id, QuotaView(running=2))
    await store.create_invitation("hash of a link", LATER, is_admin=False, note="Cho", created_by=ann.id)


async def snapshot() -> str:
    """The SQL text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.sqlite3"
        database = Database(path)
        database.migrate()
        await fill(Store(database))
        await database.aclose()
        with closing(sqlite3.connect(path)) as connection:
            lines = [f"PRAGMA {name} = {connection.execute(f'PRAGMA {name}').fetchone()[0]};"
                     for name in ("application_id", "user_version")]  # fmt: skip
            return "\n".join([*lines, *_statements(connection)]) + "\n"


def _statements(connection: sqlite3.Connection) -> list[str]:
    """Tables and their rows, then indexes, views and triggers: the search index fills itself from them."""
    schema = connection.execute(
        "SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
    ).fetchall()
    shadow = {f"{index}_{part}" for index in ("messages_search", "conversations_search")
              for part in ("data", "idx", "docsize", "config", "content")}  # fmt: skip
    tables = [(name, sql) for kind, name, sql in schema if kind == "table" and name not in shadow]
    others = [f"{sql};" for kind, _, sql in schema if kind != "table"]
    made = [f"{sql};" for _, sql in tables]
    rows = []
    for name, _ in tables:
        if not name.endswith("_search"):
            columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')]
            quoted = " || ', ' || ".join(f'quote("{column}")' for column in columns)
            query = f"SELECT 'INSERT INTO \"{name}\" VALUES (' || {quoted} || ');' FROM \"{name}\""
            rows += [row[0] for row in connection.execute(query)]
    return [*made, *others, *rows]


if __name__ == "__main__":
    target = Path(sys.argv[1]) / f"v{len(MIGRATIONS)}.sql"
    target.write_text(asyncio.run(snapshot()), encoding="utf-8")
    print(target)

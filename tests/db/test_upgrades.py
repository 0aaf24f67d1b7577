"""A database of every released version becomes one of today's, with nothing lost and nothing else in it."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from db import Database, Store
from db.check import check
from db.migrations import MIGRATIONS
from tests.db.helpers import check_integrity, dump

SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("v*.sql"))


def schema(path: Path) -> dict[str, str]:
    """Every object of the schema and its definition, spaces aside; columns in whatever order they came."""
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute(
            "SELECT type || ' ' || name, coalesce(sql, '') FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"
        )
        return {name: re.sub(r'[\s"]+', " ", sql) for name, sql in found}


@pytest.fixture(params=SCHEMAS, ids=lambda path: path.stem)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    database = Database(tmp_path / "old" / "chat.sqlite3", tmp_path / "backups")
    database.path.parent.mkdir()
    with closing(sqlite3.connect(database.path)) as connection:
        connection.executescript(request.param.read_text(encoding="utf-8"))
    return database


def test_there_is_a_snapshot_of_the_first_version() -> None:
    assert SCHEMAS[0].name == "v1.sql"
    assert len(SCHEMAS) <= len(MIGRATIONS)


def test_snapshots_are_whole(old: Database) -> None:
    """They are what they are called, and are in order before any upgrade."""
    with closing(sqlite3.connect(old.path)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    assert check(old.path) == []
    assert f"v{version}.sql" in {path.name for path in SCHEMAS}


async def test_an_upgrade_keeps_everything(old: Database, tmp_path: Path) -> None:
    before = dump(old)
    backup = old.migrate()
    assert (backup is None) == (f"v{len(MIGRATIONS)}.sql" in {path.name for path in SCHEMAS})
    after = dump(old)
    for table, rows in before.items():
        width = len(rows[0]) if rows else 0
        assert [row[:width] for row in after[table]] == rows, table
    assert check(old.path) == []
    check_integrity(old)

    new = Database(tmp_path / "new" / "chat.sqlite3")
    new.migrate()
    assert schema(old.path) == schema(new.path)

    store = Store(old)
    ann = await store.user_by_name("ann")
    assert ann is not None
    assert (ann.is_admin, ann.password_hash) == (True, "$argon2id$ann")
    bob = await store.user_by_name("bob")
    assert bob is not None
    assert bob.disabled_at is not None
    assert await store.session_user("hash of a session") == ann
    (session,) = await store.list_sessions(ann.id)
    assert len(session.id) == 32
    assert await store.api_key_user("hash of a key") == ann
    (conversation,) = await store.list_conversations(ann.id, query="灯塔")
    assert (conversation.title, conversation.settings) == ("Lighthouses", {"temperature": 0.5})
    path = await store.path(ann.id, conversation.id)
    assert [message.content for message in path] == [
        "What is a lighthouse?",
        "A tower. 灯塔",
        "And C++?",
        "A language.",
    ]
    assert (path[1].sibling_count, path[1].token_ids) == (2, (3, 4, 5))
    assert await store.list_conversations(ann.id, query="C++") == [conversation]
    assert await store.get_setting("engine") == {"retention": 0.25}
    assert [entry.action for entry in await store.list_audit()] == ["engine.tune"]
    await store.add_turn(ann.id, conversation.id, path[-1].id, "after the upgrade", [1], "model")
    await old.aclose()
    assert check(old.path) == []

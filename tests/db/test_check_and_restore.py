"""Finding damage, and putting a backup in the place of the database."""

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from db import Database, Store
from db.backup import back_up
from db.check import check
from db.errors import DatabaseInUse, MigrationError, NewerSchema, NotADatabase, StorageUnavailable
from db.maintenance import vacuum
from db.restore import restore
from tests.db.conftest import StartPython
from tests.db.helpers import check_integrity, dump, exchange, only_sqlite

pytestmark = only_sqlite


@pytest.fixture
async def closed(database: Database, store: Store) -> Database:
    """A database with a conversation in it, which nobody has open."""
    ada = await store.create_user("Ada", "hash", is_admin=True)
    made = await store.create_conversation(ada.id, "Title")
    parent = None
    for number in range(30):
        _, reply = await exchange(store, ada.id, made.id, parent, f"question {number}", "answer " * 200)
        parent = reply.id
    await database.aclose()
    return database


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def test_what_is_in_order(closed: Database) -> None:
    before = closed.path.read_bytes()
    assert check(closed.path) == []
    assert closed.path.read_bytes() == before


@pytest.mark.parametrize(
    ("statements", "found"),
    [
        (
            ["PRAGMA foreign_keys = OFF", "DELETE FROM users"],
            "row 1 of conversations refers to a missing row of users",
        ),
        (
            ["DROP TRIGGER messages_search_update", "UPDATE messages SET content = 'changed' WHERE seq = 2"],
            "the search index of messages does not agree with the texts",
        ),
        (
            ["DROP TRIGGER conversations_search_update", "UPDATE conversations SET title = 'changed'"],
            "the search index of titles does not agree with the texts",
        ),
        (["UPDATE users SET is_admin = 0"], "an installation without an enabled administrator: 1"),
        (["UPDATE messages SET status = 'error' WHERE seq = 1"], "a user message that is not complete: "),
        (
            ["UPDATE conversations SET active_leaf_id = NULL"],
            "a conversation with messages of which none is shown: ",
        ),
    ],
)
def test_what_is_not(closed: Database, statements: list[str], found: str) -> None:
    change(closed.path, *statements)
    said = check(closed.path)
    assert said
    assert all(line.startswith(found) for line in said), said


def test_damaged_pages_are_found(closed: Database) -> None:
    content = bytearray(closed.path.read_bytes())
    content[len(content) // 2 :] = os.urandom(len(content) - len(content) // 2)
    closed.path.write_bytes(content)
    assert check(closed.path) != []


def test_files_that_are_no_database_of_ours(closed: Database, tmp_path: Path) -> None:
    change(closed.path, "PRAGMA user_version = 999")
    with pytest.raises(NewerSchema):
        check(closed.path)
    foreign = tmp_path / "foreign.sqlite3"
    change(foreign, "CREATE TABLE t (a)")
    with pytest.raises(NotADatabase):
        check(foreign)
    foreign.write_bytes(b"text " * 1000)
    with pytest.raises(NotADatabase):
        check(foreign)
    foreign.write_bytes(b"")
    with pytest.raises(NotADatabase, match="is empty"):
        check(foreign)
    with pytest.raises(NotADatabase, match="is empty"):
        restore(closed.path, tmp_path / "backups", foreign)
    with pytest.raises(StorageUnavailable, match="there is no database at"):
        check(tmp_path / "missing")


def test_restore_keeps_what_was_there(closed: Database) -> None:
    backup = back_up(closed.path, closed.backup_dir, "manual")
    then = dump(closed)
    change(closed.path, "UPDATE users SET name = 'Later'")
    later = dump(closed)
    kept = restore(closed.path, closed.backup_dir, backup)
    assert dump(closed) == then
    assert kept is not None
    assert dump(Database(kept)) == later
    assert Database(closed.path).migrate() is None
    check_integrity(closed)
    assert sorted(path.name for path in closed.path.parent.iterdir()) == [
        "chat.sqlite3",
        "chat.sqlite3.lock",
    ]
    assert closed.path.stat().st_mode & 0o777 == 0o600


def test_restore_takes_no_old_wal_along(closed: Database, start_python: StartPython) -> None:
    """A killed app leaves a WAL behind, whose pages must neither be lost nor end in the restored file."""
    backup = back_up(closed.path, closed.backup_dir, "manual")
    process = start_python(
        """
import asyncio, sys
from pathlib import Path
from db import Database, Store
async def main():
    database = Database(Path(sys.argv[1]))
    database.migrate()
    await Store(database).create_user("in the WAL", "hash")
    print("ready", flush=True)
    sys.stdin.read()
asyncio.run(main())
""",
        closed.path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(DatabaseInUse):
        restore(closed.path, closed.backup_dir, backup)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Path(f"{closed.path}-wal").stat().st_size > 0
    kept = restore(closed.path, closed.backup_dir, backup)
    assert kept is not None
    assert sorted(row[1] for row in dump(Database(kept))["users"]) == ["Ada", "in the WAL"]
    assert [row[1] for row in dump(closed)["users"]] == ["Ada"]
    assert check(closed.path) == []


def test_restore_over_a_damaged_file_keeps_it_as_it_is(closed: Database) -> None:
    backup = back_up(closed.path, closed.backup_dir, "manual")
    then = dump(closed)
    closed.path.write_bytes(b"no database any more" * 1000)
    kept = restore(closed.path, closed.backup_dir, backup)
    assert kept is not None
    assert kept.read_bytes() == b"no database any more" * 1000
    assert dump(closed) == then


def test_a_damaged_backup_changes_nothing(closed: Database) -> None:
    backup = back_up(closed.path, closed.backup_dir, "manual")
    change(backup, "PRAGMA foreign_keys = OFF", "DELETE FROM users")
    before = closed.path.read_bytes()
    with pytest.raises(MigrationError, match="is damaged: row 1 of conversations"):
        restore(closed.path, closed.backup_dir, backup)
    assert closed.path.read_bytes() == before
    assert list(closed.backup_dir.iterdir()) == [backup]


async def test_vacuum_gives_space_back(database: Database, store: Store) -> None:
    ada = await store.create_user("Ada", "hash", is_admin=True)
    made = await store.create_conversation(ada.id, "Title")
    for number in range(40):
        await exchange(store, ada.id, made.id, None, f"question {number}", "answer " * 2000)
    kept = await store.create_conversation(ada.id, "Kept")
    await exchange(store, ada.id, kept.id, None, "what stays", "stays")
    change_of = "DELETE FROM conversations WHERE title = 'Title'"

    def forget(connection: sqlite3.Connection) -> None:
        connection.execute(change_of)

    await database.write_raw(forget)
    before = dump(database)
    result = await vacuum(database)
    assert result.after < result.before / 2
    assert database.path.stat().st_size == result.after
    assert dump(database) == before
    assert [found.title for found in await store.list_conversations(ada.id, query="what stays")] == ["Kept"]
    await store.create_conversation(ada.id, "writes go on")
    check_integrity(database)

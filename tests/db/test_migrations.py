import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import JSON, inspect

from db import Database, Store, migrator
from db.connection import connect
from db.errors import MigrationError, NewerSchema, NotADatabase
from db.filelock import FileLock
from db.migrations import MIGRATIONS, Migration
from db.migrations.base import statements
from db.models import Base, StorableText
from tests.db.conftest import StartPython
from tests.db.helpers import check_integrity, dump

NEXT = len(MIGRATIONS) + 1


@pytest.fixture
async def used(tmp_path: Path) -> Database:
    """A closed database with a user and a conversation in it."""
    database = Database(tmp_path / "db" / "chat.sqlite3", tmp_path / "backups")
    database.migrate()
    store = Store(database)
    user = await store.create_user("Ada", "hash")
    await store.create_conversation(user.id, "Before the upgrade")
    await database.aclose()
    return database


def upgrade(database: Database, *steps: Migration) -> Path | None:
    lock = FileLock(database.path.with_name("chat.sqlite3.lock"))
    return migrator.migrate(database.path, database.backup_dir, lock, (*MIGRATIONS, *steps))


def schema(path: Path) -> tuple[int, set[str]]:
    with closing(sqlite3.connect(path)) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema")}
        return connection.execute("PRAGMA user_version").fetchone()[0], names


def test_first_start_makes_the_file_and_needs_no_backup(tmp_path: Path) -> None:
    database = Database(tmp_path / "new" / "folder" / "chat.sqlite3", tmp_path / "backups")
    assert database.migrate() is None
    assert database.migrate() is None
    assert not database.backup_dir.exists()
    version, names = schema(database.path)
    assert version == len(MIGRATIONS)
    assert {"users", "sessions", "api_keys", "conversations", "messages", "settings", "audit"} <= names
    with closing(connect(database.path, read_only=True)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert stat.S_IMODE(database.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(database.path.parent.stat().st_mode) == 0o700
    database.close()


TYPES = {
    "SQLite": {str: "TEXT", int: "INTEGER", bool: "INTEGER", bytes: "BLOB", dict: "TEXT"},
    "PostgreSQL": {str: "TEXT", int: "BIGINT", bool: "BOOLEAN", bytes: "BYTEA", dict: "JSON"},
}


def test_models_are_the_migrated_schema(database: Database) -> None:
    engine = database.dialect.read_engine(1)
    inspector = inspect(engine)
    types = TYPES[database.dialect.name]
    for table in Base.metadata.sorted_tables:
        columns = {column["name"]: column for column in inspector.get_columns(table.name)}
        keys = inspector.get_pk_constraint(table.name)["constrained_columns"]
        assert set(columns) == {column.name for column in table.columns}, table.name
        for column in table.columns:
            found = columns[column.name]
            where = f"{table.name}.{column.name}"
            is_json = isinstance(column.type, JSON)
            python = str if isinstance(column.type, StorableText) else column.type.python_type
            assert str(found["type"]) == types[dict if is_json else python], where
            assert (column.name in keys) == column.primary_key, where
            if not is_json:
                assert found["nullable"] == bool(column.nullable), where
    engine.dispose()


def test_every_step_is_there_for_both_databases() -> None:
    assert [step.number for step in MIGRATIONS if step.postgres] == [step.number for step in MIGRATIONS]


def test_upgrade_backs_up_first(used: Database) -> None:
    before = dump(used)
    backup = upgrade(used, Migration(NEXT, "shelf", statements("CREATE TABLE shelf (id INTEGER)")))
    assert backup is not None
    assert backup.parent == used.backup_dir
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert [path.name for path in used.backup_dir.iterdir()] == [backup.name]
    version, names = schema(used.path)
    assert version == NEXT
    assert "shelf" in names
    restored = Database(backup)
    restored.migrate()
    assert dump(restored) == before
    check_integrity(restored)


def test_failed_step_changes_nothing_and_names_the_backup(used: Database) -> None:
    before, old_schema = dump(used), schema(used.path)
    good = Migration(NEXT, "rename", statements("UPDATE users SET name = 'Bob'", "CREATE TABLE x (a)"))
    bad = Migration(NEXT + 1, "broken", statements("DROP TABLE settings", "SELECT * FROM missing"))
    with pytest.raises(
        MigrationError, match=rf"step {NEXT + 1} \(broken\) and was undone: no such table"
    ) as caught:
        upgrade(used, good, bad)
    assert caught.value.backup is not None
    assert str(caught.value.backup) in str(caught.value)
    assert dump(Database(caught.value.backup)) == before
    assert dump(used) == before
    assert schema(used.path) == old_schema
    assert used.migrate() is None


def test_step_that_breaks_a_reference_is_undone(used: Database) -> None:
    before = dump(used)
    orphan = Migration(NEXT, "orphan", statements("DELETE FROM users"))
    with pytest.raises(MigrationError, match="a row of conversations refers to a missing row of users"):
        upgrade(used, orphan)
    assert dump(used) == before


def test_step_that_commits_is_refused(used: Database) -> None:
    with pytest.raises(MigrationError, match="ended its transaction"):
        upgrade(used, Migration(NEXT, "commits", statements("CREATE TABLE x (a)", "COMMIT")))
    assert schema(used.path)[0] == len(MIGRATIONS)


def test_without_a_backup_there_is_no_upgrade(used: Database) -> None:
    used.backup_dir.write_text("a file where the folder should be")
    before = schema(used.path)
    with pytest.raises(MigrationError, match="not upgraded, for there is no backup: cannot back up"):
        upgrade(used, Migration(NEXT, "shelf", statements("CREATE TABLE shelf (id INTEGER)")))
    assert schema(used.path) == before


def test_gap_in_the_numbers_is_refused(used: Database) -> None:
    with pytest.raises(MigrationError, match="not numbered"):
        upgrade(used, Migration(NEXT + 1, "gap", statements()))


def test_newer_schema_is_refused(used: Database) -> None:
    upgrade(used, Migration(NEXT, "future", statements("CREATE TABLE future (id INTEGER)")))
    content = used.path.read_bytes()
    with pytest.raises(NewerSchema, match=f"has schema version {NEXT}, .* knows {len(MIGRATIONS)}"):
        used.migrate()
    assert used.path.read_bytes() == content


@pytest.mark.parametrize("content", [b"not a database, but long enough to look at" * 100, b"short"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "chat.sqlite3"
    path.write_bytes(content)
    with pytest.raises(NotADatabase, match="is not an SQLite database"):
        Database(path).migrate()
    assert path.read_bytes() == content


def test_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE users (id)")
    content = path.read_bytes()
    with pytest.raises(NotADatabase, match="another program"):
        Database(path).migrate()
    assert path.read_bytes() == content


def test_damaged_database_is_not_upgraded(used: Database) -> None:
    with closing(sqlite3.connect(used.path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'messages'").fetchone()
    content = bytearray(used.path.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = b"\xff" * 4096
    used.path.write_bytes(content)
    with pytest.raises(MigrationError, match=r"no backup: .* is damaged"):
        upgrade(used, Migration(NEXT, "shelf", statements("CREATE TABLE shelf (id INTEGER)")))
    assert used.path.read_bytes() == content
    assert list(used.backup_dir.iterdir()) == []


def test_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(MigrationError, match="cannot open"):
        Database(tmp_path).migrate()


MIGRATE = """
import sys
from pathlib import Path
from db import Database
database = Database(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
database.migrate()
database.close()
print("done")
"""


def test_concurrent_starts(tmp_path: Path, start_python: StartPython) -> None:
    path = tmp_path / "chat.sqlite3"
    starters = [start_python(MIGRATE, path) for _ in range(4)]
    for starter in starters:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "ready\n"
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write("go\n")
        starter.stdin.flush()
    outcomes = [starter.communicate(timeout=120) for starter in starters]
    assert outcomes == [("done\n", "")] * 4
    database = Database(path)
    database.migrate()
    check_integrity(database)
    assert len(dump(database)["users"]) == 0


KILLED = """
import sys
from pathlib import Path
from db import migrator
from db.filelock import FileLock
from db.migrations import MIGRATIONS, Migration

def half(connection):
    connection.execute("UPDATE users SET name = 'half done'")
    connection.execute("DROP TABLE messages")
    # Large enough to spill from the cache into the WAL.
    connection.execute("CREATE TABLE big AS SELECT randomblob(20000000) AS filler")
    print("inside", flush=True)
    sys.stdin.readline()

path = Path(sys.argv[1])
steps = (*MIGRATIONS, Migration(len(MIGRATIONS) + 1, "half", half))
migrator.migrate(path, path.parent / "backups", FileLock(path.with_name("chat.sqlite3.lock")), steps)
"""


def test_killed_in_the_middle_of_an_upgrade(used: Database, start_python: StartPython) -> None:
    before, old_schema = dump(used), schema(used.path)
    process = start_python(KILLED, used.path)
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    process.kill()
    process.communicate()
    assert used.migrate() is None
    assert dump(used) == before
    assert schema(used.path) == old_schema
    check_integrity(used)


def test_backup_of_a_copy_can_be_put_in_place(used: Database, tmp_path: Path) -> None:
    backup = upgrade(used, Migration(NEXT, "shelf", statements("CREATE TABLE shelf (id INTEGER)")))
    assert backup is not None
    target = tmp_path / "restored" / "chat.sqlite3"
    target.parent.mkdir()
    shutil.copy(backup, target)
    restored = Database(target)
    assert restored.migrate() is None
    assert [row[1] for row in dump(restored)["users"]] == ["Ada"]

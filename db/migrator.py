"""Bringing a database file to the schema of this version, or leaving it exactly as it was.

All pending steps run in one transaction, which SQLite gives to schema changes too: a step that fails, or a
process that is killed, leaves the old schema and its data. `user_version` counts the steps and is part of the
transaction.
"""

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from db.backup import back_up
from db.connection import connect
from db.errors import DatabaseInUse, MigrationError, NewerSchema, NotADatabase, StorageUnavailable
from db.filelock import FileLock
from db.migrations import MIGRATIONS, Migration

APPLICATION_ID = 0x54474D43
LOCK_NAME = ".lock"
"""What the name of the writer's lock file adds to that of the database."""
_OLDEST_SQLITE = (3, 37, 0)  # STRICT tables; the trigram tokenizer is older
_LOCK_SECONDS = 60.0


def migrate(
    path: Path, backup_dir: Path, lock: FileLock, migrations: Sequence[Migration] = MIGRATIONS
) -> Path | None:
    """Create or upgrade the database at `path`; return the backup taken, or None when none was needed.

    Safe to call from several processes at once. Raises NewerSchema, NotADatabase, or MigrationError, which
    names the backup; the file is unchanged after any of them.
    """
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise MigrationError(f"SQLite {sqlite3.sqlite_version} is too old; 3.37 or newer is needed")
    if [step.number for step in migrations] != list(range(1, len(migrations) + 1)):
        raise MigrationError("the migrations are not numbered 1, 2, 3 and so on")
    try:
        # The common start has nothing to do, and must not wait for a writer that is at work.
        if is_current(path, len(migrations)):
            return None
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire(_LOCK_SECONDS)
        try:
            return _migrate_locked(path, backup_dir, migrations)
        finally:
            lock.release()
    except DatabaseInUse as error:
        raise MigrationError(f"cannot upgrade {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "") == "SQLITE_NOTADB":
            raise NotADatabase(f"{path} is not an SQLite database; it was left as it is") from error
        raise MigrationError(f"cannot open {path}: {error}") from error
    except OSError as error:
        raise MigrationError(f"cannot open {path}: {error}") from error


def is_current(path: Path, latest: int = len(MIGRATIONS)) -> bool:
    """Whether there is a database at `path` with the schema of `latest` steps. Raises as `version_of`."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with closing(connect(path, read_only=True)) as connection:
        return version_of(connection, path, latest) == latest


def _migrate_locked(path: Path, backup_dir: Path, migrations: Sequence[Migration]) -> Path | None:
    # Made here, so that the history and its WAL are never readable by others.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with closing(connect(path, read_only=False)) as connection:
        version = version_of(connection, path, len(migrations))
        if version == len(migrations):
            return None
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise MigrationError(f"{path} is on a file system without shared memory, which WAL needs")
        backup = None
        if version > 0:
            try:
                backup = back_up(path, backup_dir, f"before-v{len(migrations)}")
            except StorageUnavailable as error:
                raise MigrationError(f"not upgraded, for there is no backup: {error}") from error
        _apply(connection, version, migrations, backup)
        return backup


def version_of(connection: sqlite3.Connection, path: Path, latest: int) -> int:
    """The schema's version of a database of ours. Raises NotADatabase, NewerSchema; sqlite3.DatabaseError."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT NOT EXISTS (SELECT 1 FROM sqlite_schema)").fetchone()[0]
    if owner != APPLICATION_ID and not (empty and owner == 0 and version == 0):
        raise NotADatabase(f"{path} is the database of another program; it was left as it is")
    if version > latest:
        raise NewerSchema(
            f"{path} has schema version {version}, and this version of the product knows {latest}: "
            "install the newer version, or restore a backup"
        )
    return version


def _apply(
    connection: sqlite3.Connection, version: int, migrations: Sequence[Migration], backup: Path | None
) -> None:
    # Rebuilding a table needs them off, which only works outside a transaction; they are checked below
    # instead.
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("BEGIN IMMEDIATE")
    step = "the start"
    try:
        for migration in migrations[version:]:
            step = f"step {migration.number} ({migration.name})"
            migration.apply(connection)
            if not connection.in_transaction:
                raise MigrationError(f"{step} ended its transaction")
        step = "the check of foreign keys"
        if (broken := connection.execute("PRAGMA foreign_key_check").fetchone()) is not None:
            raise MigrationError(f"a row of {broken[0]} refers to a missing row of {broken[2]}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except Exception as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise MigrationError(f"the upgrade failed at {step} and was undone: {error}", backup) from error

"""Copies of a PostgreSQL database as SQLite files, and such files put in its place.

So a backup is the same kind of file whatever the database is: it is checked, rehearsed and downloaded alike,
and leads from either to the other. For a history of many gigabytes the server's own means are faster.
"""

import secrets
import sqlite3
import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from db import dialect, migrator
from db.backup import copy_to, sync
from db.check import check_file
from db.errors import Conflict, MigrationError, NotADatabase, OutcomeUnknown, StorageUnavailable
from db.filelock import FileLock
from db.migrations import MIGRATIONS
from db.postgres.connection import READER, WRITER, connect
from db.postgres.copy import tables, to_postgres, to_sqlite
from db.postgres.failures import driver_errors, message_of
from db.postgres.lock import lock
from db.postgres.migrator import make_search_index, version_of
from db.postgres.search import INDEX_NAMES
from db.postgres.url import PostgresUrl

STEM = "chat"


def back_up(url: PostgresUrl, directory: Path, label: str) -> Path:
    """Copy the database to a new SQLite file in `directory`, check it, and return its path.

    The copy is the state of one moment; writes go on meanwhile. It appears under its name only when it is
    complete, and is readable by this user only. Raises StorageUnavailable.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    target = directory / f"{STEM}-{stamp}-{label}-{secrets.token_hex(3)}.sqlite3"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".part-") as folder:
            part = Path(folder) / "copy.sqlite3"
            with closing(connect(url, *READER, timeout=None)) as connection:
                _write(url, connection, part)
            sync(part)
            part.rename(target)
        sync(directory)
    except driver_errors(sqlite3.Error, MigrationError) as error:
        raise StorageUnavailable(f"cannot back up {url} to {directory}: {message_of(error)}") from error
    return target


def _write(url: PostgresUrl, connection: Any, part: Path) -> None:
    version = version_of(connection, url, len(MIGRATIONS))
    if not version:
        raise NotADatabase(f"{url} is empty: the first start of the app makes its tables")
    migrator.migrate(part, part.parent, FileLock(part.with_name("lock")), MIGRATIONS[:version])
    with closing(sqlite3.connect(part, isolation_level=None)) as copy:
        # A lone file, without a WAL beside it that somebody could forget to copy.
        copy.execute("PRAGMA journal_mode = DELETE")
        copy.execute("BEGIN")
        to_sqlite(connection.cursor(), copy)
        copy.execute("COMMIT")
        verdict = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
        broken = copy.execute("PRAGMA foreign_key_check").fetchone()
    if verdict != "ok" or broken is not None:
        raise StorageUnavailable(
            f"the copy of {url} is not in order: {verdict if broken is None else broken}"
        )


def take_in(
    url: PostgresUrl, file: Path, backup_dir: Path, *, replace: bool
) -> tuple[dict[str, int], Path | None]:
    """Put the rows of an SQLite file into the database, all or none; how many, and where the old ones are
    kept.

    replace: whether what is there is backed up and removed; else it must be empty. The schema must be there.
    Raises DatabaseInUse while an app writes to it, MigrationError for a file that is damaged, foreign or of a
    newer version, Conflict when the database is not empty, StorageUnavailable, and OutcomeUnknown.
    """
    check_file(file)
    with tempfile.TemporaryDirectory(prefix="tangram-copy-") as folder:
        copy = Path(folder) / "copy.sqlite3"
        try:
            copy_to(file, copy)
            migrator.migrate(copy, copy.parent, FileLock(copy.with_name("lock")))
            with (
                closing(sqlite3.connect(copy)) as source,
                closing(connect(url, *WRITER, timeout=None)) as connection,
            ):
                lock(connection, dialect.LOCK_SECONDS, url)
                kept = _make_room(url, connection, backup_dir, replace=replace)
                return _fill(source, connection), kept
        except driver_errors(sqlite3.Error) as error:
            raise StorageUnavailable(f"cannot copy {file} to {url}: {message_of(error)}") from error


def _make_room(url: PostgresUrl, connection: Any, backup_dir: Path, *, replace: bool) -> Path | None:
    cursor = connection.cursor()
    full = []
    for table in tables(cursor):
        cursor.execute(f"SELECT EXISTS (SELECT 1 FROM {table})")  # noqa: S608 - our names
        if cursor.fetchone()[0]:
            full.append(table)
    connection.rollback()
    if full and not replace:
        raise Conflict(f"{url} is not empty: there are rows in {', '.join(full)}")
    kept = back_up(url, backup_dir, "before-restore") if full else None
    if full:
        cursor.execute(f"TRUNCATE {', '.join(tables(cursor))}")
    return kept


def _fill(source: sqlite3.Connection, connection: Any) -> dict[str, int]:
    cursor = connection.cursor()
    for index in INDEX_NAMES:  # filled at once, at the end, it takes a fraction of the time
        cursor.execute(f"DROP INDEX IF EXISTS {index}")
    counts = to_postgres(source, cursor)
    cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    make_search_index(connection)
    try:
        connection.commit()
    except driver_errors() as error:
        raise OutcomeUnknown(
            "the server was lost at the very end: the database has all of it, or is as it was. See with "
            "`tangram-chat user list`"
        ) from error
    return counts

"""Consistent copies of a live database, through SQLite's own backup interface."""

import os
import secrets
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from db.connection import connect
from db.errors import StorageUnavailable


def back_up(source: Path, directory: Path, label: str) -> Path:
    """Copy the database `source` to a new file in `directory`, check the copy, and return its path.

    The copy is the last committed state, appears under its name only when it is complete, and is readable by
    this user only. Raises StorageUnavailable when it cannot be written or is damaged.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    target = directory / f"{source.stem}-{stamp}-{label}-{secrets.token_hex(3)}.sqlite3"
    part = target.with_suffix(".part")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            copy_to(source, part)
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)
        sync(directory)
    except (OSError, sqlite3.Error) as error:
        raise StorageUnavailable(f"cannot back up {source} to {directory}: {error}") from error
    return target


def copy_to(source: Path, part: Path) -> None:
    """Copy the last committed state of `source` to the file `part`, on disk when this returns.

    Raises StorageUnavailable when the copy is damaged, sqlite3.Error and OSError when it cannot be made.
    """
    with closing(connect(source, read_only=True)) as origin, closing(sqlite3.connect(part)) as copy:
        # In one step: a step that pauses starts over whenever the writer commits in between.
        origin.backup(copy, pages=-1)
        # A lone file, without a WAL beside it that somebody could forget to copy.
        copy.execute("PRAGMA journal_mode = DELETE")
        verdict = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise StorageUnavailable(f"the database {source} is damaged: {verdict}")
    sync(part)


def sync(path: Path) -> None:
    """Have a file or a directory on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

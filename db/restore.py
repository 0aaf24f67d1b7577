"""Putting a backup in the place of the database, with nothing lost on the way."""

import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from db.backup import back_up, copy_to, sync
from db.check import check_file
from db.connection import connect
from db.errors import StorageUnavailable
from db.filelock import FileLock
from db.migrator import LOCK_NAME
from db.moved import note_beside

_LOCK_SECONDS = 2.0


def restore(path: Path, backup_dir: Path, backup: Path) -> Path | None:
    """Put a copy of `backup` in the place of the database at `path`; return where the old is kept, if any.

    The backup is checked first, and what is there now is backed up; a file too damaged for that is put aside
    as it is. Killed at any moment, this leaves the old database or the new one. A backup of an older version
    is upgraded at the next start.

    Raises DatabaseInUse while the app runs, MigrationError for a backup that is damaged, foreign or of a
    newer version, and StorageUnavailable when a file cannot be read or written.
    """
    check_file(backup)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(path.with_name(path.name + LOCK_NAME))
    lock.acquire(_LOCK_SECONDS)
    part = path.with_name(path.name + ".restoring")
    try:
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        copy_to(backup, part)
        with closing(sqlite3.connect(part)) as made:
            made.execute("PRAGMA journal_mode = WAL")
        kept = _put_aside(path, backup_dir) if path.exists() else None
        part.replace(path)
        note_beside(path).unlink(missing_ok=True)  # this file is the database again
        sync(path.parent)
        return kept
    except (OSError, sqlite3.Error) as error:
        raise StorageUnavailable(f"cannot restore {backup} to {path}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
        lock.release()


def _put_aside(path: Path, backup_dir: Path) -> Path:
    """Keep what is at `path` in `backup_dir`. Afterwards no WAL is left beside it."""
    try:
        kept = back_up(path, backup_dir, "before-restore")
        with closing(connect(path, read_only=False)) as connection:
            # Empties the WAL: left behind, it would be taken for the new file's.
            connection.execute("PRAGMA journal_mode = DELETE")
    except (StorageUnavailable, sqlite3.Error):
        return _move_away(path, backup_dir)
    return kept


def _move_away(path: Path, backup_dir: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    backup_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = backup_dir / f"{path.stem}-{stamp}-before-restore-as-it-was.sqlite3"
    for suffix in ("-shm", "-wal", ""):  # the file itself last: a second try finds the rest of it
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.replace(kept.with_name(kept.name + suffix))
    return kept

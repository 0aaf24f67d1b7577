"""Moving from SQLite to PostgreSQL."""

from pathlib import Path

from db.errors import OutcomeUnknown, StorageUnavailable
from db.filelock import FileLock
from db.migrator import LOCK_NAME
from db.moved import leave_note, note_beside
from db.postgres.dialect import PostgresDialect
from db.postgres.url import PostgresUrl

_LOCK_SECONDS = 2.0


def move_in(path: Path, url: PostgresUrl, backup_dir: Path) -> dict[str, int]:
    """Copy all rows of the SQLite database at `path` into the empty one at `url`; how many, by table.

    All or none; the counts of both sides are compared before the commit. The file stays as it is,
    with a note beside it, so that it is not taken for the database any more. Samples of the engine's memory
    stay behind. Raises DatabaseInUse while an app uses either, Conflict when the target
    is not empty, MigrationError for a damaged file, StorageUnavailable.
    """
    if not path.exists():
        raise StorageUnavailable(f"there is no database at {path}: is TANGRAM_HOME right?")
    lock = FileLock(path.with_name(path.name + LOCK_NAME))
    lock.acquire(_LOCK_SECONDS)
    try:
        noted = note_beside(path).exists()
        leave_note(path, url)  # before the commit: afterwards there is no moment without it
        try:
            return PostgresDialect(url, backup_dir).copy_in(path)
        except OutcomeUnknown:
            raise
        except BaseException:
            if not noted:
                note_beside(path).unlink(missing_ok=True)
            raise
    finally:
        lock.release()

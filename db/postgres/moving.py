"""Moving from SQLite to PostgreSQL."""

from pathlib import Path

from db.errors import StorageUnavailable
from db.filelock import FileLock
from db.migrator import LOCK_NAME
from db.postgres.dialect import PostgresDialect
from db.postgres.url import PostgresUrl

_LOCK_SECONDS = 2.0


def move_in(path: Path, url: PostgresUrl, backup_dir: Path) -> dict[str, int]:
    """Copy all rows of the SQLite database at `path` into the empty one at `url`; how many, by table.

    All or none; the counts of both sides are compared before the commit. The file stays as it is. Samples of
    the engine's memory stay behind. Raises DatabaseInUse while an app uses either, Conflict when the target
    is not empty, MigrationError for a damaged file, StorageUnavailable.
    """
    if not path.exists():
        raise StorageUnavailable(f"there is no database at {path}: is TANGRAM_HOME right?")
    lock = FileLock(path.with_name(path.name + LOCK_NAME))
    lock.acquire(_LOCK_SECONDS)
    try:
        return PostgresDialect(url, backup_dir).copy_in(path)
    finally:
        lock.release()

"""The default: one SQLite file."""

import logging
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import sqlite_utils
from sqlalchemy import ColumnElement, Engine

from db import dialect, migrator
from db.backup import back_up
from db.check import check
from db.connection import connect, make_engine, unavailable
from db.dialect import Dialect, Vacuumed
from db.errors import StorageUnavailable
from db.filelock import FileLock
from db.restore import restore
from db.search import matches

T = TypeVar("T")

_log = logging.getLogger(__name__)


class SqliteDialect(Dialect):
    """The file at `path`, in WAL mode, with a lock file beside it."""

    name = "SQLite"
    note = ""

    def __init__(self, path: Path, backup_dir: Path) -> None:
        self.path = path
        self.where = str(path)
        self.backup_dir = backup_dir
        self._lock = FileLock(path.with_name(path.name + migrator.LOCK_NAME))

    def migrate(self) -> Path | None:
        return migrator.migrate(self.path, self.backup_dir, self._lock)

    def is_current(self) -> bool:
        return migrator.is_current(self.path)

    def read_engine(self, connections: int) -> Engine:
        return make_engine(lambda: connect(self.path, read_only=True), connections=connections, begin="BEGIN")

    def write_engine(self) -> Engine:
        return make_engine(self._connect, connections=1, begin="BEGIN IMMEDIATE")

    def _connect(self) -> sqlite3.Connection:
        self._lock.acquire(dialect.LOCK_SECONDS)
        return connect(self.path, read_only=False)

    def bare(self, engine: Engine, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` on the engine's bare connection, in autocommit mode, and throw that away afterwards."""
        pooled = engine.raw_connection()
        try:
            connection = pooled.driver_connection
            if not isinstance(connection, sqlite3.Connection):
                raise StorageUnavailable("there is no connection")
            return fn(connection)
        finally:
            pooled.invalidate()

    def rest(self, engine: Engine) -> None:
        self._checkpoint(engine, "PASSIVE")

    def finish(self, engine: Engine) -> None:
        self._checkpoint(engine, "TRUNCATE")
        engine.dispose()
        self._lock.release()

    def _checkpoint(self, engine: Engine, mode: str) -> None:
        try:
            pooled = engine.raw_connection()
            try:
                pooled.cursor().execute(f"PRAGMA wal_checkpoint({mode})")
            finally:
                pooled.close()
        except (StorageUnavailable, sqlite3.Error) as error:
            # Nothing is lost: the WAL holds it, and the next checkpoint takes it along.
            _log.warning("checkpoint of the database failed: %s", error)

    def unavailable(self, error: BaseException, action: str) -> StorageUnavailable | None:
        return unavailable(error, action)

    def matches(self, owner_id: str, query: str) -> ColumnElement[bool]:
        return matches(owner_id, query)

    def check(self) -> list[str]:
        return check(self.path)

    def back_up(self, directory: Path, label: str) -> Path:
        return back_up(self.path, directory, label)

    def restore(self, backup: Path) -> Path | None:
        return restore(self.path, self.backup_dir, backup)

    def vacuum(self, engine: Engine) -> Vacuumed:
        """Rewrite the file without the space that deleted rows left, and put the search index in order.

        Reads go on meanwhile; some seconds for each gigabyte. Takes about twice the file's size of free
        space.
        """

        def work(connection: sqlite3.Connection) -> Vacuumed:
            tool = sqlite_utils.Database(connection, recursive_triggers=False, execute_plugins=False)
            before = _pages(connection)
            tool.execute("INSERT INTO messages_search (messages_search) VALUES ('optimize')")
            tool.execute("INSERT INTO conversations_search (conversations_search) VALUES ('optimize')")
            tool.vacuum()
            tool.execute("PRAGMA optimize")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return Vacuumed(before, _pages(connection))

        return self.bare(engine, work)

    def size(self) -> int:
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                total += self.path.with_name(self.path.name + suffix).stat().st_size
        return total

    def version(self) -> str:
        return sqlite3.sqlite_version


def _pages(connection: sqlite3.Connection) -> int:
    """Bytes of all pages, free ones included."""
    pages, page = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size")
    )
    return pages * page

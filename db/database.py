"""The database: its migrations, its writer and its readers."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sqlalchemy.orm import Session

from db.dialect import Dialect, Vacuumed
from db.errors import DatabaseClosed, DbError, StorageUnavailable
from db.postgres.dialect import PostgresDialect
from db.postgres.url import PostgresUrl
from db.samples_file import SamplesFile
from db.sqlite import SqliteDialect
from db.writer import Writer

T = TypeVar("T")

READERS = 4
SAMPLES_NAME = "samples.sqlite3"


class Database:
    """One database, written by one thread and read by a few others.

    Call `migrate()` first and `close()` last. It is the SQLite file at `path`; with `url`, PostgreSQL, and
    then only the samples of the engine's memory are kept in a small SQLite file, in the folder of `path`.
    `backup_dir` defaults to `backups` beside the file.
    """

    def __init__(self, path: Path, backup_dir: Path | None = None, url: PostgresUrl | None = None) -> None:
        self.path = Path(path)
        self.backup_dir = Path(backup_dir) if backup_dir is not None else self.path.parent / "backups"
        self._sqlite: SqliteDialect | None = None
        self.dialect: Dialect
        if url is None:
            self.dialect = self._sqlite = SqliteDialect(self.path, self.backup_dir)
        else:
            self.dialect = PostgresDialect(url, self.backup_dir)
        self._samples = SamplesFile(self.path.with_name(SAMPLES_NAME))
        self._writer = Writer(self.dialect)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="db-reader")
        self._read_engine = self.dialect.read_engine(READERS)
        self._migrated = False
        self._closed = False

    def migrate(self) -> Path | None:
        """Create the database or bring it to this version's schema; return the backup taken, if one was.

        Raises MigrationError, NewerSchema or NotADatabase, and leaves it as it was. Blocks: at start only.
        """
        backup = self.dialect.migrate()
        self._migrated = True
        return backup

    @property
    def is_current(self) -> bool:
        """Whether the database is there with this version's schema. Raises NotADatabase, NewerSchema."""
        return self.dialect.is_current()

    async def write(self, fn: Callable[[Session], T]) -> T:
        """Run `fn` in one transaction of the writer and return what it returns, once it is committed.

        What `fn` raises rolls the transaction back and is raised here. When the caller is cancelled, a
        transaction that has begun completes and one that has not is dropped. `fn` must return no live ORM
        objects. Raises OutcomeUnknown when the server was lost during the commit, and did not come back in
        time to be asked.
        """
        self._check()
        return await asyncio.wrap_future(self._writer.submit(fn))

    async def read(self, fn: Callable[[Session], T]) -> T:
        """Run `fn` on a read-only connection and one snapshot of the database. Never waits for a writer.

        A connection that breaks is replaced and `fn` run again, once.
        """
        self._check()

        def snapshot() -> T:
            try:
                return self._snapshot(fn)
            except Exception as error:
                if not self.dialect.lost(error):
                    raise
            return self._snapshot(fn)

        try:
            future = self._readers.submit(self._reading, snapshot)
        except RuntimeError as error:
            raise DatabaseClosed("the database is closed") from error
        return await asyncio.wrap_future(future)

    def _snapshot(self, fn: Callable[[Session], T]) -> T:
        with Session(self._read_engine) as session, session.begin():
            return fn(session)

    def _reading(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:
            if (refused := self.dialect.unavailable(error, "read")) is not None:
                raise refused from error
            raise

    async def write_raw(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` on a bare SQLite connection, in autocommit mode, for tools such as sqlite-utils.

        It leads to where the samples of the engine's memory are: the database's file, or one of their own.
        Whatever `fn` does to the connection's settings ends with it, as does a transaction that it leaves
        open.
        """
        self._check()
        if self._sqlite is None:
            return await self._samples.run(fn)
        sqlite = self._sqlite
        return await asyncio.wrap_future(self._writer.submit_raw(lambda engine: sqlite.bare(engine, fn)))

    async def read_raw(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """As `write_raw`, for a `fn` that only reads; it does not wait for writers."""
        self._check()
        if self._sqlite is None:
            return await self._samples.run(fn)
        return await self.read(lambda session: fn(_bare(session)))

    async def vacuum(self) -> Vacuumed:
        """Put the database in order; space of deleted rows can be used again. Writes wait meanwhile."""
        self._check()
        return await asyncio.wrap_future(self._writer.submit_raw(self.dialect.vacuum))

    def close(self) -> None:
        """Settle everything queued and close the database. May be called twice. Blocks: see `aclose`."""
        self._closed = True
        self._readers.shutdown(wait=True)
        self._read_engine.dispose()
        self._writer.close()
        self._samples.close()

    async def aclose(self) -> None:
        """`close()` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def _check(self) -> None:
        if self._closed:
            raise DatabaseClosed("the database is closed")
        if not self._migrated:
            raise DbError("call migrate() before the first read or write")


def _bare(session: Session) -> sqlite3.Connection:
    connection = session.connection().connection.driver_connection
    if not isinstance(connection, sqlite3.Connection):
        raise StorageUnavailable("the reader has no connection")
    return connection

"""The database file: its migrations, its writer and its readers."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sqlalchemy.orm import Session

from db import migrator
from db.connection import connect, make_engine, unavailable
from db.errors import DatabaseClosed, DbError
from db.filelock import FileLock
from db.writer import Writer

T = TypeVar("T")

READERS = 4


class Database:
    """One SQLite file, written by one thread and read by a few others.

    Call `migrate()` first and `close()` last. `backup_dir` defaults to `backups` beside the file.
    """

    def __init__(self, path: Path, backup_dir: Path | None = None) -> None:
        self.path = Path(path)
        self.backup_dir = Path(backup_dir) if backup_dir is not None else self.path.parent / "backups"
        self._lock = FileLock(self.path.with_name(self.path.name + migrator.LOCK_NAME))
        self._writer = Writer(self.path, self._lock)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="db-reader")
        self._read_engine = make_engine(
            lambda: connect(self.path, read_only=True), connections=READERS, begin="BEGIN"
        )
        self._migrated = False
        self._closed = False

    def migrate(self) -> Path | None:
        """Create the file or bring it to this version's schema; return the backup taken, if one was.

        Raises MigrationError, NewerSchema or NotADatabase, and leaves the file as it was. Blocks: at start
        only.
        """
        backup = migrator.migrate(self.path, self.backup_dir, self._lock)
        self._migrated = True
        return backup

    @property
    def is_current(self) -> bool:
        """Whether the file is there and has this version's schema. Raises NotADatabase, NewerSchema."""
        return migrator.is_current(self.path)

    async def write(self, fn: Callable[[Session], T]) -> T:
        """Run `fn` in one transaction of the writer and return what it returns, once it is committed.

        What `fn` raises rolls the transaction back and is raised here. When the caller is cancelled, a
        transaction that has begun completes and one that has not is dropped. `fn` must return no live ORM
        objects.
        """
        self._check()
        return await asyncio.wrap_future(self._writer.submit(fn))

    async def write_raw(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` on the writer's bare connection, in autocommit mode, for tools such as sqlite-utils."""
        self._check()
        return await asyncio.wrap_future(self._writer.submit_raw(fn))

    async def read(self, fn: Callable[[Session], T]) -> T:
        """Run `fn` on a read-only connection and one snapshot of the database. Never waits for a writer."""
        self._check()

        def snapshot() -> T:
            try:
                with Session(self._read_engine) as session, session.begin():
                    return fn(session)
            except Exception as error:
                if (refused := unavailable(error, "read")) is not None:
                    raise refused from error
                raise

        try:
            future = self._readers.submit(snapshot)
        except RuntimeError as error:
            raise DatabaseClosed("the database is closed") from error
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Settle everything queued and close the file. May be called twice. Blocks: see `aclose`."""
        self._closed = True
        self._readers.shutdown(wait=True)
        self._read_engine.dispose()
        self._writer.close()

    async def aclose(self) -> None:
        """`close()` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def _check(self) -> None:
        if self._closed:
            raise DatabaseClosed("the database is closed")
        if not self._migrated:
            raise DbError("call migrate() before the first read or write")

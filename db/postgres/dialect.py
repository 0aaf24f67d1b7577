"""PostgreSQL as a database of the store."""

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from db import dialect
from db.dialect import Dialect, Vacuumed
from db.errors import DbError, OutcomeUnknown, StorageUnavailable
from db.migrations import MIGRATIONS
from db.postgres.backup import back_up, take_in
from db.postgres.check import check
from db.postgres.connection import READER, WRITER, connect, make_engine, refused
from db.postgres.copy import tables
from db.postgres.failures import cannot_work, driver_errors, is_lost, message_of
from db.postgres.lock import lock
from db.postgres.migrator import is_current, make_search_index, migrate
from db.postgres.search import matches
from db.postgres.url import PostgresUrl

T = TypeVar("T")

ASK_SECONDS = 20.0
"""How long a write whose commit was cut off waits for the server, to ask whether it is there."""
_RETRY_SECONDS = 0.2
_MARK = text("UPDATE tangram SET last_write = :mark")
_LAST_WRITE = text("SELECT last_write FROM tangram")

_log = logging.getLogger(__name__)


class PostgresDialect(Dialect):
    """The database at `url`. Its writer's lock is the connection's own, so it ends when that does."""

    name = "PostgreSQL"
    note = (
        "The server keeps the database: its own backups (pg_dump, point-in-time recovery) protect it best. "
        "Those made here are copies as SQLite files."
    )

    def __init__(self, url: PostgresUrl, backup_dir: Path) -> None:
        self.url = url
        self.where = f"PostgreSQL ({url})"
        self.backup_dir = backup_dir

    def migrate(self) -> Path | None:
        label = f"before-v{len(MIGRATIONS)}"
        return migrate(self.url, lambda: back_up(self.url, self.backup_dir, label))

    def is_current(self) -> bool:
        return is_current(self.url)

    def read_engine(self, connections: int) -> Engine:
        return make_engine(lambda: connect(self.url, *READER), connections=connections)

    def write_engine(self) -> Engine:
        return make_engine(self._connect, connections=1)

    def _connect(self) -> Any:
        connection = connect(self.url, *WRITER)
        try:
            lock(connection, dialect.LOCK_SECONDS, self.url)
        except driver_errors() as error:
            raise refused(self.url, error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def transact(self, engine: Engine, fn: Callable[[Session], T]) -> T:
        """As in the base; a commit that is cut off is looked for when the server is there again.

        Each transaction leaves a mark, and there is one writer: so the last mark says whether the last
        transaction was committed. Raises OutcomeUnknown when it cannot be read in time.
        """
        mark = secrets.token_hex(8)
        with Session(engine, expire_on_commit=False) as session:
            session.begin()
            result = fn(session)
            session.flush()
            # Also refuses to go on in a transaction that has failed: its COMMIT would be a silent ROLLBACK.
            session.execute(_MARK, {"mark": mark})
            try:
                session.commit()
            except DBAPIError as error:
                if not is_lost(error):
                    raise
                session.invalidate()
                if not self._is_last(engine, mark, error):
                    raise
        return result

    def _is_last(self, engine: Engine, mark: str, error: Exception) -> bool:
        _log.warning("the server was lost during a commit: asking whether it was done")
        deadline = time.monotonic() + ASK_SECONDS
        while True:
            try:
                with engine.connect() as connection:
                    return bool(connection.scalar(_LAST_WRITE) == mark)
            except (DbError, DBAPIError) as failure:
                if time.monotonic() >= deadline:
                    raise OutcomeUnknown(
                        f"the connection to {self.where} was lost during a write, which may be stored or not"
                    ) from error
                _log.info(
                    "the server cannot be asked yet: %s", self.unavailable(failure, "question") or failure
                )
            time.sleep(_RETRY_SECONDS)

    def unavailable(self, error: BaseException, action: str) -> StorageUnavailable | None:
        why = cannot_work(error)
        if why is None:
            return None
        wrapped = StorageUnavailable(f"the database refused the {action}: {why}")
        wrapped.__cause__ = error
        return wrapped

    def lost(self, error: BaseException) -> bool:
        return is_lost(error)

    def matches(self, owner_id: str, query: str) -> ColumnElement[bool]:
        return matches(owner_id, query)

    def check(self) -> list[str]:
        return check(self.url)

    def back_up(self, directory: Path, label: str) -> Path:
        return back_up(self.url, directory, label)

    def restore(self, backup: Path) -> Path | None:
        self.migrate()
        return take_in(self.url, backup, self.backup_dir, replace=True)[1]

    def copy_in(self, file: Path) -> dict[str, int]:
        """Put all rows of an SQLite database into this one, which must be empty; how many, by table."""
        self.migrate()
        return take_in(self.url, file, self.backup_dir, replace=False)[0]

    def vacuum(self, engine: Engine) -> Vacuumed:
        """Let the space of deleted rows be used again, and make the search index if it is missing.

        Reads go on meanwhile. The files of the server seldom get smaller by it.
        """
        try:
            with closing(connect(self.url, *WRITER, timeout=None)) as connection:
                before = _size(connection)
                make_search_index(connection)
                names = tables(connection.cursor())
                connection.commit()
                connection.autocommit = True
                connection.cursor().execute(f"VACUUM (ANALYZE) tangram, {', '.join(names)}")
                return Vacuumed(before, _size(connection))
        except driver_errors() as error:
            raise StorageUnavailable(f"the database refused the vacuum: {message_of(error)}") from error

    def size(self) -> int:
        try:
            with closing(connect(self.url, *READER)) as connection:
                return _size(connection)
        except driver_errors() as error:
            raise StorageUnavailable(f"the size cannot be asked: {message_of(error)}") from error

    def version(self) -> str:
        with closing(connect(self.url, *READER)) as connection:
            return str(connection.parameter_statuses["server_version"])


def _size(connection: Any) -> int:
    cursor = connection.cursor()
    cursor.execute("SELECT pg_database_size(current_database())")
    return int(cursor.fetchone()[0])

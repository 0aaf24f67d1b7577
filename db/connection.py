"""Opening connections: one place that knows the pragmas.

SQLite before 3.51.3 can damage a WAL file when several connections write and checkpoint at once. So one
connection of one process writes and checkpoints (`FileLock` sees to that), and all others are `query_only`.
"""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.pool import QueuePool

from db.errors import StorageUnavailable

# One write is milliseconds. Longer means that a foreign tool holds the file, and the caller should hear of
# it.
BUSY_SECONDS = 10.0
CHECKPOINT_PAGES = 1000
_WAL_LIMIT_BYTES = 64 * 2**20


def connect(path: Path, *, read_only: bool, busy_seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    """A connection in autocommit mode to an existing file, usable from any one thread at a time."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=busy_seconds,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        if read_only:
            connection.execute("PRAGMA query_only = ON")
        else:
            # The file is in WAL mode, where NORMAL cannot damage it: a power cut may cost the last commits,
            # a crash of the process costs nothing.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def unavailable(error: BaseException, action: str) -> StorageUnavailable | None:
    """The error to raise in the place of one that says that SQLite could not work, or None for any other.

    A full disk, a lock and a damaged file are such; a broken constraint is the caller's own affair.
    """
    if not isinstance(error, OperationalError | sqlite3.OperationalError) and type(error) not in (
        DatabaseError,
        sqlite3.DatabaseError,
    ):
        return None
    wrapped = StorageUnavailable(f"the database refused the {action}: {getattr(error, 'orig', error)}")
    wrapped.__cause__ = error
    return wrapped


def make_engine(creator: Callable[[], sqlite3.Connection], *, connections: int, begin: str) -> Engine:
    """An SQLAlchemy engine over at most `connections` connections whose transactions start with `begin`."""
    engine = create_engine(
        "sqlite://",
        creator=creator,
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        # Parameters are messages and hashes; they have no place in an error's text.
        hide_parameters=True,
        json_serializer=lambda value: json.dumps(value, allow_nan=False),
    )

    # The driver's own transaction control is off, so that a write takes its lock before its first read.
    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine

"""Whether a PostgreSQL database can be used, asked before anything is started."""

from contextlib import closing
from typing import Any

from db import dialect
from db.errors import DbError, StorageUnavailable
from db.migrations import MIGRATIONS
from db.postgres.connection import READER, WRITER, connect
from db.postgres.failures import driver_errors, message_of
from db.postgres.lock import KEY, lock
from db.postgres.migrator import usable, version_of
from db.postgres.url import PostgresUrl

LOST_SECONDS = 35.0
"""How long a lock may be held by a connection whose other end is lost: see `db.postgres.connection`."""
# Of the lock's holder, whether it came over a network from another host than the server's. That one the
# server may still take for alive after a power cut, while on the same host a dead client is known at once.
_FROM_AFAR = f"""
    SELECT EXISTS (
        SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE locktype = 'advisory' AND granted AND classid = 0 AND objid = {KEY}
        AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND client_addr <> inet_server_addr()
    )
"""  # noqa: S608 - our number


def why_unusable(url: PostgresUrl) -> str:
    """Why the app cannot start on it, in a sentence; empty if it can. Changes nothing.

    Takes half a minute where the lock is held from another host: that may be this app before a power cut.
    """
    try:
        with closing(connect(url, *WRITER)) as connection:
            try:
                usable(connection, url)
                version_of(connection, url, len(MIGRATIONS))
                lock(connection, LOST_SECONDS if _held_from_afar(connection) else dialect.LOCK_SECONDS, url)
            except driver_errors() as error:
                return f"PostgreSQL ({url}) does not answer: {message_of(error)}"
    except DbError as error:
        return str(error)
    return ""


def setting_of(url: PostgresUrl, key: str) -> Any:
    """A stored setting, None where there is none. Raises DbError."""
    try:
        with closing(connect(url, *READER)) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT value FROM settings WHERE key = %s", (key,))
            row = cursor.fetchone()
            return row[0] if row else None
    except driver_errors() as error:
        raise StorageUnavailable(f"the settings cannot be read: {message_of(error)}") from error


def _held_from_afar(connection: Any) -> bool:
    cursor = connection.cursor()
    cursor.execute(_FROM_AFAR)
    found = bool(cursor.fetchone()[0])
    connection.commit()
    return found

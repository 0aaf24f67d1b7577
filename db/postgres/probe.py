"""Whether a PostgreSQL database can be used, asked before anything is started."""

from contextlib import closing

from db import dialect
from db.errors import DbError
from db.migrations import MIGRATIONS
from db.postgres.connection import WRITER, connect
from db.postgres.failures import driver_errors, message_of
from db.postgres.lock import lock
from db.postgres.migrator import usable, version_of
from db.postgres.url import PostgresUrl


def why_unusable(url: PostgresUrl) -> str:
    """Why the app cannot start on it, in a sentence; empty if it can. Changes nothing."""
    try:
        with closing(connect(url, *WRITER)) as connection:
            try:
                usable(connection, url)
                version_of(connection, url, len(MIGRATIONS))
                lock(connection, dialect.LOCK_SECONDS, url)
            except driver_errors() as error:
                return f"PostgreSQL ({url}) does not answer: {message_of(error)}"
    except DbError as error:
        return str(error)
    return ""

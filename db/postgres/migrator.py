"""Bringing a PostgreSQL database to the schema of this version, or leaving it exactly as it was.

All pending steps run in one transaction, which PostgreSQL gives to schema changes too. The table `tangram`
has one row: the schema's version, which is part of that transaction, and the mark of the last write (see
`db.postgres.dialect`).
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from db.errors import DatabaseInUse, MigrationError, NewerSchema, NotADatabase, StorageUnavailable
from db.migrations import MIGRATIONS, Migration
from db.postgres.connection import LEAST_VERSION, WRITER, connect
from db.postgres.failures import driver_errors, message_of, state_of
from db.postgres.lock import lock
from db.postgres.search import EXTENSION, INDEXES
from db.postgres.url import PostgresUrl

_LOCK_SECONDS = 60.0
_TABLE = """
    CREATE TABLE tangram (
        id BIGINT PRIMARY KEY DEFAULT 1 CHECK (id = 1),
        version BIGINT NOT NULL,
        last_write TEXT NOT NULL
    )
"""
_FOREIGN = """
    SELECT min(relname::text) FROM pg_class
    WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')
    AND NOT EXISTS (SELECT 1 FROM pg_depend WHERE objid = pg_class.oid AND deptype = 'e')
"""

_log = logging.getLogger(__name__)


def migrate(
    url: PostgresUrl, back_up: Callable[[], Path], migrations: Sequence[Migration] = MIGRATIONS
) -> Path | None:
    """Create or upgrade the schema; return the backup taken, or None when none was needed.

    back_up: makes a copy of what is there. Safe to call from several processes at once. Raises
    StorageUnavailable when the server cannot be used, NewerSchema, NotADatabase, or MigrationError; nothing
    is changed after any.
    """
    if [step.number for step in migrations] != list(range(1, len(migrations) + 1)):
        raise MigrationError("the migrations are not numbered 1, 2, 3 and so on")
    with closing(connect(url, *WRITER, timeout=None)) as connection:
        try:
            usable(connection, url)
            if version_of(connection, url, len(migrations)) == len(migrations):
                return None
            lock(connection, _LOCK_SECONDS, url)
            version = version_of(connection, url, len(migrations))
            if version == len(migrations):
                return None
            backup = _backed_up(back_up, version)
            _apply(connection, version, migrations, backup)
            return backup
        except DatabaseInUse as error:
            raise MigrationError(f"cannot upgrade {url}: {error}") from error
        except driver_errors() as error:
            raise MigrationError(f"cannot open {url}: {message_of(error)}") from error


def is_current(url: PostgresUrl) -> bool:
    """Whether the database has the schema of this version. Raises as `version_of`."""
    with closing(connect(url)) as connection:
        try:
            return version_of(connection, url, len(MIGRATIONS)) == len(MIGRATIONS)
        except driver_errors() as error:
            raise StorageUnavailable(f"cannot open {url}: {message_of(error)}") from error


def usable(connection: Any, url: PostgresUrl) -> None:
    """Raise MigrationError in a sentence when the server or the user's rights are not what is needed."""
    version, encoding, standby, schema, may = _row(
        connection,
        "SELECT current_setting('server_version_num')::int / 10000, current_setting('server_encoding'), "
        "pg_is_in_recovery(), current_schema()::text, "
        "coalesce(has_schema_privilege(current_schema()::text, 'CREATE'), false)",
    )
    if version < LEAST_VERSION:
        raise MigrationError(f"PostgreSQL {version} ({url}) is too old: {LEAST_VERSION} or newer is needed")
    if encoding != "UTF8":
        raise MigrationError(
            f"the database {url} has the encoding {encoding}, which does not hold every text: create one "
            f"with createdb --encoding=UTF8 --template=template0 {url.database}"
        )
    if standby:
        raise MigrationError(f"{url} is a standby, which only reads: name the primary server")
    if schema is None or not (may or _exists(connection)):
        raise MigrationError(
            f"the user {url.user} may not create tables in the schema {schema or 'public'} of {url}: make "
            f'that user its owner: ALTER DATABASE "{url.database}" OWNER TO "{url.user}"'
        )


def version_of(connection: Any, url: PostgresUrl, latest: int) -> int:
    """The schema's version, 0 for an empty database. Raises NotADatabase, NewerSchema."""
    if not _exists(connection):
        (foreign,) = _row(connection, _FOREIGN)
        if foreign is not None:
            raise NotADatabase(
                f"{url} holds tables of another program (such as {foreign}): name an empty database"
            )
        return 0
    (version,) = _row(connection, "SELECT version FROM tangram")
    if version > latest:
        raise NewerSchema(
            f"{url} has schema version {version}, and this version of the product knows {latest}: "
            "install the newer version, or restore a backup"
        )
    return int(version)


def _exists(connection: Any) -> bool:
    (found,) = _row(
        connection, "SELECT to_regclass(quote_ident(current_schema()::text) || '.tangram') IS NOT NULL"
    )
    return bool(found)


def _backed_up(back_up: Callable[[], Path], version: int) -> Path | None:
    if not version:
        return None
    try:
        return back_up()
    except StorageUnavailable as error:
        raise MigrationError(f"not upgraded, for there is no backup: {error}") from error


def _apply(connection: Any, version: int, migrations: Sequence[Migration], backup: Path | None) -> None:
    cursor = connection.cursor()
    step = "the start"
    try:
        if not version:
            cursor.execute(_TABLE)
            cursor.execute("INSERT INTO tangram (version, last_write) VALUES (0, '')")
        own = _transaction(cursor)
        for migration in migrations[version:]:
            step = f"step {migration.number} ({migration.name})"
            if migration.postgres is None:
                raise MigrationError(f"{step} is not there for PostgreSQL")
            for statement in migration.postgres:
                cursor.execute(statement)
            if _transaction(cursor) != own:
                raise MigrationError(f"{step} ended its transaction")
        step = "the search index"
        make_search_index(connection)
        step = "the commit"
        cursor.execute("UPDATE tangram SET version = %s", [len(migrations)])
        connection.commit()
    except driver_errors(MigrationError) as error:
        try:
            connection.rollback()
        except driver_errors():
            pass  # the server is gone, and has undone it by that
        raise MigrationError(
            f"the upgrade failed at {step} and was undone: {message_of(error)}", backup
        ) from error


def _transaction(cursor: Any) -> Any:
    cursor.execute("SELECT pg_current_xact_id()::text")
    return cursor.fetchone()[0]


def make_search_index(connection: Any) -> bool:
    """Make the index of trigrams where it is missing, in the current transaction. False: it cannot be had."""
    cursor = connection.cursor()
    cursor.execute("SAVEPOINT search")
    try:
        for statement in (EXTENSION, *INDEXES):
            cursor.execute(statement)
    except driver_errors() as error:
        if not state_of(error) or state_of(error).startswith(("08", "57")):  # the server is gone
            raise
        cursor.execute("ROLLBACK TO SAVEPOINT search")
        _log.warning(
            "search reads all texts of a user, for there is no index: PostgreSQL says: %s. Once pg_trgm is "
            "installed in the database, `tangram-chat vacuum` makes the index",
            message_of(error),
        )
        return False
    return True


def _row(connection: Any, query: str) -> Any:
    cursor = connection.cursor()
    cursor.execute(query)
    row = cursor.fetchone()
    connection.commit()
    return row

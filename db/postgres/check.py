"""Looking for damage in a PostgreSQL database, as far as a client can."""

from contextlib import closing

from db.check import MOST, RULES
from db.errors import NotADatabase
from db.migrations import MIGRATIONS
from db.postgres.connection import READER, connect
from db.postgres.copy import tables
from db.postgres.failures import driver_errors, message_of
from db.postgres.migrator import version_of
from db.postgres.url import PostgresUrl

_BROKEN = {
    "an index that is not valid": """
        SELECT indexrelid::regclass::text FROM pg_index JOIN pg_class ON pg_class.oid = indrelid
        WHERE relnamespace = current_schema()::regnamespace AND NOT indisvalid
    """,
    "a constraint that was not checked": """
        SELECT conname FROM pg_constraint
        WHERE connamespace = current_schema()::regnamespace AND NOT convalidated
    """,
}


def check(url: PostgresUrl) -> list[str]:
    """What is wrong with the database, in sentences; empty when it is in order.

    Every value is read once, at one moment, while everything goes on; the server itself holds rows to the
    constraints. Damage of indexes is for pg_amcheck to find. Raises MigrationError, StorageUnavailable.
    """
    with closing(connect(url, *READER, timeout=None)) as connection:
        version = version_of(connection, url, len(MIGRATIONS))
        if not version:
            raise NotADatabase(f"{url} is empty: there are no tables in it")
        cursor = connection.cursor()
        try:
            for table in tables(cursor):
                cursor.execute(f"SELECT sum(length({table}::text)) FROM {table}")  # noqa: S608 - our names
            found = []
            for rule, query in (*_BROKEN.items(), *(RULES.items() if version == len(MIGRATIONS) else ())):
                cursor.execute(query.replace(":most", str(MOST)))
                found += [f"{rule}: {row[0]}" for row in cursor.fetchall()]
            return found
        except driver_errors() as error:
            return [f"the database cannot be read through: {message_of(error)}"]

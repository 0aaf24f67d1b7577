"""Looking for damage: in the file, between its tables, and between the texts and their search index."""

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from db.backup import copy_to
from db.connection import connect
from db.errors import MigrationError, NotADatabase, StorageUnavailable
from db.migrations import MIGRATIONS
from db.migrator import version_of

# With rank 1 an index is compared with the texts.
_INDEXES = {
    "of messages": "INSERT INTO messages_search (messages_search, rank) VALUES ('integrity-check', 1)",
    "of titles": (
        "INSERT INTO conversations_search (conversations_search, rank) VALUES ('integrity-check', 1)"
    ),
}
MOST = 20
"""Findings of one kind that are named; a damaged file can have thousands."""

# What no constraint of the schema can say, on either database.
RULES = {
    "a user message that is not complete": (
        "SELECT id FROM messages WHERE role = 'user' AND status <> 'complete' LIMIT :most"
    ),
    "a conversation with messages of which none is shown": """
        SELECT id FROM conversations WHERE active_leaf_id IS NULL
        AND EXISTS (SELECT 1 FROM messages WHERE conversation_id = conversations.id) LIMIT :most
    """,
    "an installation without an enabled administrator": """
        SELECT count(*) FROM users HAVING count(*) > 0
        AND count(*) FILTER (WHERE is_admin AND disabled_at IS NULL) = 0
    """,
}


def check(path: Path) -> list[str]:
    """What is wrong with the database at `path`, in sentences; empty when it is in order.

    Works on a copy of one moment, so it disturbs nobody who is using the file, and needs as much space in
    the system's directory for temporary files. Raises MigrationError for a file that is not ours, and
    StorageUnavailable when it cannot be read at all.
    """
    if not path.exists():
        raise StorageUnavailable(f"there is no database at {path}")
    try:
        with closing(connect(path, read_only=True)) as connection:
            version = version_of(connection, path, len(MIGRATIONS))
    except sqlite3.DatabaseError as error:
        raise NotADatabase(
            f"{path} is not an SQLite database, or its first page is damaged: {error}"
        ) from error
    if not version:
        raise NotADatabase(f"{path} is empty: there are no tables in it")
    with tempfile.TemporaryDirectory(prefix="tangram-check-") as folder:
        copy = Path(folder) / "copy.sqlite3"
        try:
            copy_to(path, copy)
            with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
                found = _damage(connection)
                if not found and version == len(MIGRATIONS):
                    found = _broken_rules(connection)
                return found
        except (sqlite3.DatabaseError, StorageUnavailable) as error:
            return [f"the file cannot be read through: {error}"]


def _damage(connection: sqlite3.Connection) -> list[str]:
    found = [
        f"damaged: {line}"
        for (line,) in connection.execute(f"PRAGMA integrity_check({MOST})")
        if line != "ok"
    ]
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check").fetchmany(MOST):
        found.append(f"row {row} of {table} refers to a missing row of {parent}")
    for index, comparison in _INDEXES.items():
        try:
            connection.execute(comparison)
        except sqlite3.DatabaseError:
            found.append(f"the search index {index} does not agree with the texts")
    return found


def _broken_rules(connection: sqlite3.Connection) -> list[str]:
    return [
        f"{rule}: {row[0]}"
        for rule, query in RULES.items()
        for row in connection.execute(query, {"most": MOST})
    ]


def check_file(path: Path) -> None:
    """As `check`, for a file that is about to be trusted. Raises MigrationError with what is wrong."""
    if found := check(path):
        raise MigrationError(f"{path} is damaged: {'; '.join(found)}")

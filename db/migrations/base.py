"""What one step of the schema's history is."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Migration:
    """Step `number` (from 1, without gaps), the same for both databases.

    `apply` is for SQLite and `postgres`, statements, for PostgreSQL. Both run inside the transaction of all
    pending steps; with SQLite foreign keys are off and checked at the end. Neither may commit: no
    `executescript`, no VACUUM, no change of the journal mode, no CREATE INDEX CONCURRENTLY.
    """

    number: int
    name: str
    apply: Callable[[sqlite3.Connection], None]
    postgres: tuple[str, ...] | None = None


def statements(*sql: str) -> Callable[[sqlite3.Connection], None]:
    """An `apply` that runs the given statements in turn."""

    def apply(connection: sqlite3.Connection) -> None:
        for statement in sql:
            connection.execute(statement)

    return apply

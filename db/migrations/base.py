"""What one step of the schema's history is."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Migration:
    """Step `number` (from 1, without gaps).

    `apply` runs inside the transaction of all pending steps, with foreign keys off and checked at the end. It
    must not commit: no `executescript`, no VACUUM, no change of the journal mode.
    """

    number: int
    name: str
    apply: Callable[[sqlite3.Connection], None]


def statements(*sql: str) -> Callable[[sqlite3.Connection], None]:
    """An `apply` that runs the given statements in turn."""

    def apply(connection: sqlite3.Connection) -> None:
        for statement in sql:
            connection.execute(statement)

    return apply

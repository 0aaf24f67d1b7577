"""The lock of the one writer: a PostgreSQL advisory lock, which ends with the connection that holds it."""

import time
from typing import Any

from db.errors import DatabaseInUse

KEY = 0x54474D43
"""One for all schemas of a database."""
_RETRY_SECONDS = 0.05


def lock(connection: Any, wait_seconds: float, where: object) -> None:
    """Take it on a connection of the driver, for as long as that lives. Raises DatabaseInUse."""
    deadline = time.monotonic() + wait_seconds
    cursor = connection.cursor()
    while True:
        cursor.execute(f"SELECT pg_try_advisory_lock({KEY})")
        taken = cursor.fetchone()[0]
        connection.commit()
        if taken:
            return
        if time.monotonic() >= deadline:
            raise DatabaseInUse(
                f"another process writes to this database ({where}); stop it first. One app at a time uses a "
                "database"
            )
        time.sleep(_RETRY_SECONDS)

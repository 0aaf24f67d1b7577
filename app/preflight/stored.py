"""What the console has decided, read before the database is opened."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from app.engine_settings import TUNED
from db.connection import connect
from db.errors import DbError
from db.postgres.probe import setting_of
from db.postgres.url import PostgresUrl


def tuned(path: Path, url: PostgresUrl | None = None) -> dict[str, Any]:
    """The settings of the cache that the engine will be started with; empty where none were stored, or what
    is there cannot be read, which whoever opens it will say.

    path: the SQLite file, which does not count where `url` names a PostgreSQL database.
    """
    if url is not None:
        with contextlib.suppress(DbError):
            found = setting_of(url, TUNED)
            return found if isinstance(found, dict) else {}
        return {}
    with contextlib.suppress(sqlite3.Error, ValueError, OSError):
        with contextlib.closing(connect(path, read_only=True, busy_seconds=1.0)) as connection:
            row = connection.execute("SELECT value FROM settings WHERE key = ?", (TUNED,)).fetchone()
        found = json.loads(row[0]) if row else {}
        return found if isinstance(found, dict) else {}
    return {}

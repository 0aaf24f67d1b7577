"""Where the product's database is, by the settings."""

from __future__ import annotations

from collections.abc import Mapping

from app.settings import Settings
from db.database import Database
from db.errors import StorageUnavailable
from db.moved import refuse_moved

URL = "TANGRAM_DATABASE_URL"


def open_database(settings: Settings) -> Database:
    """The database, which has yet to be migrated; nothing is opened yet. Raises StorageUnavailable for an
    SQLite file that was moved to PostgreSQL."""
    if settings.postgres is None:
        refuse_moved(settings.database_path)
    return replaced_database(settings)


def replaced_database(settings: Settings) -> Database:
    """The same, for a restore: what is there does not matter."""
    return Database(settings.database_path, settings.backups_dir, settings.postgres)


def existing_database(settings: Settings) -> Database:
    """As `open_database`, for commands that make no new SQLite file. Raises StorageUnavailable."""
    if settings.postgres is None and not settings.database_path.exists():
        raise StorageUnavailable(
            f"there is no database at {settings.database_path}: is TANGRAM_HOME right? The first "
            "start of the app makes it"
        )
    return open_database(settings)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for the engine, which has no business with the database and its password."""
    return {name: value for name, value in environment.items() if name.upper() != URL}

"""Everything that the storage layer raises on purpose."""

from pathlib import Path


class DbError(Exception):
    """Base of every error of this package."""


class NotFound(DbError):
    """The record does not exist, or belongs to somebody else: the two look the same on purpose."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"{kind} not found")
        self.kind = kind


class Conflict(DbError):
    """The record is not in a state that allows the change."""


class InvalidInput(DbError):
    """A value cannot be stored. `field` names the argument."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class StorageUnavailable(DbError):
    """The database could not do its work: it is locked or away, the disk is full, the medium fails."""


class OutcomeUnknown(StorageUnavailable):
    """The connection broke during a commit, and nobody could be asked: the write may be stored, or not."""


class DatabaseInUse(StorageUnavailable):
    """Another process, or another `Database` of this one, already writes to the database."""


class DatabaseClosed(StorageUnavailable):
    """`close()` was called before this read or write."""


class MigrationError(DbError):
    """The database cannot be brought to the schema of this version; it was left as it was.

    `backup` is the copy taken before the attempt, or None when none was needed.
    """

    def __init__(self, message: str, backup: Path | None = None) -> None:
        super().__init__(f"{message} (a backup is at {backup})" if backup else message)
        self.backup = backup


class NotADatabase(MigrationError):
    """The file is not SQLite, or the database is another program's."""


class NewerSchema(MigrationError):
    """The database was written by a newer version of this product."""

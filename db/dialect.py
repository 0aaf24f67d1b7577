"""What differs between the databases that the store can be kept in: SQLite, the default, and PostgreSQL.

The store's queries are SQLAlchemy's and the same for both. Everything else that only one of them has goes
through this one object: connections and the writer's lock, transactions, migrations, search, copies,
maintenance. `db.sqlite` and `db.postgres.dialect` are the two.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy import ColumnElement, Engine
from sqlalchemy.orm import Session

from db.errors import StorageUnavailable

T = TypeVar("T")

LOCK_SECONDS = 5.0
"""How long a writer waits for a predecessor that is just closing."""


@dataclass(frozen=True, slots=True)
class Vacuumed:
    """Bytes of the database before and after."""

    before: int
    after: int


class Dialect(ABC):
    """One kind of database at one place. Its methods block.

    name: of the kind, for people. where: of the place, for messages; never a password. note: what protects
    the database beside the copies that the product makes, in a sentence; empty where these are all there is.
    """

    name: str
    where: str
    note: str
    backup_dir: Path

    @abstractmethod
    def migrate(self) -> Path | None:
        """Create the schema or bring it to this version's; return the backup taken, if one was.

        Raises MigrationError, NewerSchema or NotADatabase, and leaves the database as it was.
        """

    @abstractmethod
    def is_current(self) -> bool:
        """Whether the database is there with this version's schema. Raises NotADatabase, NewerSchema."""

    @abstractmethod
    def read_engine(self, connections: int) -> Engine:
        """An engine whose transactions each see one moment and can change nothing."""

    @abstractmethod
    def write_engine(self) -> Engine:
        """An engine of one connection, which takes the lock of the one writer before its first statement.

        Connecting raises DatabaseInUse while another writer is there.
        """

    def transact(self, engine: Engine, fn: Callable[[Session], T]) -> T:
        """Run `fn` in a transaction of the writer; what it returns, once it is committed."""
        with Session(engine, expire_on_commit=False) as session, session.begin():
            return fn(session)

    def rest(self, engine: Engine) -> None:  # noqa: B027 (not everybody has something to do then)
        """Called on the writer's thread when there was nothing to write for a moment after writes."""

    def finish(self, engine: Engine) -> None:
        """Called on the writer's thread at its end: close its connection and give the lock back."""
        engine.dispose()

    @abstractmethod
    def unavailable(self, error: BaseException, action: str) -> StorageUnavailable | None:
        """The error to raise in the place of one that says that the database could not work.

        None for any other: a broken constraint is the caller's own affair.
        """

    def lost(self, error: BaseException) -> bool:
        """Whether the error says that a connection broke, so that another one may do better."""
        return False

    @abstractmethod
    def matches(self, owner_id: str, query: str) -> ColumnElement[bool]:
        """Whether a conversation's title or one of the owner's finished messages in it contains `query`."""

    @abstractmethod
    def check(self) -> list[str]:
        """What is wrong with the database, in sentences; empty when it is in order."""

    @abstractmethod
    def back_up(self, directory: Path, label: str) -> Path:
        """Write a checked copy, an SQLite file, to `directory`; its path. Raises StorageUnavailable."""

    @abstractmethod
    def restore(self, backup: Path) -> Path | None:
        """Put a backup in the place of what is there; return where that is kept, if there was any.

        Raises DatabaseInUse while the app runs, and MigrationError for a backup that cannot be used.
        """

    @abstractmethod
    def vacuum(self, engine: Engine) -> Vacuumed:
        """Put the database in order; called on the writer's thread, between transactions."""

    @abstractmethod
    def size(self) -> int:
        """Bytes that the database takes. Raises StorageUnavailable."""

    @abstractmethod
    def version(self) -> str:
        """The version of the database's software. Raises StorageUnavailable."""

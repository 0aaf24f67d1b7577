"""The one thread that writes."""

import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from db.connection import connect, make_engine, unavailable
from db.errors import DatabaseClosed, StorageUnavailable
from db.filelock import FileLock

T = TypeVar("T")
_Job = Callable[[], None]

_IDLE_SECONDS = 1.0
_LOCK_SECONDS = 5.0  # a predecessor that is just closing

_log = logging.getLogger(__name__)


class Writer:
    """Runs jobs in the order of their submission, each in its own transaction, on its own thread.

    The thread starts with the first job, and takes `lock` before it opens its connection.
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        self._lock = lock
        self._engine: Engine = make_engine(
            lambda: self._connect(path), connections=1, begin="BEGIN IMMEDIATE"
        )
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._state = Lock()
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[[Session], T]) -> Future[T]:
        """Queue `fn` for one transaction: committed when it returns, rolled back when it raises.

        The future has its result after the commit. Cancelling it before its turn skips the job.
        """

        def transaction() -> T:
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                return fn(session)

        return self._enqueue(transaction)

    def submit_raw(self, fn: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Queue `fn` for the bare connection, in autocommit mode: for tools that manage their transactions.

        Whatever `fn` does to the connection's settings ends with it, as does a transaction that it leaves
        open.
        """

        def bare() -> T:
            pooled = self._engine.raw_connection()
            try:
                connection = pooled.driver_connection
                if not isinstance(connection, sqlite3.Connection):
                    raise StorageUnavailable("the writer has no connection")
                return fn(connection)
            finally:
                pooled.invalidate()

        return self._enqueue(bare)

    def close(self) -> None:
        """Settle all queued jobs, write the WAL back into the database and end the thread."""
        with self._state:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
            thread = self._thread
        if thread is not None:
            thread.join()

    def _connect(self, path: Path) -> sqlite3.Connection:
        self._lock.acquire(_LOCK_SECONDS)
        return connect(path, read_only=False)

    def _enqueue(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as error:
                future.set_exception(unavailable(error, "write") or error)
            else:
                future.set_result(result)

        with self._state:
            if self._closed:
                raise DatabaseClosed("the database is closed")
            if self._thread is None:
                self._thread = Thread(target=self._run, name="db-writer", daemon=True)
                self._thread.start()
            self._jobs.put(job)
        return future

    def _run(self) -> None:
        checkpoint_due = False
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_SECONDS if checkpoint_due else None)
            except Empty:
                checkpoint_due = False
                self._checkpoint("PASSIVE")
                continue
            if job is None:
                break
            job()
            checkpoint_due = True
        self._checkpoint("TRUNCATE")
        self._engine.dispose()
        self._lock.release()

    def _checkpoint(self, mode: str) -> None:
        try:
            pooled = self._engine.raw_connection()
            try:
                pooled.cursor().execute(f"PRAGMA wal_checkpoint({mode})")
            finally:
                pooled.close()
        except (StorageUnavailable, sqlite3.Error) as error:
            # Nothing is lost: the WAL holds it, and the next checkpoint takes it along.
            _log.warning("checkpoint of the database failed: %s", error)

"""The one thread that writes."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from db.dialect import Dialect
from db.errors import DatabaseClosed

T = TypeVar("T")
_Job = Callable[[], None]

_IDLE_SECONDS = 1.0


class Writer:
    """Runs jobs in the order of their submission, each in its own transaction, on its own thread.

    The thread starts with the first job; its connection takes the lock of the one writer.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._engine: Engine = dialect.write_engine()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._state = Lock()
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[[Session], T]) -> Future[T]:
        """Queue `fn` for one transaction: committed when it returns, rolled back when it raises.

        The future has its result after the commit. Cancelling it before its turn skips the job.
        """
        return self._enqueue(lambda: self._dialect.transact(self._engine, fn))

    def submit_raw(self, fn: Callable[[Engine], T]) -> Future[T]:
        """Queue `fn` for the writer's engine itself, between transactions."""
        return self._enqueue(lambda: fn(self._engine))

    def close(self) -> None:
        """Settle all queued jobs, close the connection and end the thread."""
        with self._state:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
            thread = self._thread
        if thread is not None:
            thread.join()

    def _enqueue(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as error:
                future.set_exception(self._dialect.unavailable(error, "write") or error)
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
        rest_due = False
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_SECONDS if rest_due else None)
            except Empty:
                rest_due = False
                self._dialect.rest(self._engine)
                continue
            if job is None:
                break
            job()
            rest_due = True
        self._dialect.finish(self._engine)

"""A small SQLite file for the samples of the engine's memory, where the database itself is elsewhere.

They belong to the process that took them, and sqlite-utils, which keeps them, knows SQLite only.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from db.connection import connect, unavailable
from db.errors import DatabaseClosed

T = TypeVar("T")


class SamplesFile:
    """The file at `path`, made when it is first used, and used by one thread, one call at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="db-samples")

    async def run(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` on a connection of its own, in autocommit mode. Raises StorageUnavailable."""

        def work() -> T:
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                with closing(connect(self._path, read_only=False)) as connection:
                    return fn(connection)
            except sqlite3.Error as error:
                raise unavailable(error, "sample") or error from error

        try:
            future = self._thread.submit(work)
        except RuntimeError as error:
            raise DatabaseClosed("the database is closed") from error
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Finish what is queued. May be called twice."""
        self._thread.shutdown(wait=True)

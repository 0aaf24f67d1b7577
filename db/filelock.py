"""A lock on a file beside the database, held by whoever writes to it."""

import fcntl
import os
import time
from pathlib import Path

from db.errors import DatabaseInUse

_RETRY_SECONDS = 0.02


class FileLock:
    """An exclusive advisory lock, which the system releases when its process ends in whatever way.

    The descriptor is not inherited by child processes, so an engine that outlives the app does not hold it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, wait_seconds: float) -> None:
        """Take the lock, or do nothing when it is held already. Raises DatabaseInUse after `wait_seconds`."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait(descriptor, time.monotonic() + wait_seconds)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back. The file stays: removing it could split two waiters over two files."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _wait(self, descriptor: int, deadline: float) -> None:
        # flock has no timeout of its own.
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise DatabaseInUse(
                        f"another process writes to this database (it holds {self._path}); stop it first"
                    ) from error
                time.sleep(_RETRY_SECONDS)
            else:
                return

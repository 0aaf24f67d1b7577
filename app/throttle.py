"""Slows down guessing."""

from __future__ import annotations

import math
import time
from collections import deque

from app.errors import TooManyAttempts

_MAX_SOURCES = 10_000


class Throttle:
    """At most `limit` failures of one source within `window` seconds. Lives in memory.

    An attempt counts as a failure from its start, so that many at once do not all pass the check; one that
    succeeds is taken back.
    """

    def __init__(self, limit: int, window: float) -> None:
        self._limit = limit
        self._window = window
        self._failures: dict[str, deque[float]] = {}

    def check(self, source: str) -> None:
        """Raise TooManyAttempts when the source has to wait."""
        now = time.monotonic()
        failures = self._failures.get(source)
        while failures and failures[0] <= now - self._window:
            failures.popleft()
        if failures and len(failures) >= self._limit:
            raise TooManyAttempts(math.ceil(failures[0] + self._window - now))

    def note(self, source: str) -> None:
        """Count an attempt."""
        if source not in self._failures and len(self._failures) >= _MAX_SOURCES:
            self._failures.pop(next(iter(self._failures)))
        self._failures.setdefault(source, deque(maxlen=self._limit)).append(time.monotonic())

    def undo(self, source: str) -> None:
        """Take the latest attempt back: it succeeded."""
        if failures := self._failures.get(source):
            failures.pop()

    def forget(self, source: str) -> None:
        """Take all attempts back."""
        self._failures.pop(source, None)

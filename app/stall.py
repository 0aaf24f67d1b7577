"""Tells an engine that works from one that hangs: there is work, and nothing moves for too long.

An engine of ours watches itself and ends when its patience is over (:mod:`tangram.stall`). What is seen from
here comes before that, as a warning, and after it, where the engine hangs too hard to end itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass
class StallWatch:
    """patience: seconds without progress after which an engine ends itself. 0: never."""

    patience: float
    _progress: Hashable = None
    _since: float | None = None

    def observe(self, now: float, working: bool, progress: Hashable) -> float:
        """Seconds for which there was work and no progress.

        Args:
            now: monotonic seconds.
            working: whether anything runs or waits.
            progress: changes with every step of the engine, such as its counters.
        """
        if not working or progress != self._progress or self._since is None:
            self._progress, self._since = progress, now
        return now - self._since

    def forget(self) -> None:
        """The engine was replaced."""
        self._since = None

    def stalled(self, seconds: float) -> bool:
        """Whether that is half of what an engine allows itself."""
        return 0 < self.patience / 2 <= seconds

    def lost(self, seconds: float) -> bool:
        """Whether it should have ended itself and did not."""
        return 0 < 1.2 * self.patience <= seconds

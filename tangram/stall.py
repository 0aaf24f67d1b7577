"""An engine that has work and gets nowhere ends itself, so that whoever started it starts it again.

Such an engine still answers health checks, and Docker restarts what ended, not what is unhealthy. Looked at
from the API server: the scheduler tells which requests it has and how far each one is.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence

from tangram.errors import ConfigError, EngineUnavailable
from tangram.telemetry import CacheSnapshot

VARIABLE = "TANGRAM_STALL_SECONDS"
DEFAULT_SECONDS = 300.0
EXIT_STALLED = 3
LOOKS = 10
"""How often it looks within the time that it allows."""

log = logging.getLogger("vllm.tangram")


def allowed_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds without progress that are allowed; 0 for any number. Raises ConfigError."""
    text = environment.get(VARIABLE) or str(DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ConfigError(VARIABLE, f"must be seconds, or 0 to wait for ever, not {text!r}")
    return seconds


def progress(snapshot: CacheSnapshot) -> Hashable:
    """What changes whenever the engine computes, admits or finishes anything; None without work."""
    if not (snapshot.running or snapshot.waiting):
        return None
    rows = tuple((row.id, row.tokens) for row in snapshot.sequences if row.state == "running")
    return rows, tuple(sorted(snapshot.counters.items()))


class StallClock:
    """Says for how long there was work and no progress.

    Args:
        look: the scheduler's snapshot; EngineUnavailable where it does not answer, which is no progress once
            it has answered: an engine that never did is its starter's to judge.
        now: seconds.
    """

    def __init__(self, look: Callable[[], CacheSnapshot], now: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._now = now
        self._answered = False
        self._last: Hashable = None
        self._since = now()

    def stalled(self) -> float:
        """Look once; seconds since the last progress, 0 where there is no work."""
        try:
            seen = progress(self._look())
            self._answered = True
        except EngineUnavailable:
            if not self._answered:
                return 0.0
            seen = self._last if self._last is not None else "silent"
        if seen is None or seen != self._last:
            self._last, self._since = seen, self._now()
        return 0.0 if seen is None else self._now() - self._since


def end_process() -> None:
    """End this process and its children at once: what hangs does not listen to anything gentler."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(EXIT_STALLED)


def watch(
    looks: Sequence[Callable[[], CacheSnapshot]], seconds: float, end: Callable[[], None] = end_process
) -> threading.Thread | None:
    """Watch from a thread of its own; None where ``seconds`` is 0.

    Args:
        looks: one for each engine core: that others get on helps nobody whose core does not.
    """
    if not seconds:
        return None
    clocks = [StallClock(look) for look in looks]

    def run() -> None:
        while (stalled := max(clock.stalled() for clock in clocks)) < seconds:
            time.sleep(seconds / LOOKS)
        log.error("The engine has had work for %.0f seconds and computed nothing: it ends itself.", stalled)
        end()

    thread = threading.Thread(target=run, name="tangram-stall", daemon=True)
    thread.start()
    return thread

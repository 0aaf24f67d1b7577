"""One background task that reads the engine's memory report for every viewer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from admin.errors import BadSnapshot
from admin.history import History, PoolPoint
from admin.latency import ITL, TTFT, LatencyWindow
from admin.snapshot import MemorySnapshot
from app.errors import AppError, EngineNotReady
from tangram.errors import TangramError

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
LONGEST_WAIT_SECONDS = 10.0
PATIENCE_SECONDS = 10.0
SAMPLES_PER_STORED = 5


class EngineReader(Protocol):
    """The part of the engine's client that the sampler uses."""

    async def memory(self) -> Mapping[str, Any]: ...

    async def metrics_text(self) -> str: ...


class PointStore(Protocol):
    """Lasting storage of the pool's history."""

    async def add(self, point: PoolPoint) -> None: ...

    async def last_hour(self) -> list[PoolPoint]: ...


@dataclass(frozen=True)
class Sample:
    """The newest reading. While the engine is away, ``snapshot`` is the last one seen; ``error`` says why."""

    number: int = 0
    snapshot: MemorySnapshot | None = None
    ttft: float | None = None
    itl: float | None = None
    error: str | None = None


class Sampler:
    """Polls the engine every two seconds, less often while it is away.

    ``reader`` gives the client of the running engine and may raise :class:`~app.errors.EngineNotReady`.
    ``store`` gives the points of before the start and receives every fifth new one; when it fails, sampling
    goes on.
    """

    def __init__(
        self,
        reader: Callable[[], EngineReader],
        *,
        store: PointStore | None = None,
        interval: float = INTERVAL_SECONDS,
        longest_wait: float = LONGEST_WAIT_SECONDS,
    ) -> None:
        self._reader = reader
        self._store = store
        self._interval = interval
        self._longest_wait = longest_wait
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._latency = LatencyWindow()
        self._since_stored = SAMPLES_PER_STORED
        self._task: asyncio.Task[None] | None = None
        self.latest = Sample()
        self.history = History()
        self.wait_seconds = interval

    def start(self) -> None:
        """Start polling in the running event loop; a second call changes nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="memory-sampler")

    async def stop(self) -> None:
        """Stop polling and wait for the task to end."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def poke(self) -> None:
        """Take the next sample at once, for instance because the engine has just come back."""
        self._wake.set()

    async def wait_for(self, condition: Callable[[Sample], bool]) -> Sample:
        """Return the first sample, from the newest on, that meets ``condition``."""
        async with self._changed:
            await self._changed.wait_for(lambda: condition(self.latest))
            return self.latest

    async def sample(self) -> bool:
        """Take one sample; whether the engine answered. Also sets how long to wait for the next."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                reader = self._reader()
                snapshot = MemorySnapshot.parse(await reader.memory())
                self._latency.add(await reader.metrics_text())
        except (TangramError, AppError, BadSnapshot, TimeoutError) as error:
            self._latency.clear()
            reason = str(error) or f"There was no answer within {PATIENCE_SECONDS:.0f} seconds."
            # Asking for an engine that the supervisor does not offer yet costs nothing: ask as often.
            calm = isinstance(error, EngineNotReady)
            self.wait_seconds = self._interval if calm else min(self.wait_seconds * 2, self._longest_wait)
            await self._publish(Sample(self.latest.number + 1, self.latest.snapshot, error=reason))
            return False
        self.wait_seconds = self._interval
        point = PoolPoint.of(snapshot)
        self.history.add(point)
        await self._publish(
            Sample(
                self.latest.number + 1,
                snapshot,
                ttft=self._latency.quantile(TTFT, 0.5),
                itl=self._latency.quantile(ITL, 0.5),
            )
        )
        await self._keep(point)
        return True

    async def _publish(self, sample: Sample) -> None:
        async with self._changed:
            self.latest = sample
            self._changed.notify_all()

    async def _keep(self, point: PoolPoint) -> None:
        self._since_stored += 1
        if self._store is None or self._since_stored < SAMPLES_PER_STORED:
            return
        self._since_stored = 0
        try:
            await self._store.add(point)
        except Exception:
            log.exception("memory sample was not stored")

    async def _load(self) -> None:
        if self._store is None:
            return
        try:
            self.history = History(await self._store.last_hour())
        except Exception:
            log.exception("stored memory samples were not read")

    async def _run(self) -> None:
        await self._load()
        while True:
            self._wake.clear()
            try:
                await self.sample()
            except Exception:
                # A surprise must not end the map for all viewers until the next start.
                log.exception("memory sample failed")
                self.wait_seconds = self._longest_wait
            try:
                await asyncio.wait_for(self._wake.wait(), self.wait_seconds)
            except TimeoutError:
                continue

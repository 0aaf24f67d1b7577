"""One background task that reads the engine's memory report for every viewer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from admin.errors import BadSnapshot
from admin.history import History, PoolPoint
from admin.latency import ITL, TTFT, LatencyWindow
from admin.series import DRIFT, GENERATED, RUNNING, WAITING, EnginePoint, EngineSeries, parse_values
from admin.snapshot import MemorySnapshot
from app.errors import AppError, EngineNotReady
from tangram.errors import TangramError

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
UNWATCHED_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 10.0
PATIENCE_SECONDS = 10.0
STORE_SECONDS = 10.0
LOOKED_SECONDS = 15.0
"""How long after its last request a page counts as open."""
MOST_FOLLOWED = 8
LATELY_READINGS = 60


class EngineReader(Protocol):
    """The part of the engine's client that the sampler uses."""

    async def memory(self, sequence: str | None = None) -> Mapping[str, Any]: ...

    async def metrics_text(self) -> str: ...


class PointStore(Protocol):
    """Lasting storage of the pool's history."""

    async def add(self, point: PoolPoint) -> None: ...

    async def last_hour(self) -> list[PoolPoint]: ...


@dataclass(frozen=True)
class Sample:
    """The newest reading. While the engine is away, ``snapshot`` is the last one seen; ``error`` says why.

    ``own``: the reports of single conversations that somebody looks at, by their ids; what is gone is absent.
    """

    number: int = 0
    snapshot: MemorySnapshot | None = None
    ttft: float | None = None
    itl: float | None = None
    error: str | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, MemorySnapshot] = field(default_factory=dict)

    @property
    def drift(self) -> float | None:
        """How far budgets lie from what people write, if the engine says so."""
        return self.values.get(DRIFT)

    @property
    def waiting(self) -> int:
        """Requests that wait in the engine."""
        return int(self.values.get(WAITING, 0))


class Sampler:
    """Polls the engine every second while somebody looks, less often otherwise and while it is away.

    ``reader`` gives the client of the running engine and may raise :class:`~app.errors.EngineNotReady`.
    ``store`` gives the points of before the start and receives a new one every ten seconds; when it fails,
    sampling goes on. ``beside``: (requests waiting in the app, replies that failed since its start).
    ``on_sample`` is called after each sample.
    """

    def __init__(
        self,
        reader: Callable[[], EngineReader],
        *,
        store: PointStore | None = None,
        interval: float = INTERVAL_SECONDS,
        unwatched: float | None = None,
        longest_wait: float = LONGEST_WAIT_SECONDS,
        beside: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
    ) -> None:
        self._reader = reader
        self._store = store
        self._interval = interval
        self._unwatched = interval if unwatched is None else unwatched
        self._longest_wait = longest_wait
        self._beside = beside
        self._looked = -LOOKED_SECONDS
        self._followed: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._latency = LatencyWindow()
        self._stored = 0.0
        self._task: asyncio.Task[None] | None = None
        self.on_sample: Callable[[Sample], None] = lambda sample: None
        self.latest = Sample()
        self.history = History()
        self.series = EngineSeries()
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

    def look(self, sequence: str = "") -> None:
        """Somebody looks at the page now, and at the map of one conversation if it is named."""
        if monotonic() - self._looked > LOOKED_SECONDS:
            self.poke()
        self._looked = monotonic()
        if sequence:
            if sequence not in self._followed:
                self.poke()
            self._followed.pop(sequence, None)
            self._followed[sequence] = monotonic()

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
                text = await reader.metrics_text()
                own = await self._follow(reader)
                self._latency.add(text)
        except (TangramError, AppError, BadSnapshot, TimeoutError) as error:
            self._latency.clear()
            reason = str(error) or f"There was no answer within {PATIENCE_SECONDS:.0f} seconds."
            # Asking for an engine that the supervisor does not offer yet costs nothing: ask as often.
            calm = isinstance(error, EngineNotReady)
            self.wait_seconds = self._interval if calm else min(self.wait_seconds * 2, self._longest_wait)
            await self._publish(Sample(self.latest.number + 1, self.latest.snapshot, error=reason))
            return False
        self.wait_seconds = (
            self._interval if monotonic() - self._looked <= LOOKED_SECONDS else self._unwatched
        )
        point, values = PoolPoint.of(snapshot), parse_values(text)
        self.history.add(point)
        self.series.add(self._engine_point(snapshot, values))
        await self._publish(
            Sample(
                self.latest.number + 1,
                snapshot,
                ttft=self._latency.quantile(TTFT, 0.5),
                itl=self._latency.quantile(ITL, 0.5),
                values=values,
                own=own,
            )
        )
        await self._keep(point)
        return True

    async def _follow(self, reader: EngineReader) -> dict[str, MemorySnapshot]:
        """The reports of the conversations that somebody looks at."""
        now = monotonic()
        latest = [name for name, at in self._followed.items() if now - at <= LOOKED_SECONDS][-MOST_FOLLOWED:]
        self._followed = {name: self._followed[name] for name in latest}
        found = {}
        for name in latest:
            with contextlib.suppress(TangramError):  # it was evicted
                found[name] = MemorySnapshot.parse(await reader.memory(name))
        return found

    def _engine_point(self, snapshot: MemorySnapshot, values: Mapping[str, float]) -> EnginePoint:
        waiting, errors = self._beside()
        counters = snapshot.counters

        def lately(name: str, share: float) -> float | None:
            return self._latency.lately(name, share, LATELY_READINGS)

        return EnginePoint(
            time=snapshot.time,
            running=int(values.get(RUNNING, 0)),
            queue=int(values.get(WAITING, 0)) + waiting,
            counts={
                "generated": values.get(GENERATED, 0.0),
                "takeovers": counters.get("takeovers", 0),
                "reprefilled": counters.get("reprefilled_tokens", 0),
                "preemptions": counters.get("preemptions", 0),
                "errors": errors,
            },
            ttft=lately(TTFT, 0.5),
            ttft_slow=lately(TTFT, 0.95),
            itl=lately(ITL, 0.5),
            itl_slow=lately(ITL, 0.95),
        )

    async def _publish(self, sample: Sample) -> None:
        async with self._changed:
            self.latest = sample
            self._changed.notify_all()
        self.on_sample(sample)

    async def _keep(self, point: PoolPoint) -> None:
        if self._store is None or point.time - self._stored < STORE_SECONDS:
            return
        self._stored = point.time
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

"""The last hour of pool use, in memory, for the chart over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from admin.snapshot import MemorySnapshot

HOUR_SECONDS = 3600.0
CHART_POINTS = 240
# Two points further apart have missing samples between them. A slow answer is not a missing one, hence more
# than the second, or the five, between samples; of stored points there is only one in ten seconds.
LONGEST_STEP_SECONDS = 12.0
LONGEST_STORED_STEP_SECONDS = 30.0


@dataclass(frozen=True)
class PoolPoint:
    """Pool use at one moment; ``time`` in Unix seconds, sizes in bytes, the rest in pages or counts."""

    time: float
    ring: int
    sealed: int
    resident: int
    free: int
    page_bytes: int
    used_bytes: int
    full_cache_bytes: int
    sequences: int
    takeovers: int
    evictions: int
    seals: int
    preemptions: int

    @classmethod
    def of(cls, snapshot: MemorySnapshot) -> PoolPoint:
        """The point that a memory report stands for."""
        counters = snapshot.counters
        return cls(
            time=snapshot.time,
            ring=snapshot.pool.ring,
            sealed=snapshot.pool.sealed,
            resident=snapshot.pool.idle,
            free=snapshot.pool.free,
            page_bytes=snapshot.pool.page_bytes,
            used_bytes=snapshot.used_bytes,
            full_cache_bytes=snapshot.full_cache_bytes,
            sequences=len(snapshot.sequences),
            takeovers=counters.get("takeovers", 0),
            evictions=counters.get("evictions", 0),
            seals=counters.get("seals", 0),
            preemptions=counters.get("preemptions", 0),
        )

    def to_row(self) -> dict[str, Any]:
        """Plain values for storage."""
        return asdict(self)


class History:
    """Points of the last hour, oldest first; older ones are dropped as new ones come.

    ``points`` are stored ones, of which only some were kept.
    """

    def __init__(self, points: Iterable[PoolPoint] = (), span: float = HOUR_SECONDS) -> None:
        self._span = span
        # Each with the number of its run: points between which no sample is missing.
        self._points: deque[tuple[int, PoolPoint]] = deque()
        for point in points:
            self.add(point, LONGEST_STORED_STEP_SECONDS)

    def __len__(self) -> int:
        return len(self._points)

    def add(self, point: PoolPoint, longest_step: float = LONGEST_STEP_SECONDS) -> None:
        """Append a point; one that is not newer than the last is ignored (a clock set back).

        After more than ``longest_step`` seconds without a point it starts a new run.
        """
        run = 0
        if self._points:
            run, last = self._points[-1]
            if point.time <= last.time:
                return
            run += point.time - last.time > longest_step
        self._points.append((run, point))
        while self._points[0][1].time < point.time - self._span:
            self._points.popleft()

    def chart(self, limit: int = CHART_POINTS) -> Sequence[Sequence[PoolPoint]]:
        """At most ``limit`` points spread evenly over what is kept, always with the newest, by runs."""
        points = list(self._points)
        if len(points) > limit:
            step = len(points) / limit
            points = [points[len(points) - 1 - int(index * step)] for index in reversed(range(limit))]
        return [[point for _, point in run] for _, run in groupby(points, key=lambda item: item[0])]

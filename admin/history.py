"""The last hour of pool use, in memory, for the chart over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from admin.snapshot import MemorySnapshot

HOUR_SECONDS = 3600.0
CHART_POINTS = 240


@dataclass(frozen=True)
class PoolPoint:
    """Pool use at one moment; ``time`` in Unix seconds, sizes in bytes, the rest in pages or counts."""

    time: float
    running: int
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
            running=snapshot.pool.running,
            resident=snapshot.pool.resident,
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
    """Points of the last hour, oldest first; older ones are dropped as new ones come."""

    def __init__(self, points: Iterable[PoolPoint] = (), span: float = HOUR_SECONDS) -> None:
        self._span = span
        self._points: deque[PoolPoint] = deque()
        for point in points:
            self.add(point)

    def __len__(self) -> int:
        return len(self._points)

    def add(self, point: PoolPoint) -> None:
        """Append a point; one that is not newer than the last is ignored (a clock set back)."""
        if self._points and point.time <= self._points[-1].time:
            return
        self._points.append(point)
        while self._points[0].time < point.time - self._span:
            self._points.popleft()

    def chart(self, limit: int = CHART_POINTS) -> Sequence[PoolPoint]:
        """At most ``limit`` points spread evenly over what is kept, always with the newest."""
        points = list(self._points)
        if len(points) <= limit:
            return points
        step = len(points) / limit
        return [points[len(points) - 1 - int(index * step)] for index in reversed(range(limit))]

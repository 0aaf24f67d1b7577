"""What the engine did in the last 15 minutes, for the live plots: rates of counters that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

KEPT_SECONDS = 900.0
RATE_SECONDS = 10.0
"""Rates are over this span: over a single second they would only jitter."""

GENERATED = "vllm:generation_tokens_total"
PROMPT = "vllm:prompt_tokens_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
DRIFT = "tangram_budget_drift"
_WANTED = (GENERATED, PROMPT, RUNNING, WAITING, DRIFT)

COUNTED = ("generated", "takeovers", "reprefilled", "preemptions", "errors")


def parse_values(text: str) -> dict[str, float]:
    """The wanted plain values of a Prometheus page, summed over their label sets."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(_WANTED):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name in _WANTED:
                found[name] = found.get(name, 0.0) + float(value)
    return found


@dataclass(frozen=True)
class EnginePoint:
    """One moment. ``time``: Unix seconds. Latencies in seconds over the last minute, None without any.

    ``queue``: requests that wait, in the app and in the engine. ``counts``: of :data:`COUNTED`, since the
    engine's or the app's start.
    """

    time: float
    running: int
    queue: int
    counts: Mapping[str, float]
    ttft: float | None = None
    ttft_slow: float | None = None
    itl: float | None = None
    itl_slow: float | None = None


@dataclass(frozen=True)
class RatePoint:
    """A moment with ``rates`` per second of what is counted."""

    point: EnginePoint
    rates: Mapping[str, float]


class EngineSeries:
    """Points of the last minutes, oldest first."""

    def __init__(self, kept: float = KEPT_SECONDS) -> None:
        self._kept = kept
        self._points: deque[RatePoint] = deque()

    def __len__(self) -> int:
        return len(self._points)

    def add(self, point: EnginePoint) -> None:
        """Append; one that is not newer than the last is ignored."""
        if self._points and point.time <= self._points[-1].point.time:
            return
        self._points.append(RatePoint(point, self._rates(point)))
        while self._points[0].point.time < point.time - self._kept:
            self._points.popleft()

    def _rates(self, point: EnginePoint) -> dict[str, float]:
        """Growth over the last seconds. A counter that fell was started anew: it grew by what it has."""
        earlier = None
        for kept in reversed(self._points):
            if point.time - kept.point.time > RATE_SECONDS and earlier is not None:
                break
            earlier = kept.point
        if earlier is None:
            return dict.fromkeys(COUNTED, 0.0)
        span = point.time - earlier.time
        rates = {}
        for name in COUNTED:
            grown = point.counts[name] - earlier.counts[name]
            rates[name] = (grown if grown >= 0 else point.counts[name]) / span
        return rates

    def latest(self) -> RatePoint | None:
        """The newest."""
        return self._points[-1] if self._points else None

    def grown(self, name: str, seconds: float) -> float:
        """By how much a counter grew in the last seconds, restarts of the engine included."""
        if not self._points:
            return 0.0
        since = self._points[-1].point.time - seconds
        values = [kept.point.counts[name] for kept in self._points if kept.point.time >= since]
        return sum(
            max(0.0, later - before if later >= before else later) for before, later in pairwise(values)
        )

    def chart(self, limit: int) -> list[RatePoint]:
        """At most ``limit`` points spread over what is kept, always with the newest."""
        points = list(self._points)
        if len(points) <= limit:
            return points
        step = len(points) / limit
        return [points[len(points) - 1 - int(index * step)] for index in reversed(range(limit))]

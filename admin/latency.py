"""Latencies of the engine's last minutes, from its Prometheus histograms.

A histogram only ever grows, so what happened lately is the difference of two readings.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
_WANTED = (TTFT, ITL)
_READINGS = 150


@dataclass(frozen=True)
class Histogram:
    """Cumulative counts by upper bound (seconds), ascending; the last bound is infinite."""

    buckets: tuple[tuple[float, float], ...]

    def since(self, earlier: Histogram | None) -> Histogram:
        """What was added after ``earlier``; all of it when the engine was restarted in between."""
        if earlier is None or [b for b, _ in earlier.buckets] != [b for b, _ in self.buckets]:
            return self
        counts = [
            (bound, now - before)
            for (bound, now), (_, before) in zip(self.buckets, earlier.buckets, strict=True)
        ]
        return self if any(count < 0 for _, count in counts) else Histogram(tuple(counts))

    def quantile(self, share: float) -> float | None:
        """The value below which ``share`` of the observations lie, linear in a bucket, or ``None``."""
        if not self.buckets or self.buckets[-1][1] <= 0:
            return None
        wanted = share * self.buckets[-1][1]
        low_bound, low_count = 0.0, 0.0
        for bound, count in self.buckets:
            if count >= wanted and count > low_count:
                if math.isinf(bound):
                    return low_bound or None
                return low_bound + (bound - low_bound) * (wanted - low_count) / (count - low_count)
            low_bound, low_count = bound, count
        return low_bound


def parse_histograms(text: str) -> dict[str, Histogram]:
    """The wanted histograms of a Prometheus page, summed over their label sets.

    Only the wanted lines are handed to the parser: a page of an engine has thousands of others.
    """
    lines = [line for line in text.splitlines() if line.removeprefix("# TYPE ").startswith(_WANTED)]
    sums: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name.endswith("_bucket") and family.name in _WANTED:
                bounds = sums.setdefault(family.name, {})
                bound = float(sample.labels["le"])
                bounds[bound] = bounds.get(bound, 0.0) + sample.value
    return {name: Histogram(tuple(sorted(bounds.items()))) for name, bounds in sums.items()}


@dataclass
class LatencyWindow:
    """Keeps the readings of some minutes and answers quantiles over them."""

    _readings: deque[Mapping[str, Histogram]] = field(default_factory=lambda: deque(maxlen=_READINGS))

    def add(self, text: str) -> None:
        """Take one Prometheus page."""
        self._readings.append(parse_histograms(text))

    def clear(self) -> None:
        """Forget everything (the engine was replaced)."""
        self._readings.clear()

    def lately(self, name: str, share: float, readings: int) -> float | None:
        """The same over the last so many readings only; ``None`` when nothing was observed in these."""
        if len(self._readings) < 2:
            return None
        last = self._readings[-1].get(name)
        first = self._readings[max(0, len(self._readings) - 1 - readings)].get(name)
        return None if last is None or first is None else last.since(first).quantile(share)

    def quantile(self, name: str, share: float) -> float | None:
        """``share`` quantile in seconds of histogram ``name`` over the window, or ``None`` without data."""
        if not self._readings:
            return None
        last = self._readings[-1].get(name)
        if last is None:
            return None
        first = self._readings[0].get(name) if len(self._readings) > 1 else None
        recent = last.since(first).quantile(share)
        return last.quantile(share) if recent is None else recent

"""Prometheus metrics of the ragged cache, for the engine's own ``/metrics``.

Nothing is counted here: a scrape asks the scheduler and the worker over their sockets, so that nothing is
paid while nobody looks. Where one does not answer in time, its last good figures are served and
``tangram_up`` says so. docs/operations.md says what each metric means and what to alert on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tangram.errors import EngineUnavailable
from tangram.seal_meter import BOUNDS
from tangram.telemetry import KINDS, CacheSnapshot

TIMEOUT_SECONDS = 2.0
"""How long a scrape waits for the scheduler, and again for the worker. Prometheus gives up after 10."""

COUNTERS = {
    "takeovers": "Requests that took an idle conversation's row over.",
    "forks": "Requests that continued a prefix which stayed with another row too.",
    "rewinds": "Requests that resumed before the end of a row.",
    "misses": "Requests that continue a conversation whose row had been evicted.",
    "evictions": "Idle conversations and shared prefixes evicted.",
    "thinned": "Idle conversations that gave up raw tokens for their pages.",
    "prefixes": "Prefixes kept because a second conversation had them.",
    "crowded_steps": "Steps in which requests had waited so long that returning conversations went first.",
    "seals": "Chunks sealed, as the scheduler planned them.",
    "preemptions": "Running requests preempted for want of pages.",
    "reused_tokens": "Prompt tokens that were still in the cache.",
    "reprefilled_tokens": "Tokens computed again that had been in the cache before.",
}
"""The scheduler's counters to what they count. What it does not count is not served."""


class EngineMetrics(Collector):
    """The families of one engine.

    Args:
        scheduler, worker: ask and return the answer, or raise EngineUnavailable. They block.
        page_bytes: bytes of a page.
    """

    def __init__(
        self,
        scheduler: Callable[[], CacheSnapshot],
        worker: Callable[[], dict[str, Any]],
        page_bytes: int,
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._page_bytes = page_bytes
        self._snapshot: CacheSnapshot | None = None
        self._seals: dict[str, Any] | None = None
        self._up = {"scheduler": False, "worker": False}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def scrape(self) -> bytes:
        """Ask both, then the text format. Blocks for at most twice ``TIMEOUT_SECONDS``."""
        up = {"scheduler": True, "worker": True}
        try:
            self._snapshot = self._scheduler()
        except EngineUnavailable:
            up["scheduler"] = False
        try:
            self._seals = self._worker()
        except EngineUnavailable:
            up["worker"] = False
        self._up = up
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The families, from the last good figures. Asks nobody."""
        up = GaugeMetricFamily(
            "tangram_up", "Whether that part of the engine answered this scrape.", labels=("part",)
        )
        for part, answered in self._up.items():
            up.add_metric([part], float(answered))
        yield up
        if self._snapshot is not None:
            yield from _cache_families(self._snapshot)
            yield GaugeMetricFamily("tangram_page_bytes", "Bytes of a page.", self._page_bytes)
        if self._seals is not None:
            ends = [*map(str, BOUNDS), "+Inf"]
            yield HistogramMetricFamily(
                "tangram_seal_seconds",
                "Time in the worker to seal one chunk of one conversation.",
                buckets=list(zip(ends, self._seals["buckets"], strict=True)),
                sum_value=self._seals["seconds"],
            )
            yield from _drift_families(self._seals.get("drift") or {})


def _drift_families(drift: dict[str, Any]) -> Iterator[Metric]:
    """None without a profile; the drift itself only once enough chunks were looked at."""
    if drift.get("drift") is not None:
        yield GaugeMetricFamily(
            "tangram_budget_drift",
            "How far heads' needs by keys lie from the calibration samples', in the samples' own spread.",
            drift["drift"],
        )
    if "chunks" in drift:
        yield CounterMetricFamily(
            "tangram_drift_chunks", "Sealed chunks whose keys were looked at for the drift.", drift["chunks"]
        )


def _cache_families(snapshot: CacheSnapshot) -> Iterator[Metric]:
    pages = GaugeMetricFamily("tangram_pages", "Pages of the pool by what holds them.", labels=("kind",))
    for kind in KINDS:
        pages.add_metric([kind], snapshot.pages.get(kind, 0))
    yield pages
    for name, help_text, value in (
        ("conversations_resident", "Idle conversations kept for their next turn.", snapshot.held("resident")),
        ("sequences_running", "Requests that hold pages and are not idle.", snapshot.held("running")),
        ("prefix_rows", "Shared prefixes kept for conversations to come.", snapshot.held("prefix")),
    ):
        yield GaugeMetricFamily(f"tangram_{name}", help_text, value)
    for name, help_text in COUNTERS.items():
        if name in snapshot.counters:
            yield CounterMetricFamily(f"tangram_{name}", help_text, snapshot.counters[name])

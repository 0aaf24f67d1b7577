"""Prometheus metrics of the ragged cache, for the engine's own ``/metrics``.

Nothing is counted here: a scrape asks the scheduler and the worker over their sockets, so that nothing is
paid while nobody looks. Where one does not answer in time, its last good figures are served and
``tangram_up`` says so. docs/operations.md says what each metric means and what to alert on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tangram.engines import EngineCore, of_each
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


@dataclass
class _Figures:
    """What is known of one core: its last good answers, and whether it answered this scrape."""

    snapshot: CacheSnapshot | None = None
    seals: dict[str, Any] | None = None
    up: dict[str, bool] = field(default_factory=lambda: {"scheduler": False, "worker": False})

    def ask(self, core: EngineCore) -> None:
        """Ask the scheduler, then the worker."""
        self.up = {"scheduler": True, "worker": True}
        try:
            self.snapshot = core.snapshot(timeout=TIMEOUT_SECONDS)
        except EngineUnavailable:
            self.up["scheduler"] = False
        try:
            self.seals = core.worker(timeout=TIMEOUT_SECONDS)
        except EngineUnavailable:
            self.up["worker"] = False


class EngineMetrics(Collector):
    """The families of one engine, each labelled with the core, as vLLM's are (``engine="0"``).

    Args:
        cores: :mod:`tangram.engines`.
        page_bytes: bytes of a page.
    """

    def __init__(self, cores: Sequence[EngineCore], page_bytes: int) -> None:
        self._cores = cores
        self._page_bytes = page_bytes
        self._figures = [_Figures() for _ in cores]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def scrape(self) -> bytes:
        """Ask all cores at once, then the text format. Blocks for at most twice ``TIMEOUT_SECONDS``."""
        of_each(self._cores, lambda core: self._figures[core.index].ask(core))
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The families, from the last good figures. Asks nobody."""
        families: dict[str, Metric] = {}
        for core, figures in enumerate(self._figures):
            for family in self._of(str(core), figures):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()

    def _of(self, engine: str, figures: _Figures) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "tangram_up", "Whether that part of the engine answered this scrape.", labels=("engine", "part")
        )
        for part, answered in figures.up.items():
            up.add_metric([engine, part], float(answered))
        yield up
        if figures.snapshot is not None:
            yield from _cache_families(engine, figures.snapshot)
            yield _one(GaugeMetricFamily, "page_bytes", "Bytes of a page.", engine, self._page_bytes)
        if figures.seals is not None:
            ends = [*map(str, BOUNDS), "+Inf"]
            seals = HistogramMetricFamily(
                "tangram_seal_seconds",
                "Time in the worker to seal one chunk of one conversation.",
                labels=("engine",),
            )
            buckets = list(zip(ends, figures.seals["buckets"], strict=True))
            seals.add_metric([engine], buckets, figures.seals["seconds"])
            yield seals
            yield from _drift_families(engine, figures.seals.get("drift") or {})


def _one(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help_text: str,
    engine: str,
    value: float,
) -> Metric:
    """A family of one value for each core."""
    family = kind(f"tangram_{name}", help_text, labels=("engine",))
    family.add_metric([engine], value)
    return family


def _drift_families(engine: str, drift: dict[str, Any]) -> Iterator[Metric]:
    """None without a profile; the drift itself only once enough chunks were looked at."""
    if drift.get("drift") is not None:
        said = "How far heads' needs by keys lie from the calibration samples', in the samples' own spread."
        yield _one(GaugeMetricFamily, "budget_drift", said, engine, drift["drift"])
    if "chunks" in drift:
        said = "Sealed chunks whose keys were looked at for the drift."
        yield _one(CounterMetricFamily, "drift_chunks", said, engine, drift["chunks"])


def _cache_families(engine: str, snapshot: CacheSnapshot) -> Iterator[Metric]:
    pages = GaugeMetricFamily(
        "tangram_pages", "Pages of the pool by what holds them.", labels=("engine", "kind")
    )
    for kind in KINDS:
        pages.add_metric([engine, kind], snapshot.pages.get(kind, 0))
    yield pages
    for name, help_text, value in (
        ("conversations_resident", "Idle conversations kept for their next turn.", snapshot.held("resident")),
        ("sequences_running", "Requests that hold pages and are not idle.", snapshot.held("running")),
        ("prefix_rows", "Shared prefixes kept for conversations to come.", snapshot.held("prefix")),
    ):
        yield _one(GaugeMetricFamily, name, help_text, engine, value)
    for name, help_text in COUNTERS.items():
        if name in snapshot.counters:
            yield _one(CounterMetricFamily, name, help_text, engine, snapshot.counters[name])

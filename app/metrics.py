"""What the app counts, for Prometheus. One registry per app, so that tests do not share counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.alerts import NAMES
from app.fairness import FairQueue
from app.supervisor import EngineState, EngineSupervisor

_TTFT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_POOL = ("running", "resident", "free", "total")


class Metrics:
    """Counters of requests, replies and tokens, and the engine's state as it is when somebody asks."""

    def __init__(self, supervisor: EngineSupervisor, queue: FairQueue | None = None) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(supervisor))
        if queue is not None:
            self.registry.register(_QueueCollector(queue))
        self._requests = Counter(
            "tangram_chat_requests",
            "HTTP requests by route.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._replies = Counter(
            "tangram_chat_replies", "Replies by how they ended.", ("status",), registry=self.registry
        )
        self._tokens = Counter(
            "tangram_chat_tokens",
            "Tokens of replies: prompt, of these found in the cache, completion.",
            ("kind",),
            registry=self.registry,
        )
        self._ttft = Histogram(
            "tangram_chat_time_to_first_token_seconds",
            "From the message to the first token of its reply; resumed: its history was in the cache.",
            ("turn",),
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._pool = Gauge(
            "tangram_chat_pool_pages", "Pages of the engine's pool.", ("kind",), registry=self.registry
        )

        self._alerts = Gauge(
            "tangram_chat_alert",
            "1 while something needs an administrator, by its name.",
            ("name",),
            registry=self.registry,
        )

    def request(self, method: str, route: str, status: int) -> None:
        self._requests.labels(method, route, str(status)).inc()

    def reply_ended(self, status: str, stats: Mapping[str, Any]) -> None:
        """Count a reply, of the chat or of the stateless API, with the numbers that `Job.measure` gives."""
        self._replies.labels(status).inc()
        for kind in ("prompt", "cached", "completion"):
            self._tokens.labels(kind).inc(stats.get(f"{kind}_tokens") or 0)
        if stats.get("ttft_ms") is not None:
            turn = "resumed" if stats.get("cached_tokens") else "read"
            self._ttft.labels(turn).observe(stats["ttft_ms"] / 1000)

    def pool(self, pool: Mapping[str, Any]) -> None:
        """Take over the `pool` part of the engine's memory report."""
        for kind in _POOL:
            value = pool.get(f"{kind}_pages")
            if isinstance(value, int | float):
                self._pool.labels(kind).set(value)

    def alerts(self, raised: Iterable[str]) -> None:
        """Take over which alerts of `app.alerts` are raised now."""
        now = set(raised)
        for name in NAMES:
            self._alerts.labels(name).set(name in now)

    def replies(self, status: str) -> float:
        """How many replies have ended so."""
        value: float = self._replies.labels(status)._value.get()
        return value

    def forget_pool(self) -> None:
        """There is no engine to ask: no old numbers either."""
        self._pool.clear()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, supervisor: EngineSupervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterable[Metric]:
        status = self._supervisor.status
        state = GaugeMetricFamily(
            "tangram_chat_engine_state", "1 for the state that the engine is in.", labels=["state"]
        )
        for name in EngineState:
            state.add_metric([name.value], 1.0 if status.state is name else 0.0)
        yield state
        restarts = CounterMetricFamily(
            "tangram_chat_engine_restarts", "Restarts of the engine after it died."
        )
        restarts.add_metric([], status.restarts)
        yield restarts


class _QueueCollector(Collector):
    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue

    def collect(self) -> Iterable[Metric]:
        held = GaugeMetricFamily(
            "tangram_chat_queue_requests", "Requests at the engine, and those that wait.", labels=["kind"]
        )
        held.add_metric(["running"], self._queue.running)
        held.add_metric(["waiting"], self._queue.waiting)
        yield held
        refused = CounterMetricFamily(
            "tangram_chat_refused", "Requests refused with 429, by reason.", labels=["reason"]
        )
        for reason, count in self._queue.refused.items():
            refused.add_metric([reason], count)
        yield refused

"""What the HTTP door counts, for Prometheus; the broker's own counts are `broker_metrics`'s.

* Names, labels and texts are the table's (`metric_table`).
* A registry of its own for each app, so that two of them in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from api.http.metric_table import BY_NAME

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


class HttpMetrics:
    def __init__(self) -> None:
        # Each count would have a second series, with the time of its first one.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.requests = self._counter("tierlog_http_requests_total")
        self.seconds = self._histogram("tierlog_http_request_seconds")
        self.errors = self._counter("tierlog_http_errors_total")
        self.under_way = self._gauge("tierlog_http_requests_in_progress")
        self.produced_records = self._counter("tierlog_produced_records_total")
        self.produced_bytes = self._counter("tierlog_produced_bytes_total")
        self.fetched_bytes = self._counter("tierlog_fetched_bytes_total")
        self.fetched_records = self._counter("tierlog_fetched_records_total")
        self.shared_pages = self._counter("tierlog_http_shared_pages_total")
        # Labels are looked up under a lock: what a request needs is looked up once.
        self._answered: dict[tuple[str, str, str], Counter] = {}
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._fetched: dict[str, tuple[Counter, Counter]] = {}

    def answered(self, method: str, path: str, status: str, *, seconds: float) -> None:
        """Count a request. All three are of few values: never text that a client made up."""
        counter = self._answered.get((method, path, status))
        if counter is None:
            counter = self.requests.labels(method, path, status)
            self._answered[method, path, status] = counter
        histogram = self._seconds.get((method, path))
        if histogram is None:
            histogram = self._seconds[method, path] = self.seconds.labels(method, path)
        counter.inc()
        histogram.observe(seconds)

    def fetched(self, tier: str, size_bytes: int, *, records: int = 0) -> None:
        """Count what was read for an answer."""
        counters = self._fetched.get(tier)
        if counters is None:
            counters = self.fetched_bytes.labels(tier), self.fetched_records.labels(tier)
            self._fetched[tier] = counters
        counters[0].inc(size_bytes)
        counters[1].inc(records)

    def sample(self, name: str, value_of: Callable[[], float]) -> None:
        """A gauge whose value is asked for when it is shown."""
        self._gauge(name).set_function(value_of)

    def register(self, collector: Collector) -> None:
        self.registry.register(collector)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        metric = BY_NAME[name]
        return Counter(name, metric.doc, metric.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        metric = BY_NAME[name]
        return Gauge(name, metric.doc, metric.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        metric = BY_NAME[name]
        return Histogram(name, metric.doc, metric.labels, buckets=_SECONDS, registry=self.registry)

"""The Prometheus registry and the metrics of the HTTP server; the broker's metrics are in `broker`.

* Names, labels and help texts are from `table`.
* Each application has its own registry, so that two in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tierlog.api.http.metrics.families import Labels, counter, histogram
from tierlog.api.http.metrics.table import BY_NAME
from tierlog.api.http.problems import INTERNAL, TABLE
from tierlog.host.latency_histogram import LatencyHistogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class HttpMetrics:
    def __init__(self) -> None:
        # Otherwise each counter has a second series, with the time at which it was created.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.errors = self._counter("tierlog_http_errors_total")
        for kind in (*TABLE.values(), INTERNAL):
            self.errors.labels(kind.code)  # starts at 0, so that the first error is an increase
        self.in_progress = self._gauge("tierlog_http_requests_in_progress")
        self.produced_records = self._counter("tierlog_produced_records_total")
        self.produced_bytes = self._counter("tierlog_produced_bytes_total")
        self.shared_pages = self._counter("tierlog_http_shared_pages_total")
        self.requests = RequestCounts()
        self.register(self.requests)

    def sample(self, name: str, value_of: Callable[[], float]) -> None:
        """A gauge whose value is computed at each scrape."""
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


class RequestCounts(Collector):
    """Counts of every request, as plain integers: the Prometheus client's counters take longer than
    finding a batch. Written only on the event loop, read by scrapes.
    """

    def __init__(self) -> None:
        self._finished: dict[Labels, int] = {}
        self._seconds: dict[Labels, LatencyHistogram] = {}
        self.fetched_bytes: dict[str, int] = {}
        self.fetched_records: dict[str, int] = {}

    def finished(self, method: str, path: str, status: str, *, seconds: float) -> None:
        """Count a request. The labels have few values: never text that a client chose."""
        labels = (method, path, status)
        self._finished[labels] = self._finished.get(labels, 0) + 1
        call = (method, path)
        durations = self._seconds.get(call)
        if durations is None:
            durations = self._seconds[call] = LatencyHistogram()
        durations.observe(seconds)

    def fetched(self, tier: str, size_bytes: int, *, records: int = 0) -> None:
        """Count what was read for a response."""
        self.fetched_bytes[tier] = self.fetched_bytes.get(tier, 0) + size_bytes
        self.fetched_records[tier] = self.fetched_records.get(tier, 0) + records

    def describe(self) -> Iterable[Metric]:
        """Nothing: the table has the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        # Copies: a scrape runs in a thread.
        finished, seconds = dict(self._finished), dict(self._seconds)
        yield counter("tierlog_http_requests_total", finished)
        yield histogram(
            "tierlog_http_request_seconds",
            {call: durations.snapshot() for call, durations in seconds.items()},
        )
        for name, by_tier in (
            ("tierlog_fetched_records_total", dict(self.fetched_records)),
            ("tierlog_fetched_bytes_total", dict(self.fetched_bytes)),
        ):
            yield counter(name, {(tier,): count for tier, count in by_tier.items()})

"""The Prometheus registry and the metrics of the HTTP server; the broker's metrics are in `broker`.

* Names, labels and help texts are from `table`.
* Each application has its own registry, so that two in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable
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
from prometheus_client.registry import Collector

from api.http.metrics.request_counts import RequestCounts
from api.http.metrics.table import BY_NAME
from api.http.problems import INTERNAL, TABLE

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

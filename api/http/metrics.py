"""What the HTTP door counts, for Prometheus.

* Labels are bounded: a path is its template, a status its number; topics are not labels here.
* A registry of its own for each app, so that two of them in one process do not mix.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


class HttpMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.requests = Counter(
            "tierlog_http_requests",
            "Requests answered",
            ("method", "path", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "tierlog_http_request_seconds",
            "From the head of a request to the last byte of its answer handed to the kernel",
            ("method", "path"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.under_way = Gauge(
            "tierlog_http_requests_in_progress", "Requests under way", registry=self.registry
        )
        self.produced_records = Counter(
            "tierlog_produced_records", "Records appended over HTTP", registry=self.registry
        )
        self.produced_bytes = Counter(
            "tierlog_produced_bytes", "Bytes of batches appended over HTTP", registry=self.registry
        )
        self.fetched_bytes = Counter(
            "tierlog_fetched_bytes",
            "Bytes of batches fetched over HTTP, by tier",
            ("tier",),
            registry=self.registry,
        )
        self.fetched_records = Counter(
            "tierlog_fetched_records",
            "Records fetched over HTTP as text, by tier",
            ("tier",),
            registry=self.registry,
        )

    def fetched(self, tier: str, size_bytes: int, *, records: int = 0) -> None:
        self.fetched_bytes.labels(tier).inc(size_bytes)
        self.fetched_records.labels(tier).inc(records)

    def text(self) -> bytes:
        return generate_latest(self.registry)

"""Counts of every request, as plain integers: the Prometheus client's counters take longer than
finding a batch. Written only on the event loop, read by scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from api.http.metrics.families import Labels, counter, histogram
from record_format.latency_histogram import LatencyHistogram

BOUNDS_S: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
    60.0,
)


class RequestCounts(Collector):
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
            durations = self._seconds[call] = LatencyHistogram(BOUNDS_S)
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
